"""LoRA adapters of a model give the same results as if merged into its weights, each row with its own."""

import copy
import functools
import json
import re
import shutil
import threading
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from quire.model_files.adapter_files import UnusableAdapterError, read_adapter
from quire_kernels.packed_weight import Quantization
from tests.support.adapters import ATTENTION, make_adapter, merge_adapter
from tests.support.cpu_kernels import torch_threads, without_packed_products
from tests.support.models import VOCAB_SIZE, make_model
from tests.support.paged import PagedRunner, Span
from tests.support.tiers import parametrize_in_turn
from worker_svc.loaded_adapters import AdapterSlots
from worker_svc.models.base import CausalLM
from worker_svc.models.registry import load_model

CPU = torch.device("cpu")
FAMILIES = (
    *("llama-gqa-untied-32", "llama-mqa-80", "mistral-sliding", "qwen2-tied", "qwen3", "gpt2-tied-32"),
    *("opt-pre-norm-32", "opt-post-norm-projected-64", "phi3", "qwen2-moe"),
    *("glm4", "granite", "olmo2", "cohere2-alternating", "starcoder2", "glm4-moe", "deepseek-v3"),
    *("gemma4-shared", "gemma3n-shared"),
)
NUM_ADAPTERS = 3
LAYER = "base_model.model.model.layers.1"
STEPS = (
    (Span(0, 0, 20), Span(1, 0, 1), Span(2, 0, 7)),
    (Span(2, 7, 9), Span(0, 20, 21), Span(3, 0, 30)),
    (Span(0, 21, 22), Span(1, 1, 2), Span(2, 9, 10), Span(3, 30, 31)),
)


class Made:
    """A model, and adapters of it, in directories."""

    def __init__(self, directory: Path, family: str) -> None:
        self.directory = directory / "model"
        self.plain = model = make_model(self.directory, family)
        ranks = (8, 3, 64)
        self.adapters = [
            make_adapter(directory / f"adapter-{number}", model, rank=rank, alpha=2.0 * rank, seed=number)
            for number, rank in enumerate(ranks)
        ]

    def merged(self, slot: int) -> PreTrainedModel:
        return merge_adapter(copy.deepcopy(self.plain), self.adapters[slot - 1]) if slot else self.plain

    def load(
        self, dtype: torch.dtype = torch.float32, quantization: Quantization = Quantization.NONE, max_rank: int = 64
    ) -> tuple[CausalLM, AdapterSlots]:
        model = load_model(self.directory, device=CPU, dtype=dtype, quantization=quantization)
        slots = AdapterSlots(model, NUM_ADAPTERS, max_rank)
        for slot, directory in enumerate(self.adapters):
            slots.put(slot, slots.load(directory, read_adapter(directory).digest))
        return model, slots


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    return functools.cache(lambda family: Made(tmp_path_factory.mktemp(family), family))


def make_runner(model: CausalLM, adapter_slots: Sequence[int] = (1, 0, 2, 3)) -> PagedRunner:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, VOCAB_SIZE, (40,), generator=generator).tolist() for _ in adapter_slots]
    runner = PagedRunner(model, sequences, block_size=5)
    runner.adapter_slots = list(adapter_slots)
    return runner


def assert_alone_as_together(model: CausalLM, adapter_slots: Sequence[int] = (1, 0, 2, 3)) -> None:
    """A row has the same bits in a batch as by itself, and a row without an adapter has the model's bits."""
    together = make_runner(model, adapter_slots)
    alone = [make_runner(model, adapter_slots) for _ in adapter_slots]
    for spans in STEPS:
        logits = together.step(*spans)
        start = 0
        for span in spans:
            end = start + span.end - span.start
            assert torch.equal(alone[span.row].step(span), logits[start:end])
            start = end


@parametrize_in_turn("family, torchs", FAMILIES, [(False,), (True,)])
def test_rows_of_one_batch_are_as_if_each_adapter_were_merged(
    family: str, torchs: bool, make: Callable[[str], Made]
) -> None:
    made = make(family)
    if torchs:
        with without_packed_products():
            model, _ = made.load()
    else:
        model, _ = made.load()
    runner = make_runner(model)
    logits: list[list[torch.Tensor]] = [[] for _ in runner.sequences]
    for spans in STEPS:
        found = runner.step(*spans).split([span.end - span.start for span in spans])
        for span, each in zip(spans, found, strict=True):
            logits[span.row].append(each)
    for row, slot in enumerate(runner.adapter_slots):
        actual = torch.cat(logits[row])
        with torch.inference_mode():
            expected = made.merged(slot)(torch.tensor([runner.sequences[row][: len(actual)]])).logits[0]
        torch.testing.assert_close(actual, expected, rtol=2e-4, atol=2e-4)
        if slot:
            with torch.inference_mode():
                plain = made.merged(0)(torch.tensor([runner.sequences[row][: len(actual)]])).logits[0]
            assert (expected - plain).abs().max() > 0.1, "it adapts"


@parametrize_in_turn("family, dtype", FAMILIES, [(torch.bfloat16,), (torch.float32,)])
def test_bits_of_a_row_do_not_depend_on_its_neighbours(
    family: str, dtype: torch.dtype, make: Callable[[str], Made]
) -> None:
    model, _ = make(family).load(dtype)
    assert_alone_as_together(model)
    for threads in (1, 2):
        with torch_threads(threads):
            assert_alone_as_together(model, (3, 3, 0, 3))


@pytest.mark.parametrize("quantization", [Quantization.INT8_WEIGHT_ONLY, Quantization.INT8_DYNAMIC])
def test_adapters_add_to_int8_weights(quantization: Quantization, make: Callable[[str], Made]) -> None:
    made = make("qwen3")
    model, _ = made.load(torch.bfloat16, quantization)
    assert_alone_as_together(model)
    adapted, plain = make_runner(model), make_runner(model, (0, 0, 0, 0))
    exact, _ = made.load()
    exact_adapted, exact_plain = make_runner(exact), make_runner(exact, (0, 0, 0, 0))
    for spans in STEPS:
        actual = adapted.step(*spans) - plain.step(*spans)
        expected = exact_adapted.step(*spans) - exact_plain.step(*spans)
        assert torch.nn.functional.cosine_similarity(actual.flatten(), expected.flatten(), dim=0) > 0.98


def test_a_slot_is_emptied_and_filled_anew(make: Callable[[str], Made]) -> None:
    made = make("qwen3")
    model, slots = made.load()
    before = slots.num_bytes
    plain, first = (make_runner(model, [slot]).step(Span(0, 0, 9)) for slot in (0, 1))
    assert not torch.allclose(plain, first)
    slots.put(0, None)
    assert torch.equal(make_runner(model, [1]).step(Span(0, 0, 9)), plain)
    assert 0 < slots.num_bytes < before
    slots.put(0, slots.load(made.adapters[0], read_adapter(made.adapters[0]).digest))
    assert torch.equal(make_runner(model, [1]).step(Span(0, 0, 9)), first)
    assert slots.num_bytes == before
    slots.clear()
    assert torch.equal(make_runner(model, [3]).step(Span(0, 0, 9)), plain)
    assert slots.num_bytes == 0


def test_adapters_of_some_layers_take_the_memory_of_those(make: Callable[[str], Made], tmp_path: Path) -> None:
    made = make("llama-gqa-untied-32")
    _, slots = made.load(torch.bfloat16)
    some = make_adapter(tmp_path, made.merged(0), rank=8, targets=("q_proj",))
    slots.clear()
    slots.put(1, slots.load(some, read_adapter(some).digest))
    modules = read_adapter(some).modules.values()
    assert slots.num_bytes == sum(each.rank * (each.num_inputs + each.num_outputs) for each in modules) * 2


def failure_of(slots: AdapterSlots, directory: Path) -> str:
    with pytest.raises(UnusableAdapterError) as caught:
        slots.load(directory, read_adapter(directory).digest)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_loads_that_do_not_end_hold_up_no_other_until_there_are_too_many(
    make: Callable[[str], Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make("llama-mqa-80")
    (_, slots), directory, gone = made.load(), made.adapters[0], threading.Event()
    load, digest = slots.load, read_adapter(directory).digest
    monkeypatch.setattr(slots, "load", lambda *_: gone.wait())
    hung = [slots.start_load(directory, digest) for _ in range(15)]
    monkeypatch.setattr(slots, "load", load)
    assert slots.start_load(directory, digest).result(60).adapter == read_adapter(directory)
    monkeypatch.setattr(slots, "load", lambda *_: gone.wait())
    hung.append(slots.start_load(directory, digest))
    with pytest.raises(UnusableAdapterError, match="16 loads before it do not end; restart this worker"):
        slots.start_load(directory, digest).result(60)
    gone.set()
    assert all(each.result(60) for each in hung)


@pytest.mark.parametrize("name", ["model.language_model.layers", "language_model.model.layers", "layers"])
def test_modules_of_the_language_model_within_another_model_are_known(
    make: Callable[[str], Made], tmp_path: Path, name: str
) -> None:
    """Names of Gemma 3 with images, in transformers 5 and before; the last is of an adapter of the base model."""
    made = make("llama-mqa-80")
    _, slots = made.load()
    shutil.copytree(made.adapters[0], tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({key.replace("model.layers", name): tensor for key, tensor in load_file(file).items()}, file)
    loaded, same = (slots.load(each, read_adapter(each).digest) for each in (file.parent, made.adapters[0]))
    assert loaded.adapter.modules != same.adapter.modules
    assert [linear for linear, _ in loaded.packed] == [linear for linear, _ in same.packed]
    if name == "layers":
        spelled = [f"{each}.0.self_attn.q_proj" for each in ("layers", "model.layers")]
        keys = {f"base_model.model.{each}.lora_{side}.weight": each for each in spelled for side in "AB"}
        tensors = load_file(file)
        save_file({key: tensors[key.replace(each, spelled[0])].clone() for key, each in keys.items()}, file)
        assert f"{spelled[0]} and {spelled[1]} both name {spelled[1]}" in failure_of(slots, file.parent)


@pytest.mark.parametrize("form", ["shards", "pickle"])
def test_weights_may_be_in_several_files_or_in_one_of_torch(
    make: Callable[[str], Made], tmp_path: Path, form: str
) -> None:
    made = make("llama-mqa-80")
    model, slots = made.load()
    directory = shutil.copytree(made.adapters[0], tmp_path / "adapter")
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    file.unlink()
    if form == "pickle":
        torch.save(tensors, file.with_suffix(".bin"))
    else:
        shards = ["adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors"]
        weight_map = {name: shards[number % 2] for number, name in enumerate(tensors)}
        for shard in shards:
            save_file({name: tensors[name] for name in tensors if weight_map[name] == shard}, directory / shard)
        (directory / f"{file.name}.index.json").write_text(json.dumps({"weight_map": weight_map}))
    read = read_adapter(directory)
    assert read.modules == read_adapter(made.adapters[0]).modules
    slots.put(1, slots.load(directory, read.digest))
    one, same = (make_runner(model, [slot]).step(Span(0, 0, 9)) for slot in (1, 2))
    assert torch.equal(one, same)
    for damaged in read.files:
        damaged.write_bytes(damaged.read_bytes()[:-1])
        with pytest.raises(UnusableAdapterError, match=r"adapter.*(safetensors file|only tensors)"):
            slots.load(directory, read.digest)


@pytest.mark.parametrize(
    ("part", "count", "merged", "first"),
    [("self_attn.k_proj", 64, "self_attn.qkv_proj", 64), ("mlp.up_proj", 96, "mlp.gate_up_proj", 96)],
)
def test_parts_of_merged_layers_are_adapted_apart(
    make: Callable[[str], Made], tmp_path: Path, part: str, count: int, merged: str, first: int
) -> None:
    """Such adapters of Phi-3 were trained on weights that had been split."""
    model, slots = make("phi3-partial").load()
    a, b = torch.randn(2, 64), torch.randn(count, 2)
    padded = torch.nn.functional.pad(b, (0, 0, first, 192 - first - count))
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 2}')
    logits = [make_runner(model, [0]).step(Span(0, 0, 9))]
    for name, rows in ((part, b), (merged, padded)):
        tensors = {f"{LAYER}.{name}.lora_A.weight": a, f"{LAYER}.{name}.lora_B.weight": rows}
        save_file(tensors, tmp_path / "adapter_model.safetensors")
        slots.put(0, slots.load(tmp_path, read_adapter(tmp_path).digest))
        logits.append(make_runner(model, [1]).step(Span(0, 0, 9)))
    torch.testing.assert_close(logits[1], logits[2], rtol=1e-4, atol=1e-4)
    assert (logits[0] - logits[1]).abs().max() > 0.1
    of_both = {
        f"{LAYER}.{name}.lora_{side}.weight": x.clone()
        for name, rows in ((part, b), (merged, padded))
        for side, x in (("A", a), ("B", rows))
    }
    save_file(of_both, tmp_path / "adapter_model.safetensors")
    assert re.search(rf"{part} is a part of .*{merged}, and both are there", failure_of(slots, tmp_path))


def test_an_adapter_of_another_model_is_refused(make: Callable[[str], Made], tmp_path: Path) -> None:
    _, slots = make("llama-gqa-untied-32").load()
    assert "has 192 inputs and 160 outputs; this model has 192 and 128" in failure_of(
        slots, make("llama-mqa-80").adapters[0]
    )
    of_another = failure_of(slots, make("opt-pre-norm-32").adapters[0])
    assert "adapts model.decoder.layers.0.fc1, which is no linear layer of this model (LlamaForCausalLM)" in of_another


def test_an_adapter_that_torchs_tables_have_copied_takes_no_other_memory(make: Callable[[str], Made]) -> None:
    made = make("llama-gqa-untied-32")
    with without_packed_products():
        _, slots = made.load()
    loaded = slots.load(made.adapters[0], read_adapter(made.adapters[0]).digest)
    tensors = [weakref.ref(part.a) for _, packed in loaded.packed for part in packed.parts if part is not None]
    num_bytes = slots.num_bytes
    slots.put(0, loaded)
    del loaded
    assert tensors
    assert all(tensor() is None for tensor in tensors)
    assert slots.num_bytes == num_bytes > 0


def test_a_rank_above_the_maximum_is_refused(make: Callable[[str], Made]) -> None:
    made = make("llama-gqa-untied-32")
    model = load_model(made.directory, device=CPU, dtype=torch.float32)
    assert "has rank 8; this worker takes at most 4, see --max-adapter-rank" in failure_of(
        AdapterSlots(model, 1, 4), made.adapters[0]
    )


@pytest.mark.parametrize("number", [1e5, torch.nan])
def test_numbers_that_are_not_finite_in_the_dtype_of_the_model_are_refused(
    number: float, make: Callable[[str], Made], tmp_path: Path
) -> None:
    """Torch's tables multiply all slots with all tokens, so infinity in one slot would be NaN in other slots' rows."""
    made = make("llama-gqa-untied-32")
    model, slots = made.load(torch.float16)
    rows = make_runner(model, [1])
    directory = make_adapter(tmp_path, made.merged(0), targets=ATTENTION)
    file = directory / "adapter_model.safetensors"
    tensors = load_file(file)
    next(each for name, each in tensors.items() if "lora_B" in name)[0, 0] = number
    save_file(tensors, file)
    assert "has numbers not finite in float16" in failure_of(slots, directory)
    assert rows.step(Span(0, 0, 9)).isfinite().all()


@pytest.mark.parametrize("is_packed", [True, False])
def test_an_adapter_that_could_not_be_put_leaves_nothing_in_its_slot(
    make: Callable[[str], Made], is_packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make("llama-gqa-untied-32")
    with nullcontext() if is_packed else without_packed_products():
        model, slots = made.load()
    loaded = slots.load(made.adapters[0], read_adapter(made.adapters[0]).digest)
    slots.clear()
    plain = make_runner(model, [1]).step(Span(0, 0, 9))
    with monkeypatch.context() as patch:
        patch.setattr(loaded.packed[-1][0].adapters, "put", Mock(side_effect=RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            slots.put(0, loaded)
    slots.put(0, None)
    assert torch.equal(make_runner(model, [1]).step(Span(0, 0, 9)), plain)
    assert slots.num_bytes == 0


def test_files_of_another_digest_are_refused(make: Callable[[str], Made]) -> None:
    made = make("llama-gqa-untied-32")
    _, slots = made.load()
    with pytest.raises(UnusableAdapterError, match="have changed"):
        slots.load(made.adapters[0], read_adapter(made.adapters[1]).digest)


def test_adapter_of_the_projections_of_latents_is_refused(tmp_path: Path) -> None:
    model = make_model(tmp_path / "model", "deepseek-v3")
    adapter = make_adapter(tmp_path / "adapter", model, targets=("o_proj", "kv_b_proj"))
    slots = AdapterSlots(load_model(tmp_path / "model", device=CPU, dtype=torch.float32), 1, 8)
    with pytest.raises(UnusableAdapterError, match=r"kv_b_proj, .*: latent attention never computes its outputs"):
        slots.load(adapter, read_adapter(adapter).digest)
