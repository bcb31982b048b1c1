"""A token has the same output and state, bit for bit, whatever it is computed with, also in a recording."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch

from quire_kernels import ops
from quire_kernels.backends import recording_with
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.recording import Recorder
from quire_kernels.states import StatePages, StateShape, StateUnits
from tests.support.cpu_kernels import library_of, torch_threads
from tests.support.state_operations import Case, Memory, Part, conv_case, recurrence_case, scan_case

torch.manual_seed(0)
CASES = [
    conv_case(40, 4, torch.bfloat16, gated=False, weight_dtype=torch.float32),
    conv_case(37, 3, torch.float32, gated=True, weight_dtype=torch.float32),
    recurrence_case(torch.bfloat16, kind="delta"),
    recurrence_case(torch.float32, (2, 2), (17, 56), kind="channels"),
    recurrence_case(torch.float16, kind="mamba"),
    scan_case(torch.float32),
]
by_name = pytest.mark.parametrize("case", CASES, ids=str)
COUNT = 200


@pytest.fixture(autouse=True)
def _kernels(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = CpuKernels(library_of(isa))
    monkeypatch.setattr(ops, "implementation_for", lambda _: chosen)


def cuts(size: int, count: int = COUNT) -> list[tuple[int, int]]:
    return list(pairwise([*range(0, count, size), count]))


def in_one(memory: Memory, case: Case, part: Part) -> tuple[torch.Tensor, torch.Tensor]:
    (output,) = memory.run(case, [part])
    return output, memory.state(part.table)


@by_name
def test_a_prompt_in_chunks_gives_the_bits_of_the_prompt_in_one(case: Case) -> None:
    memory, tokens = Memory(case.shape), case.make(COUNT)
    whole, state = in_one(memory, case, Part(tokens, memory.new_table(), 0, COUNT))
    for size in (1, 3, 64):
        table = memory.new_table()
        chunks = [memory.run(case, [Part(tokens, table, *cut)])[0] for cut in cuts(size)]
        assert torch.equal(torch.cat(chunks), whole)
        assert torch.equal(memory.state(table), state)


@by_name
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_company_and_threads_change_no_bit(case: Case, threads: int) -> None:
    memory = Memory(case.shape)
    sequences = [case.make(count) for count in (COUNT, 1, 30, 65)]
    lone = [
        in_one(memory, case, Part(tokens, memory.new_table(), 0, len(tokens["x" if "x" in tokens else "key"])))
        for tokens in sequences
    ]
    tables = [memory.new_table() for _ in sequences]
    with torch_threads(threads):
        first = memory.run(case, [Part(sequences[i], tables[i], 0, end) for i, end in ((2, 11), (0, 77), (3, 64))])
        then = memory.run(
            case,
            [
                Part(sequences[i], tables[i], *cut)
                for i, cut in ((0, (77, 200)), (3, (64, 65)), (1, (0, 1)), (2, (11, 30)))
            ],
        )
    outputs = [torch.cat((first[1], then[0])), then[2], torch.cat((first[0], then[3])), torch.cat((first[2], then[1]))]
    for output, table, (expected, state) in zip(outputs, tables, lone, strict=True):
        assert torch.equal(output, expected)
        assert torch.equal(memory.state(table), state)


@by_name
@pytest.mark.parametrize("begin", [0, 1])
@pytest.mark.parametrize("places", [[1, 2, 3], [50, 51, 120], [*range(160, COUNT)]], ids=len)
def test_parts_of_a_row_in_one_batch_are_the_row(case: Case, begin: int, places: list[int]) -> None:
    memory, tokens, other = Memory(case.shape), case.make(COUNT), case.make(9)
    whole, state = in_one(memory, case, Part(tokens, memory.new_table(), 0, COUNT))
    ends = [0, *places, COUNT]
    table, checkpoint = memory.new_table(), memory.new_table()
    before = [memory.run(case, [Part(tokens, table, *cut)])[0] for cut in pairwise(ends[: begin + 1])]
    parts = [Part(tokens, table, *cut, checkpoints={COUNT - 1: 0}) for cut in pairwise(ends[begin:])]
    _, *outputs = memory.run(case, [Part(other, memory.new_table(), 0, 9), *parts], [checkpoint])
    assert torch.equal(torch.cat((*before, *outputs)), whole)
    for each in (table, checkpoint):
        assert torch.equal(memory.state(each), state)


@by_name
def test_a_checkpoint_is_the_state_of_a_run_that_ends_there(case: Case) -> None:
    memory, tokens = Memory(case.shape, num_blocks=64), case.make(COUNT)
    places = [0, 1, 15, 16, 63, 100, 198]
    tables = [memory.new_table() for _ in places]
    lines = {token: line for line, token in enumerate(places)}
    whole, _ = in_one(memory, case, Part(tokens, memory.new_table(), 0, COUNT))
    output = memory.run(case, [Part(tokens, memory.new_table(), 0, COUNT, checkpoints=lines)], tables)[0]
    assert torch.equal(output, whole)
    for token, table in zip(places, tables, strict=True):
        _, state = in_one(memory, case, Part(tokens, memory.new_table(), 0, token + 1))
        assert torch.equal(memory.state(table), state)
        rest = memory.run(case, [Part(tokens, table, token + 1, COUNT)])[0]
        assert torch.equal(rest, whole[token + 1 :])


@by_name
@pytest.mark.parametrize("start", [0, 20])
@pytest.mark.parametrize("kept", [0, 1, 16, 39, 40, 50])
def test_only_kept_tokens_change_the_pages(case: Case, start: int, kept: int) -> None:
    memory, tokens = Memory(case.shape), case.make(60)
    whole, _ = in_one(memory, case, Part(tokens, memory.new_table(), 0, 60))
    table, checkpoint = memory.new_table(), memory.new_table()
    if start:
        memory.run(case, [Part(tokens, table, 0, start)])
    before = memory.pages.clone()
    part = Part(tokens, table, start, start + 40, kept=kept, checkpoints={start + 39: 0, start + 20: 0})
    output = memory.run(case, [part], [checkpoint])[0]
    assert torch.equal(output, whole[start : start + 40])
    if kept == 0:
        assert torch.equal(memory.pages, before)
        return
    end = start + min(kept, 40)
    _, state = in_one(memory, case, Part(tokens, memory.new_table(), 0, end))
    assert torch.equal(memory.state(table), state)
    if kept <= 20:
        assert memory.state(checkpoint).isnan().all()


@by_name
def test_of_parts_of_a_row_those_after_the_first_that_is_not_kept_change_nothing(case: Case) -> None:
    memory, tokens = Memory(case.shape), case.make(30)
    whole, _ = in_one(memory, case, Part(tokens, memory.new_table(), 0, 30))
    table = memory.new_table()
    memory.run(case, [Part(tokens, table, 0, 20)])
    parts = [Part(tokens, table, i, i + 1, kept=kept) for i, kept in enumerate((1, 1, 0, 0, 1), start=20)]
    outputs = memory.run(case, parts)
    assert torch.equal(torch.cat(outputs), whole[20:25])
    _, state = in_one(memory, case, Part(tokens, memory.new_table(), 0, 22))
    assert torch.equal(memory.state(table), state)


def test_elements_do_not_depend_on_their_place_in_a_vector() -> None:
    a, b = torch.randn(2, 3, 40).bfloat16() * 5
    a_log, dt_bias = torch.randn(2, 40)
    for whole, *columns in zip(
        ops.gates(a, b, a_log, dt_bias),
        *(ops.gates(a[:, i:], b[:, i:], a_log[i:], dt_bias[i:]) for i in range(1, 40)),
        strict=True,
    ):
        for i, each in enumerate(columns, start=1):
            assert torch.equal(each, whole[:, i:])
    x, weight = torch.randn(4, 120), torch.rand(24)
    normed = ops.gated_norm(x, x, weight, 1e-6, 24, norm_first=True)
    lone = ops.gated_norm(x[1:2, 48:72], x[1:2, 48:72], weight, 1e-6, 24, norm_first=True)
    assert torch.equal(normed[1:2, 48:72], lone)


MOST_TOKENS, MOST_ROWS, MOST_CHECKPOINTS = 40, 6, 3
HEADS, DIM, TAPS, UNIT = 4, 32, 4, 4096
CONV = StateShape.of_conv(3 * HEADS * DIM, TAPS)
RECURRENCE = StateShape.of_recurrence(HEADS, DIM, DIM)
SCAN = StateShape.of_scan(HEADS * DIM, 16)


class Layers:
    """Two layers of all operations on states, over inputs with room for more than a run takes."""

    def __init__(self) -> None:
        torch.manual_seed(5)
        self.firsts = [0]
        for _ in range(2):
            for shape in (CONV, RECURRENCE, SCAN):
                self.firsts.append(self.firsts[-1] + shape.num_units(UNIT))
        width = -(-self.firsts[-1] // 4)
        blocks = torch.randperm(12 * width, dtype=torch.int32).view(12, width)
        self.pages = StatePages(
            torch.full((12 * width, UNIT), float("nan")).view(torch.uint8),
            blocks[:MOST_ROWS].clone(),
            torch.zeros(MOST_ROWS + 1, dtype=torch.int32),
            torch.zeros(MOST_ROWS, dtype=torch.int32),
            torch.zeros(MOST_TOKENS, dtype=torch.int32),
            blocks[MOST_ROWS : MOST_ROWS + MOST_CHECKPOINTS].clone(),
            torch.zeros(MOST_ROWS, dtype=torch.int32),
        )
        self.x = torch.randn(MOST_TOKENS, 3 * HEADS * DIM).bfloat16()
        self.a, self.b = torch.randn(2, MOST_TOKENS, HEADS).bfloat16()
        self.dt = torch.rand(MOST_TOKENS, HEADS * DIM)
        self.weight, self.norm = torch.randn(3 * HEADS * DIM, TAPS).bfloat16() / 2, torch.rand(DIM)
        self.a_log, self.dt_bias = torch.randn(2, HEADS)
        self.a_matrix = -torch.rand(HEADS * DIM, 16)

    def set_rows(self, new_tokens: Sequence[int], lengths: Sequence[int], kept: Sequence[int]) -> None:
        pages, count = self.pages, len(lengths)
        assert pages.num_kept is not None
        pages.query_start_loc[1 : count + 1] = torch.tensor(new_tokens).cumsum(0)
        pages.seq_lens[:count] = torch.tensor(lengths)
        pages.num_kept[:count] = torch.tensor(kept)
        pages.checkpoints.fill_(-1)
        # Rows run side by side: no two tokens share a line.
        some = pages.checkpoints[: sum(new_tokens)][:: max(1, -(-sum(new_tokens) // MOST_CHECKPOINTS))]
        some.copy_(torch.arange(len(some)))

    def run(self, tokens: int = MOST_TOKENS, rows: int = MOST_ROWS) -> torch.Tensor:
        whole = self.pages
        assert whole.num_kept is not None
        pages = StatePages(
            whole.pages,
            whole.tables[:rows],
            whole.query_start_loc[: rows + 1],
            whole.seq_lens[:rows],
            whole.checkpoints[:tokens],
            whole.checkpoint_tables,
            whole.num_kept[:rows],
        )
        units = iter(StateUnits(first, UNIT) for first in self.firsts)
        x = normed = self.x[:tokens]
        for _ in range(2):
            mixed = ops.causal_conv(x, self.weight, None, pages, next(units), activation="silu")
            query, key, value = mixed.view(tokens, 3, HEADS, DIM).unbind(1)
            decay, beta = ops.gates(self.a[:tokens], self.b[:tokens], self.a_log, self.dt_bias)
            output = ops.linear_recurrence(
                query, key, value, decay, beta, pages, next(units), delta=True, unit_norm=True, scale=0.2
            ).view(tokens, -1)
            states = mixed[:, :16], mixed[:, 16:32]
            scanned = ops.selective_scan(output, self.dt[:tokens], self.a_matrix, *states, pages, next(units))
            normed = ops.gated_norm(scanned, output, self.norm, 1e-6, DIM, norm_first=True)
            x = mixed
        return normed


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_recording_gives_the_bits_of_the_operations_one_by_one(isa: str, threads: int) -> None:
    one_by_one, recorded = Layers(), Layers()
    recorder = Recorder(library_of(isa), MOST_TOKENS)
    with pytest.MonkeyPatch.context() as patch, recorder, recording_with(recorder.kernels):
        patch.setattr(ops, "implementation_for", lambda _: recorder.kernels)
        output = recorded.run()
    recording = recorder.recording(recorded)
    assert torch.equal(recorded.pages.pages, one_by_one.pages.pages), "recording computes"
    with torch_threads(threads):
        for new_tokens, lengths, kept in (
            ([1], [1], [1]),
            ([5, 20, 1], [6, 20, 1], [5, 19, 1]),
            ([1, 1, 1], [7, 21, 2], [0, 1, 1]),
            ([30, 1, 2, 3, 1, 3], [36, 22, 5, 3, 1, 3], [30, 1, 2, 2, 0, 3]),
        ):
            for layers in (one_by_one, recorded):
                layers.set_rows(new_tokens, lengths, kept)
            expected = one_by_one.run(sum(new_tokens), len(new_tokens))
            recording.run(sum(new_tokens), len(new_tokens))
            assert torch.equal(output[: sum(new_tokens)], expected)
            assert torch.equal(recorded.pages.pages, one_by_one.pages.pages)


def test_a_recording_refuses_a_block_that_is_not_there_before_it_writes(isa: str) -> None:
    layers = Layers()
    recorder = Recorder(library_of(isa), MOST_TOKENS)
    with pytest.MonkeyPatch.context() as patch, recorder, recording_with(recorder.kernels):
        patch.setattr(ops, "implementation_for", lambda _: recorder.kernels)
        layers.run()
    recording = recorder.recording(layers)
    layers.set_rows([1, 3], [1, 3], [1, 3])
    layers.pages.tables[1, 0] = len(layers.pages.pages)
    before = layers.pages.pages.clone()
    with pytest.raises(IndexError):
        recording.run(4, 2)
    assert torch.equal(layers.pages.pages, before)
    layers.pages.tables[1, 0] = 0
    layers.pages.checkpoints[0] = MOST_CHECKPOINTS
    with pytest.raises(IndexError, match="checkpoints names a line that is not in checkpoint_tables"):
        recording.run(4, 2)
    assert torch.equal(layers.pages.pages, before)
