"""A step on a GPU never waits between its messages for results of the GPU.

Tensors on torch's meta device have no values, so that reading one raises: an item, a mask, the places of nonzero
values."""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from triton.runtime.jit import JITFunction

from quire.runtime.settings import ConfigurationError, load_settings
from quire_kernels import backends, cuda, ops
from tests.support.fake_cuda import FREE_BYTES, STEP_BYTES, TOTAL_BYTES, FakeCuda
from tests.support.sampling import make_sampling
from tests.support.steps import int32, make_assign, make_batch, make_changes, make_operations, make_step
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.runner import ModelRunner
from worker_svc.first_steps import memory_for_pool
from worker_svc.models.decoder import Decoder
from worker_svc.models.registry import DECODERS
from worker_svc.protocol.stream import Worker
from worker_svc.settings import WorkerSettings
from worker_svc.startup import make_worker, model_geometry
from worker_svc.step import AdmittedStep, LogitRules, SealedBlocks, SetTokens, Step, StepOutput, WorkerLimits
from worker_svc.weights import Loadable, MadeTensors, Placement

GPU = torch.device("cuda", 0)
_META = torch.device("meta")
# Maximum programs of one launch along each dimension.
_LARGEST_GRID = (2**31 - 1, 65535, 65535)


class MetaGpu(TorchFunctionMode):
    """While it is active, tensors for `GPU` are made, and copied between it and the host.

    Attributes:
        cuda: the calls of its streams and graphs.
        launches: kernels by name, each with the stream of its launch.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__()
        self.cuda = FakeCuda()
        self.cuda.install(monkeypatch)
        self.launches: list[tuple[str, str]] = []
        monkeypatch.setattr(JITFunction, "run", self._launching())
        monkeypatch.setattr(backends, "fastest_for", lambda device: cuda)
        monkeypatch.setattr(ops, "block_moves_for", lambda device: cuda)

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = {name: _moved(value) for name, value in (kwargs or {}).items() if name != "pin_memory"}
        if func is torch.Tensor.pin_memory:
            return args[0]
        if func is torch.Tensor.is_pinned:
            return True
        if func is torch.Tensor.copy_ and args[1].is_meta and args[0].is_cpu:
            return args[0].zero_()
        return func(*map(_moved, args), **options)

    def _launching(self) -> Callable[..., None]:
        def run(kernel: JITFunction[Any], *_: Any, grid: tuple[int, ...], **__: Any) -> None:
            assert all(0 < size <= most for size, most in zip(grid, _LARGEST_GRID, strict=False)), grid
            self.launches.append((kernel.__name__, self.cuda.current))

        return run


def _moved(value: Any) -> Any:
    return _META if isinstance(value, torch.device) and value.type == "cuda" else value


# Triton is published only for some platforms.
if importlib.util.find_spec("triton") is None:
    pytest.skip("no Triton", allow_module_level=True)

RULES = LogitRules(
    presence_penalty=0.5,
    frequency_penalty=0.1,
    repetition_penalty=1.1,
    bias_token_ids=int32([3, 4]),
    bias_values=np.array([1, 2], np.float32),
    allowed_token_ids=int32([1, 2, 3, 4]),
    bad_sequences=(int32([3]), int32([1, 2, 3])),
    min_tokens=9,
    stop_token_ids=int32([2]),
    first_excluded=int32([1]),
    sequence_biases=((int32([4]), -np.inf), (int32([1, 3]), 0.5)),
    no_repeat_ngram_size=2,
)
KINDS: list[dict[str, Any]] = [
    {"top_p": 0.9, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 0.0},
    {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "logprobs": 3},
    {"rules": RULES, "logprobs": 0},
    {"num_candidates": 4},
    {"num_candidates": 4, "rules": RULES},
]


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> MetaGpu:
    return MetaGpu(monkeypatch)


def make_model(**fields: Any) -> Decoder:
    model = DECODERS["LlamaForCausalLM"].from_config({**CONFIG, **fields}, Placement(GPU, torch.bfloat16))
    for layer in (module for module in model.modules() if isinstance(module, Loadable)):
        layer.load(MadeTensors(lambda spec: torch.empty(spec.shape, dtype=torch.bfloat16, device=GPU)))
    return model.eval()


def start(*flags: str, **fields: Any) -> Worker:
    settings = load_settings(WorkerSettings, flags, {}, program="quire worker")
    return make_worker(make_model(**fields), settings, DeviceLoop())


def run(worker: Worker, step: Step, *written: int) -> StepOutput:
    assert isinstance(worker.runner, ModelRunner)
    return worker.runner.launch(AdmittedStep(step, int32(written))).wait()


def make_prefill(*lengths: int) -> Step:
    """Sequences in the first rows, each in its own blocks."""
    assign = [make_assign(row, [1] * n, range(300 * row, 300 * row + n // 16 + 1)) for row, n in enumerate(lengths)]
    return make_step(make_changes(assign=assign), make_batch(range(len(lengths)), lengths, [0] * len(lengths)))


def make_decodes(*lengths: int) -> Step:
    return make_step(make_changes(), make_batch(range(len(lengths)), [1] * len(lengths), lengths))


def test_the_pool_gets_what_memory_is_left_when_the_largest_step_runs(gpu: MetaGpu) -> None:
    with gpu:
        pool = start("--max-num-seqs", "3", "--swap-space", "1MiB").info.pool
    left = int(TOTAL_BYTES * 0.9) - (TOTAL_BYTES - FREE_BYTES) - STEP_BYTES
    assert pool.num_gpu_blocks == left // pool.block_bytes
    assert pool.num_host_blocks == (1 << 20) // pool.block_bytes


def test_the_largest_step_has_the_longest_context_that_may_come(gpu: MetaGpu) -> None:
    """Attention joins the pieces of all rows for such a context."""
    with gpu:
        model = make_model()
        gpu.launches.clear()
        memory_for_pool(model, model_geometry(model, None), WorkerLimits(4, 32, 2, 64), 16, 0.9)
    assert "_join_kernel" in {name for name, _ in gpu.launches}


def test_heads_that_the_kernels_do_not_take_are_refused(gpu: MetaGpu) -> None:
    message = "head_dim is 512.*LlamaForCausalLM.*; it must be at most 256 on cuda"
    with gpu, pytest.raises(ConfigurationError, match=message):
        start("--num-gpu-blocks", "10", head_dim=512)


def test_results_leave_on_a_stream_of_their_own(gpu: MetaGpu) -> None:
    with gpu:
        worker = start("--max-num-seqs", "3", "--num-gpu-blocks", "1000", "--swap-space", "0")
        for step in (make_prefill(5, 700), make_decodes(5, 700)):
            gpu.cuda.calls.clear()
            gpu.launches.clear()
            output = run(worker, step)
            assert len(output.token_ids) == 2
            assert (output.timings.cache_operations_us, output.timings.model_us, output.timings.sample_us) == (250,) * 3
            waits, used, *_, waited, _ = gpu.cuda.calls
            results = used.removeprefix("use ")
            assert waits == f"{results} waits for event of default"
            assert waited == f"host waits for event of {results}"
            assert {stream for _, stream in gpu.launches} == {"default"}


def test_decodes_are_replayed_and_prefills_are_launched(gpu: MetaGpu) -> None:
    with gpu:
        worker = start("--max-num-seqs", "3", "--num-gpu-blocks", "1000", "--swap-space", "0", "--cuda-graphs", "on")
        # Graphs for 1, 2 and 3 rows, and for contexts of up to 1024 and 4096 tokens.
        assert gpu.cuda.num_graphs == 6
        assert gpu.cuda.current == "default"
        gpu.cuda.calls.clear()
        run(worker, make_prefill(5, 700))
        assert not any("replay" in call for call in gpu.cuda.calls)
        gpu.launches.clear()
        for lengths in ((5, 700), (6,), (7, 1024)):
            run(worker, make_decodes(*lengths))
    # Graphs are numbered in the order of their recording, the largest first.
    assert [call for call in gpu.cuda.calls if "replay" in call] == [
        "replay graph 4 on default",
        "replay graph 6 on default",
        "replay graph 3 on default",
    ]
    assert gpu.launches == []


def test_a_step_without_rows_seals_and_launches_nothing(gpu: MetaGpu) -> None:
    with gpu:
        worker = start("--max-num-seqs", "3", "--num-gpu-blocks", "1000", "--swap-space", "0", "--cuda-graphs", "on")
        run(worker, make_prefill(5, 700))
        gpu.launches.clear()
        sealed = SealedBlocks(int32([7]), np.ones((1, 32), np.uint8))
        output = run(worker, make_step(make_changes(release=[0, 1]), sealed=sealed))
    assert (output.token_ids.tolist(), gpu.launches) == ([], [])
    assert worker.runner.sealed_blocks().block_ids.tolist() == [7]


def test_swaps_run_beside_the_steps_and_copies_among_them(gpu: MetaGpu) -> None:
    with gpu:
        worker = start("--max-num-seqs", "3", "--num-gpu-blocks", "1000", "--swap-space", "1MiB")
        run(worker, make_prefill(5, 700))
        gpu.launches.clear()
        operations = make_operations(swap_out=[(5, 1)], swap_in=[(2, 9)], copy=[(3, 4)])
        run(worker, make_step(make_changes(release=[1]), make_batch([0], [1], [5]), operations), 0)
    moves = [stream for name, stream in gpu.launches if name == "_move_blocks_kernel"]
    assert len(moves) == 3
    assert moves[0] == moves[1] != "default"
    assert moves[2] == "default"


def test_rows_of_every_kind_are_sampled(gpu: MetaGpu) -> None:
    count = len(KINDS)
    assign = [make_assign(row, [1] * 5, [row], make_sampling(**kind)) for row, kind in enumerate(KINDS)]
    with gpu:
        worker = start("--max-num-seqs", str(count + 1), "--num-gpu-blocks", "1000", "--swap-space", "0")
        batch = make_batch(range(count), [5] * count, [0] * count)
        output = run(worker, make_step(make_changes(assign=assign), batch))
        # All results read as false, so that no row has usable logits.
        assert output.failed_rows == tuple(range(count))
        changes = make_changes(fork=[(0, count)], set_tokens=[SetTokens(3, 1, int32([9, 9]))], deltas=[(0, 1, 4)])
        forked = run(worker, make_step(changes, make_batch([0], [1], [5], [(0, 0), (count, 0)])))
    assert np.array_equal(forked.rows, [0, count])
