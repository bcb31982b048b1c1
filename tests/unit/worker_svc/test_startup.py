import json
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.model_files.model_directory import ModelDirectory
from quire.model_files.model_source import resolve_model
from quire.runtime.settings import ConfigurationError, load_settings
from quire.service.compatibility import ModelFingerprint
from tests.support.graph_recorder import CallingRecorder
from tests.support.models import make_model
from tests.support.tiny_causal_lm import MAX_MODEL_LEN, TinyCausalLM
from tests.unit.worker_svc.models.test_rotation_by_length import SCALED
from tests.unit.worker_svc.models.test_rotation_by_length import load as load_scaled
from worker_svc import draft_setup, pool_setup, startup, thread_binding
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.layer_cut import LayerCut
from worker_svc.draft_setup import DraftPart
from worker_svc.gguf_writer import write_gguf
from worker_svc.models.base import CausalLM
from worker_svc.models.registry import load_model
from worker_svc.pool_setup import kv_namespace, requested_pool_dtype
from worker_svc.settings import WorkerSettings
from worker_svc.startup import choose_device, is_lost, make_worker, model_geometry
from worker_svc.thread_binding import OWN_BINDING, placed_threads, processors_for


def load(*flags: str, **environ: str) -> WorkerSettings:
    return load_settings(WorkerSettings, flags, environ, program="quire worker")


def test_sequences_may_be_kept_shorter_than_the_model_knows_but_not_longer() -> None:
    model = TinyCausalLM()
    assert model_geometry(model, None).max_model_len == MAX_MODEL_LEN
    assert model_geometry(model, 20).max_model_len == 20
    with pytest.raises(ConfigurationError, match="--max-model-len is 49"):
        model_geometry(model, 49)


def make_phi_3(tmp_path: Path, max_model_len: int | None) -> CausalLM:
    """A model for 32 tokens by its first rotation, and for 128 by its extended one."""
    if not (tmp_path / "config.json").exists():
        make_model(tmp_path, SCALED["phi3-longrope"])
    return load_scaled(tmp_path, max_model_len)


def test_sequences_are_longer_than_the_first_rotation_serves_only_where_a_length_is_set(tmp_path: Path) -> None:
    first, longer = make_phi_3(tmp_path, None), make_phi_3(tmp_path, 40)
    assert (model_geometry(first, None).max_model_len, model_geometry(longer, 40).max_model_len) == (32, 40)
    assert str(first.rotation) == (
        "sequences have at most 32 tokens, and the rotation of the first training; --max-model-len 33 to 128 serves "
        "longer ones, with the extended rotation for all sequences"
    )
    assert str(longer.rotation) == (
        "the rotation of all sequences is the one for 40 tokens; answers of sequences up to 32 tokens may be better "
        "with --max-model-len 32"
    )
    with pytest.raises(ConfigurationError, match="--max-model-len is 129; this model has at most 128 positions"):
        model_geometry(make_phi_3(tmp_path, 129), 129)


def test_blocks_of_another_rotation_are_never_taken(tmp_path: Path) -> None:
    fingerprint = ModelFingerprint("a", "b", "c")
    lengths = (None, 20, 32, 33, 128)
    models = [make_phi_3(tmp_path, length) for length in lengths]
    cut = LayerCut(models[0].cache_layers)
    first, *others = [kv_namespace(model, cut, load(), fingerprint).digest() for model in models]
    assert [first == other for other in others] == [True, True, False, False]
    assert others[-1] == others[-2]
    drafts = [DraftPart(model, fingerprint) for model in models]
    of_draft = [kv_namespace(models[0], cut, load(), fingerprint, draft) for draft in drafts]
    assert [each == of_draft[0] for each in of_draft] == [True, True, True, False, False]


def test_cuda_where_there_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(ConfigurationError, match="--device cpu"):
        choose_device("cuda")


def test_each_rank_takes_a_gpu_of_its_own_and_makes_it_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert [choose_device("cuda", rank) for rank in range(3)] == [torch.device("cuda", index) for index in (0, 1, 0)]
    assert chosen == [0, 1, 0]


def test_a_gpu_is_used_only_where_it_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    caplog.set_level("INFO")
    assert [choose_device(name) for name in ("auto", "cpu")] == [torch.device("cpu")] * 2
    assert [record.getMessage() for record in caplog.records] == [
        "--device auto runs on the CPU; torch finds a GPU, NVIDIA H200, which --device cuda uses"
    ]


@pytest.mark.parametrize(
    ("stored", "dtype", "flags", "size"),
    [
        ("BF16", torch.bfloat16, (), "3.0 GiB"),
        ("F32", torch.bfloat16, (), "1.5 GiB"),
        ("F16", torch.float32, (), "6.0 GiB"),
        ("BF16", torch.bfloat16, ("--quantization", "int8-dynamic"), "1.5 GiB"),
        ("BF16", torch.bfloat16, ("--quantization", "int8-weight-only"), None),
        # Codes; only the file says how many bits they have.
        ("I32", torch.bfloat16, (), "3.0 GiB"),
    ],
)
def test_a_model_that_is_larger_than_the_memory_in_the_dtype_that_is_served_is_refused_before_it_is_loaded(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    stored: str,
    dtype: torch.dtype,
    flags: tuple[str, ...],
    size: str | None,
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    num_bytes = 3 << 30
    shape = [1024, num_bytes // 1024 // (4 if "32" in stored else 2)]
    header = json.dumps({"a": {"dtype": stored, "shape": shape, "data_offsets": [0, num_bytes]}}).encode()
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + num_bytes)
    described = ModelDirectory.open(tmp_path)
    if size is not None:
        monkeypatch.setattr(pool_setup, "available_memory", lambda: 1 << 30)
        with pytest.raises(ConfigurationError, match=rf"take {size}; 1\.0 GiB of memory are available"):
            startup.check_weights_fit(described, dtype, load(*flags))
    monkeypatch.setattr(pool_setup, "available_memory", lambda: 7 << 30)
    startup.check_weights_fit(described, dtype, load(*flags))


def test_codes_of_a_gguf_file_are_larger_in_another_dtype_than_bfloat16(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_gguf(resolve_model(None), tmp_path / "m.gguf", "Q4_0", lambda *_: None)
    described, size = ModelDirectory.open(tmp_path / "m.gguf"), (tmp_path / "m.gguf").stat().st_size
    monkeypatch.setattr(pool_setup, "available_memory", lambda: 2 * size)
    startup.check_weights_fit(described, torch.bfloat16, load())
    with pytest.raises(ConfigurationError, match=r"of memory are available"):
        startup.check_weights_fit(described, torch.float32, load())


def test_cuda_graphs_without_cuda_are_refused_before_anything_is_allocated() -> None:
    with pytest.raises(ConfigurationError, match="--cuda-graphs is on"):
        make_worker(TinyCausalLM(), load("--cuda-graphs", "on", "--num-gpu-blocks", "1000000000"), DeviceLoop())


def test_cuda_graphs_are_recorded_before_the_first_step_and_the_scheduler_hears_of_no_block_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    recorder, num_graphs = CallingRecorder(), []
    monkeypatch.setattr(startup, "check_cuda_graphs", lambda model: None)
    monkeypatch.setattr(
        startup, "record_cuda_graphs", lambda runner, device: num_graphs.append(runner.record_graphs(recorder))
    )
    flags = (
        "--cuda-graphs=on",
        "--num-gpu-blocks=12",
        "--block-size=4",
        "--max-num-seqs=3",
        "--multi-step-ms=0",
        "--speculate=off",
    )
    worker = make_worker(TinyCausalLM(), load(*flags), DeviceLoop())
    # Graphs of 1, 2 and 3 rows; the warm-up decodes twice.
    assert num_graphs == [3]
    assert recorder.replays.total() == 2
    assert worker.info.pool.num_gpu_blocks == 12


def test_kinds_of_guesses_that_are_named_beside_auto_are_not_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    kinds = {name: partial(made.append, name) for name in draft_setup.KINDS}
    monkeypatch.setattr(draft_setup, "KINDS", kinds)
    for flags in ("auto", "auto,shared", "off"):
        draft_setup.make_drafter(TinyCausalLM(), load(f"--speculate={flags}"))
        made.append("|")
    assert " ".join(made) == "prediction grammar ngram | prediction grammar shared ngram | |"


@pytest.mark.parametrize("flag", ["--max-num-batched-tokens", "--max-model-len", "--block-size", "--max-num-seqs"])
def test_a_worker_of_the_least_size_starts(flag: str) -> None:
    """Uses the embedded model, whose recorded forward pass has no room for more."""
    settings = load("--num-gpu-blocks", "64", flag, "1")
    model = load_model(resolve_model(settings.model), device=torch.device("cpu"), dtype=torch.float32)
    make_worker(model, settings, DeviceLoop())


@pytest.mark.parametrize(
    ("rank", "size", "num_threads", "cores", "expected"),
    [
        (0, 1, 3, [[1], [4], [5]], [1, 4, 5]),
        # Ranks of one machine use different cores.
        (0, 2, 2, [[0], [1], [2], [3]], [0, 1]),
        (1, 2, 2, [[0], [1], [2], [3]], [2, 3]),
        # If cores run two threads, each thread here gets a core, or all of them are used.
        (0, 1, 2, [[0, 2], [1, 3]], [0, 1]),
        (1, 2, 1, [[0, 2], [1, 3]], [1]),
        (0, 1, 4, [[0, 2], [1, 3]], [0, 2, 1, 3]),
        (0, 1, 1, [[0, 1]], [0]),
        # More or fewer threads than cores are not bound, nor is a single processor, nor an unknown machine.
        (0, 1, 1, [[0], [1]], []),
        (0, 1, 3, [[0, 2], [1, 3]], []),
        (0, 1, 1, [[0]], []),
        (0, 1, 2, [], []),
    ],
)
def test_as_many_threads_as_cores_take_one_each(
    rank: int, size: int, num_threads: int, cores: list[list[int]], expected: list[int]
) -> None:
    assert list(processors_for(rank, size, num_threads, cores)) == expected


@pytest.mark.parametrize(
    ("flags", "environ", "places"),
    [
        ({}, {}, "{0},{3}"),
        ({"num_threads": 2}, {"OMP_NUM_THREADS": "1"}, "{0},{3}"),
        ({"num_threads": 1, "tensor_parallel_size": 2, "tensor_parallel_rank": 1}, {}, "{3}"),
        ({"num_threads": 1}, {}, None),
        ({}, {"OMP_NUM_THREADS": "2"}, None),
        ({}, {"GOMP_CPU_AFFINITY": "0"}, None),
        ({"device": "cuda"}, {}, None),
        ({"thread_binding": "off"}, {}, None),
    ],
)
def test_open_mp_has_a_place_for_each_thread_while_it_is_imported(
    monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], environ: dict[str, str], places: str | None
) -> None:
    for name in (*OWN_BINDING, "OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    restored: list[Collection[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 0})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, processors: restored.append(processors))
    monkeypatch.setattr(thread_binding, "cores", lambda processors: [[each] for each in sorted(processors)])
    monkeypatch.setattr(thread_binding, "in_nodes_of", lambda processors, available: available)
    monkeypatch.setattr(thread_binding, "num_processors", lambda: 2)
    with placed_threads(WorkerSettings(**flags)):
        assert os.environ.get("OMP_PLACES") == places
    assert "OMP_PLACES" not in os.environ
    assert restored == ([] if places is None else [{0, 3}])


@pytest.mark.parametrize("lost", [False, True])
def test_a_gpu_is_lost_when_waiting_for_it_fails_and_a_processor_never(
    monkeypatch: pytest.MonkeyPatch, lost: bool
) -> None:
    def synchronize(device: torch.device) -> None:
        assert device == torch.device("cuda", 1)
        if lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    assert is_lost(torch.device("cuda", 1)) == lost
    assert not is_lost(torch.device("cpu"))


def test_a_pool_of_int8_is_refused_on_another_device() -> None:
    model = TinyCausalLM()
    assert requested_pool_dtype("int8", model) == torch.int8
    assert requested_pool_dtype("auto", model) == model.dtype
    model.device = torch.device("cuda")
    with pytest.raises(ConfigurationError, match="--kv-cache-dtype is int8, which is for cpu, and the device is cuda"):
        requested_pool_dtype("int8", model)


def make_with_states(directory: Path) -> CausalLM:
    make_model(directory, "qwen3.5")
    return load_model(directory, device=torch.device("cpu"), dtype=torch.float32)


def test_a_worker_whose_layers_keep_states_has_blocks_for_them_and_for_drafts(tmp_path: Path) -> None:
    model = make_with_states(tmp_path)
    info = make_worker(model, load("--max-num-seqs", "2", "--block-size", "4"), DeviceLoop()).info
    assert model.state is not None
    assert info.pool.state_blocks == model.state.num_blocks(info.pool.block_bytes)
    # The blocks that two sequences of 512 tokens need, each with its state and a checkpoint.
    assert info.pool.num_gpu_blocks == 2 * (512 // 4 + 2 * info.pool.state_blocks)
    assert (info.limits.max_drafts, info.limits.max_passes) == (7, 8)


@pytest.mark.parametrize(("block_size", "num_windowed"), [(4, 2), (1, 0)])
def test_layers_with_a_window_next_to_states_keep_its_tokens_if_that_takes_less_memory(
    block_size: int, num_windowed: int, tmp_path: Path
) -> None:
    make_model(tmp_path, "lfm3")
    model = load_model(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16)
    pool = make_worker(model, load("--max-num-seqs=2", f"--block-size={block_size}"), DeviceLoop()).info.pool
    assert [each.window for each in model.cache_layers] == [20, None, 20]
    assert pool.groups.num_windowed == num_windowed
    assert pool.state_blocks


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ("--max-num-seqs=7", "--max-num-batched-tokens=8"),
            r"--max-num-batched-tokens is 8; .* at least --max-num-seqs \+ 2 \(9\): raise it, or lower --max-num-seqs",
        ),
        (("--num-gpu-blocks=12",), r"the KV pool has 12 blocks; .* two states of 6 blocks .* at least 13: raise"),
    ],
)
def test_sizes_that_no_scheduler_can_use_with_states_are_refused(
    flags: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_worker(make_with_states(tmp_path), load(*flags), DeviceLoop())
