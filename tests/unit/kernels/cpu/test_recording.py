"""Operations that are recorded once and run as one call give the same bits as one by one."""

import gc
import weakref
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, Array, c_int, c_uint, c_void_p, cast

import pytest
import torch

from quire_kernels import ops
from quire_kernels.backends import recording_with
from quire_kernels.cpu import library as cpu_library
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import Library
from quire_kernels.packed_weight import Quantization
from quire_kernels.recording import NotRecordableError, Recorder, Recording
from quire_kernels.recording import record as make_recording
from tests.support.cpu_kernels import ISA_PARAMS, ISAS, library_of, parametrize_pairwise, torch_threads

MOST_TOKENS, MOST_ROWS, BLOCK = 40, 8, 4
HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 96, 160, 6, 2, 16
NUM_BLOCKS, MOST_BLOCKS = 64, 8
QKV = (HEADS + 2 * KV_HEADS) * HEAD_DIM


class Layer:
    """All operations of the library, over inputs with room for more than a run takes."""

    def __init__(self, quantization: Quantization = Quantization.NONE) -> None:
        torch.manual_seed(3)
        self.qkv = ops.pack_weight((torch.randn(QKV, HIDDEN) / 8).bfloat16(), quantization=quantization)
        self.out = ops.pack_weight((torch.randn(HIDDEN, HEADS * HEAD_DIM) / 8).bfloat16(), quantization=quantization)
        gate_up = (torch.randn(2 * INNER, HIDDEN) / 8).bfloat16()
        self.gate_up = ops.pack_weight(gate_up, gated=True, quantization=quantization)
        self.down = ops.pack_weight((torch.randn(2 * HIDDEN, INNER) / 8).bfloat16(), quantization=quantization)
        self.norm, self.bias = torch.randn(2, HIDDEN).bfloat16()
        self.head_norm = torch.randn(HEAD_DIM).bfloat16()
        self.sinks = torch.randn(HEADS)
        self.cos_sin = torch.randn(100, HEAD_DIM)
        self.kv_cache = torch.randn(2, NUM_BLOCKS, KV_HEADS, BLOCK, HEAD_DIM).bfloat16()
        self.x = torch.randn(MOST_TOKENS, HIDDEN).bfloat16()
        self.positions = torch.randint(0, 100, (MOST_TOKENS,))
        self.slots = torch.randperm(NUM_BLOCKS * BLOCK)[:MOST_TOKENS]
        self.tables = torch.randint(0, NUM_BLOCKS, (MOST_ROWS, MOST_BLOCKS), dtype=torch.int32)
        self.starts = torch.zeros(MOST_ROWS + 1, dtype=torch.int32)
        self.lengths = torch.ones(MOST_ROWS, dtype=torch.int32)

    def set_rows(self, new_tokens: list[int], lengths: list[int]) -> None:
        self.starts[1 : len(new_tokens) + 1] = torch.tensor(new_tokens).cumsum(0)
        self.lengths[: len(lengths)] = torch.tensor(lengths)

    def run(self, tokens: int = MOST_TOKENS, rows: int = MOST_ROWS) -> torch.Tensor:
        x = self.x[:tokens]
        normed = ops.layer_norm(x, self.norm, self.bias, 1e-5)
        qkv = ops.product(normed, self.qkv).view(tokens, -1, HEAD_DIM)
        query, key, value = qkv.split_with_sizes((HEADS, KV_HEADS, KV_HEADS), 1)
        key = ops.rms_norm(key, self.head_norm, 1e-6)
        query = ops.rotary_and_cache(
            query, key, value, self.positions[:tokens], self.cos_sin, self.kv_cache, self.slots[:tokens]
        )
        attended = ops.paged_attention(
            query,
            self.kv_cache,
            self.tables[:rows],
            self.starts[: rows + 1],
            self.lengths[:rows],
            scale=0.25,
            max_query_len=MOST_BLOCKS * BLOCK,
            max_seq_len=MOST_BLOCKS * BLOCK,
            sliding_window=20,
            sinks=self.sinks,
        )
        normed, residual = ops.add_rms_norm(ops.product(attended.view(tokens, -1), self.out), x, self.norm, 1e-6)
        assert residual.data_ptr() == self.x.data_ptr()
        return ops.silu_and_mul(ops.product(ops.product(normed, self.gate_up), self.down))


@pytest.fixture(params=ISA_PARAMS)
def library(request: pytest.FixtureRequest) -> Library:
    return library_of(request.param)


def record(library: Library, layer: Layer) -> tuple[Recording, torch.Tensor]:
    recorder = Recorder(library, MOST_TOKENS)
    with recorder, recording_with(recorder.kernels):
        output = layer.run()
    return recorder.recording(layer), output


@parametrize_pairwise("library,threads,quantization", ISAS, [1, 2, 3], list(Quantization))
def test_every_run_gives_what_the_operations_give_one_by_one(
    library: Library, threads: int, quantization: Quantization
) -> None:
    one_by_one, recorded = Layer(quantization), Layer(quantization)
    before = recorded.x.clone(), recorded.kv_cache.clone()
    recording, output = record(library, recorded)
    for tensor, unchanged in zip((recorded.x, recorded.kv_cache), before, strict=True):
        assert torch.equal(tensor, unchanged), "recording computes"
    with torch_threads(threads):
        for new_tokens, lengths in (
            ([1], [1]),
            ([1, 1, 1], [32, 7, 20]),
            ([30], [32]),
            ([5, 1, 9, 1, 1, 1, 21, 1], [5, 30, 12, 1, 32, 2, 21, 8]),
            ([1], [31]),
        ):
            for layer in (one_by_one, recorded):
                layer.set_rows(new_tokens, lengths)
            with recording_with(CpuKernels(library)):
                expected = one_by_one.run(sum(new_tokens), len(new_tokens))
            recording.run(sum(new_tokens), len(new_tokens))
            assert torch.equal(output[: sum(new_tokens)], expected)
            assert torch.equal(recorded.x, one_by_one.x)
            assert torch.equal(recorded.kv_cache, one_by_one.kv_cache)


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_begin_an_operation_when_all_have_ended_the_one_before(library: Library, threads: int) -> None:
    """Several threads share each operation: each panel of the product reads all lines of the norm."""
    x, ones = torch.empty(MOST_TOKENS, 4096), torch.ones(4096)
    weight = ops.pack_weight(torch.randn(512, 4096))
    recorder = Recorder(library, MOST_TOKENS)
    with recorder, recording_with(recorder.kernels):
        output = ops.product(ops.rms_norm(x, ones, 1e-6), weight)
    recording = recorder.recording((x, ones, weight))
    for seed in range(20):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        with torch_threads(threads):
            recording.run(MOST_TOKENS, 1)
        with recording_with(CpuKernels(library)):
            expected = ops.product(ops.rms_norm(x, ones, 1e-6), weight)
        assert torch.equal(output, expected), f"run {seed}"


class ThreadsInTurn:
    """An OpenMP runtime whose threads get a core one after the other: each ends its part of a region before the next
    one begins its own."""

    def __init__(self, order: Sequence[int]) -> None:
        self._order, self._number, self._size = order, 0, 1
        self.sizes = set[int]()
        region = CFUNCTYPE(None, c_void_p)
        parallel = CFUNCTYPE(None, region, c_void_p, c_uint, c_uint)(self._parallel)
        number, size = CFUNCTYPE(c_int)(lambda: self._number), CFUNCTYPE(c_int)(lambda: self._size)
        self._functions = (parallel, number, size)

    def addresses(self) -> Array[c_void_p]:
        return (c_void_p * 3)(*(cast(each, c_void_p) for each in self._functions))

    def _parallel(self, region: Callable[[int], None], data: int, threads: int, _: int) -> None:
        self._size = len(self._order)
        self.sizes.add(threads)
        for number in self._order:
            self._number = number
            region(data)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0), (0,)])
def test_no_thread_waits_for_one_that_has_no_core(
    order: Sequence[int], library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first thread does the units of all, also of threads that the runtime does not have. The others find none."""
    runtime = ThreadsInTurn(order)
    with monkeypatch.context() as patch:
        patch.setattr(cpu_library, "_open_mp", runtime.addresses)
        in_turn = library_of(library.isa)
    x, ones = torch.randn(MOST_TOKENS, 4096), torch.ones(4096)
    weight = ops.pack_weight(torch.randn(512, 4096))
    recorder = Recorder(in_turn, MOST_TOKENS)
    with recorder, recording_with(recorder.kernels):
        output = ops.product(ops.rms_norm(x, ones, 1e-6), weight)
    recording = recorder.recording((x, ones, weight))
    with torch_threads(3):
        recording.run(MOST_TOKENS, 1)
    assert runtime.sizes == {3}
    with recording_with(CpuKernels(library)):
        assert torch.equal(output, ops.product(ops.rms_norm(x, ones, 1e-6), weight))


def test_a_block_that_is_not_there_stops_a_run_before_anything_is_written(library: Library) -> None:
    layer = Layer()
    recording, _ = record(library, layer)
    before = layer.kv_cache.clone()
    layer.set_rows([1], [30])
    layer.tables[0, 5] = NUM_BLOCKS
    with pytest.raises(IndexError, match="block_tables names a block that is not in kv_cache"):
        recording.run(1, 1)
    layer.tables[0, 5] = 0
    layer.slots[0] = -1
    with pytest.raises(IndexError, match="slot_mapping names a slot"):
        recording.run(1, 1)
    assert torch.equal(layer.kv_cache, before)


@pytest.mark.usefixtures("library")
def test_a_recording_holds_what_it_was_made_from() -> None:
    def make() -> tuple[Recording, torch.Tensor, weakref.ref[torch.Tensor]]:
        x, weight, outputs = torch.ones(MOST_TOKENS, HIDDEN).bfloat16(), torch.ones(HIDDEN).bfloat16(), []
        recording = make_recording(MOST_TOKENS, lambda: outputs.append(ops.rms_norm(x, weight, 0.0)))
        return recording, outputs[0], weakref.ref(x)

    recording, output, x = make()
    part = recording.part(lambda _: True)
    del recording
    gc.collect()
    assert x() is not None
    part.run(MOST_TOKENS, 1)
    assert torch.equal(output, torch.ones(MOST_TOKENS, HIDDEN).bfloat16())
    del part
    gc.collect()
    assert x() is None


X = torch.randn(MOST_TOKENS, HIDDEN).bfloat16()
NOT_RECORDED: list[tuple[Callable[[], object], str]] = [
    (lambda: X.view(-1, 8)[:2] + 1, r"aten\.add\.Tensor is computed by torch"),
    (lambda: ops.rms_norm(X[1:], X[0], 1e-6), "rms_norm over 39 lines, which 40 tokens do not divide"),
    (lambda: ops.pack_weight(X), "pack_weight cannot be recorded"),
]


@pytest.mark.parametrize(("compute", "message"), NOT_RECORDED)
def test_what_cannot_be_recorded_is_refused(library: Library, compute: Callable[[], object], message: str) -> None:
    recorder = Recorder(library, MOST_TOKENS)
    with pytest.raises(NotRecordableError, match=message), recorder, recording_with(recorder.kernels):
        compute()
    assert torch.equal(X + 0, X), "afterwards torch computes as ever"
