"""A recorded forward pass gives the same bits as the model, for any numbers of tokens and rows."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from quire.model_files.adapter_files import read_adapter
from quire_kernels.int8 import line_bytes
from quire_kernels.packed_weight import Quantization
from quire_kernels.recording import NotRecordableError
from tests.support.adapters import make_adapter
from tests.support.cpu_kernels import ISAS, torch_threads, without_packed_products
from tests.support.models import NATIVE, VOCAB_SIZE, make_model
from tests.support.paged import PagedRunner, Span
from tests.support.tiers import is_third_tier, parametrize_in_turn
from worker_svc.device.kv_pool import KvPool
from worker_svc.device.replay import RecordedForward, make_decodes, make_forward, room_for
from worker_svc.loaded_adapters import AdapterSlots
from worker_svc.models.base import CausalLM, NativeCausalLM
from worker_svc.models.registry import load_model
from worker_svc.step import PoolGeometry, WorkerLimits

BLOCK_SIZE, MAX_MODEL_LEN = 5, 64
LIMITS = WorkerLimits(max_num_rows=4, max_num_batched_tokens=90, max_steps_in_flight=2, max_logprobs=0)
STEPS = (
    (Span(0, 0, 30), Span(1, 0, 1), Span(2, 0, 16)),
    (Span(2, 16, 17), Span(0, 30, 59), Span(3, 0, 60)),
    (Span(0, 59, 60),),
    (Span(1, 1, 2), Span(2, 17, 18), Span(3, 60, 61)),
)

Directories = Callable[[str], Path]

needs_library = pytest.mark.skipif(not ISAS, reason="there is no library of kernels for the CPU")


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Directories:
    """Makes the directory of a family or a shape on first use."""

    @functools.cache
    def make(name: str) -> Path:
        directory = tmp_path_factory.mktemp(name)
        make_model(directory, name)
        return directory

    return make


def load(
    directory: Path, dtype: torch.dtype = torch.bfloat16, quantization: Quantization = Quantization.NONE
) -> CausalLM:
    return load_model(directory, device=torch.device("cpu"), dtype=dtype, quantization=quantization)


def make_runner(model: CausalLM) -> PagedRunner:
    generator = torch.Generator().manual_seed(5)
    sequences = [torch.randint(3, VOCAB_SIZE, (64,), generator=generator).tolist() for _ in range(4)]
    return PagedRunner(model, sequences, block_size=BLOCK_SIZE)


def pool_of(runner: PagedRunner) -> KvPool:
    pool, model = runner.pools[0], runner.model
    geometry = PoolGeometry(
        BLOCK_SIZE, pool.shape[1], 0, model.num_layers, model.num_kv_heads, model.head_dim, str(pool.dtype), 0
    )
    return KvPool(geometry, tuple(runner.pools), ())


def record(runner: PagedRunner) -> RecordedForward:
    assert isinstance(runner.model, NativeCausalLM)
    # Twice a sequence's blocks, since `PagedRunner` gives each row spare ones.
    room = room_for(runner.model, pool_of(runner), 2 * MAX_MODEL_LEN, num_tokens=90, num_rows=4)
    return RecordedForward(runner.model, room)


def assert_same_when_recorded(
    model: CausalLM, *, with_int8_pool: bool = False, nums_threads: tuple[int, ...] = (1, 2)
) -> None:
    for threads in nums_threads:
        plain, recorded = make_runner(model), make_runner(model)
        if with_int8_pool:
            for runner in (plain, recorded):
                shape = (*runner.pools[0].shape[:-1], line_bytes(model.head_dim))
                runner.pools = [torch.zeros(shape, dtype=torch.int8) for _ in runner.pools]
        recorded.forward = record(recorded)
        with torch_threads(threads):
            for spans in STEPS:
                assert torch.equal(recorded.step(*spans), plain.step(*spans))
        for mine, theirs in zip(recorded.pools, plain.pools, strict=True):
            assert torch.equal(mine.nan_to_num(), theirs.nan_to_num())


@needs_library
@pytest.mark.parametrize("quantization", Quantization)
def test_int8_in_the_pool_and_the_weights_is_recorded_too(quantization: Quantization, directories: Directories) -> None:
    assert_same_when_recorded(load(directories("qwen3"), quantization=quantization), with_int8_pool=True)


WITH_EXPERTS = [
    name
    for name, family in NATIVE.items()
    if "moe" in name or name in ("mixtral", "minimax-m2") or "n_routed_experts" in family.fields
]
# torch multiplies by the weights of each head, and squares; it mixes residual streams; it clamps, and chooses among
# experts by a sparse mixer.
OF_TORCH = (
    *("cohere-head-norms", "stablelm-head-norms", "stablelm-one-head-of-keys"),
    *("arcee", "nemotron", "jais2", "gemma3n-shared"),
)
EXPERTS_OF_TORCH = ("phi-moe", "olmo-clamped-moe")
RECORDED = [family for family in NATIVE if family not in (*WITH_EXPERTS, *OF_TORCH)]
# torch pads the inner features of MLPs that all tokens have: in bfloat16 for several families, in float32 for this one.
PADDED_IN_FLOAT32 = "qwen2-moe-sliding-sparse"
RECORDED_IN_FLOAT32 = [name for name in WITH_EXPERTS if name not in (*EXPERTS_OF_TORCH, PADDED_IN_FLOAT32)]


@needs_library
@pytest.mark.parametrize("family", ["qwen3", "gpt2-tied-32"])
def test_a_recording_has_the_adapters_of_each_step(family: str, tmp_path: Path) -> None:
    whole = make_model(tmp_path / "model", family)
    model = load(tmp_path / "model")
    plain, recorded, without = make_runner(model), make_runner(model), make_runner(model)
    slots = AdapterSlots(model, 2, 16)
    recorded.forward = record(recorded)
    for slot in range(2):
        directory = make_adapter(tmp_path / str(slot), whole, rank=5 + slot, seed=slot)
        slots.put(slot, slots.load(directory, read_adapter(directory).digest))
    for runner in (plain, recorded):
        runner.adapter_slots = [2, 0, 1, 2]
    for spans in (*STEPS, (Span(1, 2, 3),)):
        logits, expected = recorded.step(*spans), without.step(*spans)
        assert torch.equal(logits, plain.step(*spans))
        start = 0
        for span in spans:
            end = start + span.end - span.start
            assert torch.equal(logits[start:end], expected[start:end]) is (span.row == 1)
            start = end


SHAPES_OF_OTHERS = ("llama-gqa-untied-32", "gpt2-untied-64", "gpt2-80", "opt-pre-norm-32", "opt-untied-80")


@needs_library
@parametrize_in_turn(
    "family, dtype, threads",
    [*RECORDED, *SHAPES_OF_OTHERS, "opt-post-norm-projected-64"],
    [(dtype, threads) for threads in (1, 2) for dtype in (torch.bfloat16, torch.float32)],
)
def test_hidden_states_are_those_of_the_model(
    family: str, dtype: torch.dtype, threads: int, directories: Directories
) -> None:
    assert_same_when_recorded(load(directories(family), dtype), nums_threads=(threads,))


@needs_library
@parametrize_in_turn("family, threads", RECORDED if is_third_tier() else RECORDED[::4], [(2,), (1,)])
def test_logits_of_decodes_are_those_of_the_model(family: str, threads: int, directories: Directories) -> None:
    model = load(directories(family))
    plain, recorded = make_runner(model), make_runner(model)
    decodes = make_decodes(model, pool_of(recorded), 2 * MAX_MODEL_LEN, LIMITS)
    assert decodes is not None
    with torch_threads(threads):
        for spans in STEPS:
            expected = plain.step(*spans)
            if all(span.end - span.start == 1 for span in spans):
                assert torch.equal(decodes(recorded.inputs(*spans)), expected)
            else:
                recorded.step(*spans)


@pytest.mark.parametrize("shape", ["llama-gqa-untied-32", "opt-post-norm-projected-64"])
def test_a_model_of_other_operations_runs_as_it_is(
    shape: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_model(tmp_path, shape)
    with without_packed_products():
        model = load(tmp_path)
    runner = make_runner(model)
    with caplog.at_level(logging.DEBUG, "worker_svc"):
        assert make_forward(model, pool_of(runner), MAX_MODEL_LEN, LIMITS) is model
    assert "operations of the model run one by one" in caplog.text
    with pytest.raises(NotRecordableError):
        record(runner)
    assert make_decodes(model, pool_of(runner), MAX_MODEL_LEN, LIMITS) is None


@needs_library
@parametrize_in_turn("family, threads", RECORDED_IN_FLOAT32, [(1,), (2,)])
def test_the_choice_of_experts_is_recorded(family: str, threads: int, directories: Directories) -> None:
    assert_same_when_recorded(load(directories(family), torch.float32), nums_threads=(threads,))


@needs_library
@pytest.mark.parametrize("quantization", Quantization)
def test_experts_are_recorded_too_where_they_are_rounded(quantization: Quantization, directories: Directories) -> None:
    assert_same_when_recorded(load(directories("qwen3-moe"), quantization=quantization))


@needs_library
def test_decodes_of_a_model_with_experts_are_recorded(directories: Directories) -> None:
    model = load(directories("qwen3-moe"))
    assert make_decodes(model, pool_of(make_runner(model)), 2 * MAX_MODEL_LEN, LIMITS) is not None


@pytest.mark.parametrize("family", EXPERTS_OF_TORCH)
def test_a_model_with_experts_that_torch_computes_runs_as_it_is(family: str, directories: Directories) -> None:
    model = load(directories(family))
    pool = pool_of(make_runner(model))
    assert make_forward(model, pool, MAX_MODEL_LEN, LIMITS) is model
    assert make_decodes(model, pool, MAX_MODEL_LEN, LIMITS) is None
