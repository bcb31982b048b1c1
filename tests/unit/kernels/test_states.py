"""Operations on states compared with their formulas in float64, and where in memory they read and write."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn import functional

from quire_kernels import ops
from quire_kernels.states import StatePages, StateShape, StateUnits, read_state, write_state
from tests.support.cpu_kernels import IMPLEMENTATIONS, parametrize_pairwise
from tests.support.state_operations import Case, Memory, Part, conv_case, recurrence_case, scan_case

FLOAT, BFLOAT, HALF = torch.float32, torch.bfloat16, torch.float16
TOLERANCE = {FLOAT: 2e-5, BFLOAT: 2e-2, HALF: 3e-3}


def make_cases() -> Iterator[Case]:
    torch.manual_seed(0)
    for dtype in TOLERANCE:
        yield conv_case(40, 4, dtype, gated=False, weight_dtype=dtype)
        yield conv_case(21, 3, dtype, gated=True, weight_dtype=FLOAT)
        yield recurrence_case(dtype, kind="delta")
        yield recurrence_case(dtype, kind="channels")
        yield recurrence_case(dtype, kind="mamba")
        yield scan_case(dtype)
    yield conv_case(16, 2, FLOAT, gated=False, weight_dtype=FLOAT)
    yield recurrence_case(FLOAT, (3, 3), (17, 5), kind="delta")
    yield recurrence_case(BFLOAT, (1, 4), (32, 16), kind="mamba")
    yield recurrence_case(FLOAT, (2, 2), (128, 128), kind="delta")
    yield scan_case(FLOAT, 7, 5)


CASES = list(make_cases())
by_name = pytest.mark.parametrize("case", CASES, ids=str)


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def outputs_of(case: Case, count: int) -> tuple[dict[str, torch.Tensor], torch.Tensor, torch.Tensor]:
    tokens = case.make(count)
    return tokens, *case.exact(tokens)


@pytest.mark.usefixtures("implementation")
@by_name
def test_a_batch_of_prompts_and_decodes_gives_what_the_formula_gives(case: Case) -> None:
    memory = Memory(case.shape)
    long, short, new = (outputs_of(case, count) for count in (45, 4, 1))
    tables = [memory.new_table() for _ in range(3)]
    first = memory.run(case, [Part(long[0], tables[0], 0, 41), Part(short[0], tables[1], 0, 3)])
    then = memory.run(
        case,
        [
            Part(short[0], tables[1], 3, 4),
            Part(new[0], tables[2], 0, 1),
            Part(long[0], tables[0], 41, 45),
        ],
    )
    dtype = next(iter(long[0].values())).dtype
    assert all(output.dtype == dtype for output in (*first, *then))
    for output, expected in zip(
        (*first, *then), (long[1][:41], short[1][:3], short[1][3:], new[1], long[1][41:]), strict=True
    ):
        assert_close(output, expected, dtype)
    for table, (_, _, states) in zip(tables, (long, short, new), strict=True):
        assert_close(memory.state(table), states[-1], FLOAT)


@pytest.mark.usefixtures("implementation")
@by_name
def test_nothing_but_the_units_of_a_layer_is_written(case: Case) -> None:
    memory = Memory(case.shape)
    table, checkpoint = memory.new_table(), memory.new_table()
    before = memory.pages.clone()
    memory.run(case, [Part(case.make(5), table, 0, 5, checkpoints={2: 0})], [checkpoint])
    after = memory.pages.clone()
    for each in (table, checkpoint):
        nothing = torch.full((case.shape.heads, case.shape.lines, case.shape.columns), float("nan"))
        write_state(after, torch.tensor(each), memory.units, case.shape, nothing)
        write_state(before, torch.tensor(each), memory.units, case.shape, nothing)
    assert torch.equal(before, after)


@pytest.mark.usefixtures("implementation")
@by_name
def test_checkpoints_have_the_states_of_their_tokens(case: Case) -> None:
    memory = Memory(case.shape)
    tokens, _, states = outputs_of(case, 40)
    lines = {0: 2, 15: 0, 16: 1, 38: 3}
    table, tables = memory.new_table(), [memory.new_table() for _ in lines]
    memory.run(case, [Part(tokens, table, 0, 40, kept=39, checkpoints={**lines, 39: 1})], tables)
    for token, line in lines.items():
        assert_close(memory.state(tables[line]), states[token], FLOAT)
    assert_close(memory.state(table), states[38], FLOAT)


@pytest.mark.usefixtures("implementation")
@by_name
def test_a_layer_reads_what_was_written_as_its_state(case: Case) -> None:
    memory, others = Memory(case.shape), Memory(case.shape, tiles_per_unit=1)
    tokens = case.make(30)
    table, other = memory.new_table(), others.new_table()
    whole = memory.run(case, [Part(tokens, table, 0, 30)])[0]
    memory.run(case, [Part(tokens, table, 0, 20)])
    write_state(others.pages, torch.tensor(other), others.units, case.shape, memory.state(table))
    assert_close(others.run(case, [Part(tokens, other, 20, 30)])[0], whole[20:].double(), whole.dtype)


def bad_index(case: Case, change: Any) -> tuple[Memory, StatePages, dict[str, torch.Tensor]]:
    memory = Memory(case.shape)
    tokens = case.make(6)
    parts = [Part(tokens, memory.new_table(), 0, 4, checkpoints={1: 0}), Part(tokens, memory.new_table(), 4, 6, kept=1)]
    pages = memory.batch(parts, [memory.new_table()])
    change(pages)
    return memory, pages, tokens


def set_number(name: str, place: Any, number: int) -> Any:
    def change(pages: StatePages) -> None:
        getattr(pages, name)[place] = number

    return change


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("case", [CASES[0], CASES[2], CASES[5]], ids=str)
@pytest.mark.parametrize(
    "change",
    [
        set_number("tables", (1, 0), 24),
        set_number("tables", (0, 1), -1),
        set_number("checkpoint_tables", (0, 0), 24),
        set_number("checkpoints", 5, 1),
        set_number("checkpoints", 0, -2),
        set_number("seq_lens", 1, 1),
        set_number("query_start_loc", 2, 5),
        set_number("query_start_loc", 1, 7),
        set_number("query_start_loc", 0, 1),
        set_number("num_kept", 1, -1),
    ],
)
def test_an_index_that_is_out_of_range_is_refused_before_anything_is_written(case: Case, change: Any) -> None:
    memory, pages, tokens = bad_index(case, change)
    before = memory.pages.clone()
    with pytest.raises(IndexError):
        case.call(tokens, pages, memory.units)
    assert torch.equal(memory.pages, before)


def test_pages_that_do_not_fit_are_refused() -> None:
    case = CASES[2]
    memory, pages, tokens = bad_index(case, lambda _: None)
    for changes, message in (
        ({"pages": pages.pages.view(torch.int8)}, "pages has dtype torch.int8; expected torch.uint8"),
        ({"pages": pages.pages[:, ::2]}, "pages has blocks that are not contiguous"),
        ({"tables": pages.tables[:1]}, "tables has shape"),
        ({"tables": pages.tables.long()}, "tables has dtype torch.int64"),
        (
            {"tables": pages.tables[:, :1], "checkpoint_tables": pages.checkpoint_tables[:, :1]},
            "are not in tables of 1",
        ),
        ({"query_start_loc": pages.query_start_loc[:2]}, "query_start_loc has shape"),
        ({"checkpoints": pages.checkpoints[:3]}, r"checkpoints has shape \[3\]; expected \[6\]"),
        ({"checkpoint_tables": pages.checkpoint_tables[:, :1]}, "checkpoint_tables has shape"),
        ({"num_kept": pages.seq_lens[:1]}, "num_kept has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            case.call(tokens, replace(pages, **changes), memory.units)
    for units in (
        StateUnits(-1, memory.units.unit_bytes),
        StateUnits(0, 64),
        StateUnits(0, memory.units.unit_bytes + 2),
    ):
        with pytest.raises(ValueError, match=r"units -1 to|unit_bytes is"):
            case.call(tokens, pages, units)
    with pytest.raises(ValueError, match="weight has 1 taps"):
        StateShape.of_conv(8, 1)


def test_arguments_that_do_not_fit_are_refused() -> None:
    x, heads = torch.randn(6, 8), torch.randn(6, 2, 4)
    case = CASES[2]
    memory, pages, tokens = bad_index(case, lambda _: None)
    for changes, message in (
        ({"query": tokens["query"][:, :1]}, "query has shape"),
        ({"key": tokens["key"].double()}, "key has dtype torch.float64"),
        ({"value": tokens["value"][:, :3]}, "value has 3 heads; expected a multiple of the 2 of key"),
        ({"decay": tokens["decay"][:5]}, "decay has shape"),
        ({"decay": tokens["decay"][..., None]}, "decay has shape"),
        ({"decay": tokens["decay"].bfloat16()}, "decay has dtype"),
        ({"beta": tokens["beta"][:, :3]}, "beta has shape"),
    ):
        with pytest.raises(ValueError, match=message):
            case.call({**tokens, **changes}, pages, memory.units)
    with pytest.raises(ValueError, match="activation is 'gelu'; expected 'silu' or None"):
        ops.causal_conv(x, torch.ones(8, 4), None, pages, memory.units, activation="gelu")
    with pytest.raises(ValueError, match="before has shape"):
        ops.causal_conv(x, torch.ones(8, 4), None, pages, memory.units, before=x[:2])
    with pytest.raises(ValueError, match="b is None"):
        ops.gates(heads, None, torch.ones(2), torch.ones(2, 4))
    with pytest.raises(ValueError, match="dt_bias has shape"):
        ops.gates(x, x, torch.ones(8), torch.ones(4))
    with pytest.raises(ValueError, match="group_size is 3; expected a divisor of 8"):
        ops.gated_norm(x, x, torch.ones(8), 1e-6, 3, norm_first=True)
    with pytest.raises(ValueError, match="weight has shape"):
        ops.gated_norm(x, x, torch.ones(5), 1e-6, 4, norm_first=True)
    with pytest.raises(ValueError, match="activation is 'relu'"):
        ops.gated_norm(x, x, torch.ones(8), 1e-6, 4, norm_first=True, activation="relu")


def test_the_place_of_a_tile_follows_from_units_of_blocks() -> None:
    shape, units = StateShape.of_recurrence(3, 2, 40), StateUnits(2, 300)  # 9 tiles of 128 bytes, two in a unit
    assert (shape.num_tiles, shape.num_units(300)) == (9, 5)
    pages = torch.zeros(6, 1000, dtype=torch.uint8)  # 3 units in a block
    table = torch.tensor([5, 0, 3])
    write_state(pages, table, units, shape, torch.arange(240.0).view(3, 2, 40))
    state = read_state(pages, table, units, shape)
    assert torch.equal(state, torch.arange(240.0).view(3, 2, 40))
    # Tile 4 is columns 16 to 31 of head 1. It is in unit 2 + 2, the second one of the second block.
    tile = pages[0, 300:428].view(torch.float32).view(2, 16)
    assert torch.equal(tile, state[1, :, 16:32])


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_heads", [1, 8, 19])
def test_gates(dtype: torch.dtype, num_heads: int) -> None:
    a, b = (torch.randn(5, 2 * num_heads) * 8).to(dtype).chunk(2, dim=1)
    a_log, dt_bias = torch.randn(num_heads), torch.randn(num_heads)
    step = functional.softplus(a.double() + dt_bias, threshold=100)
    decay, beta = ops.gates(a, b, a_log, dt_bias, beta_scale=2.0)
    for actual, expected in ((decay, torch.exp(-a_log.double().exp() * step)), (beta, b.double().sigmoid() * 2)):
        torch.testing.assert_close(actual.double(), expected, rtol=5e-6, atol=1e-30)
    decay, beta = ops.gates(a, None, a_log, dt_bias, dt_min=0.01, dt_max=3.0)
    step = step.clamp(0.01, 3.0)
    for actual, expected in ((decay, torch.exp(-a_log.double().exp() * step)), (beta, step)):
        torch.testing.assert_close(actual.double(), expected, rtol=5e-6, atol=1e-30)


@pytest.mark.usefixtures("implementation")
def test_gates_of_each_channel() -> None:
    a, b = torch.randn(4, 3, 21), torch.randn(4, 3)
    a_log, dt_bias = torch.randn(3), torch.randn(3, 21)
    decay, beta = ops.gates(a, b, a_log, dt_bias)
    expected = torch.exp(-a_log.double().exp()[:, None] * functional.softplus(a.double() + dt_bias))
    torch.testing.assert_close(decay.double(), expected, rtol=5e-6, atol=1e-30)
    torch.testing.assert_close(beta, b.sigmoid())


@pytest.mark.usefixtures("implementation")
@parametrize_pairwise(
    "implementation,dtype,norm_first,groups,activation",
    IMPLEMENTATIONS,
    list(TOLERANCE),
    [True, False],
    [(24, 24, False), (32, 96, False), (11, 33, True), (16, 64, True)],
    ["silu", "sigmoid"],
)
def test_gated_norm(dtype: torch.dtype, norm_first: bool, groups: tuple[int, int, bool], activation: str) -> None:
    group_size, width, is_shared = groups
    x, gate = torch.randn(5, 2 * width).to(dtype).chunk(2, dim=1)
    gates = getattr(functional, activation)(gate.double())
    for weight in (torch.rand(group_size if is_shared else width), torch.rand(width).to(dtype)):
        numbers = (x.double() if norm_first else x.double() * gates).view(5, -1, group_size)
        normed = numbers / (numbers.square().mean(-1, keepdim=True) + 1e-3).sqrt()
        repeated = weight.double().repeat(width // len(weight))
        expected = normed.view(5, width) * repeated * (gates if norm_first else 1.0)
        actual = ops.gated_norm(x, gate, weight, 1e-3, group_size, norm_first=norm_first, activation=activation)
        assert actual.dtype == dtype
        assert_close(actual, expected, dtype)
    actual = ops.gated_norm(x, gate, None, 1e-3, group_size, norm_first=norm_first, activation=activation)
    assert_close(actual, x.double() * gates, dtype)


@pytest.mark.usefixtures("implementation")
@pytest.mark.parametrize("kind", ["delta", "mamba"])
def test_recurrences_are_those_of_transformers(kind: str) -> None:
    case = recurrence_case(FLOAT, (4, 4), (32, 16), kind=kind)
    memory, tokens = Memory(case.shape), case.make(33)
    output = memory.run(case, [Part(tokens, memory.new_table(), 0, 33)])[0]
    query, key, value, decay, beta = (tokens[name] for name in ("query", "key", "value", "decay", "beta"))
    if kind == "delta":
        qwen3_next = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
        expected, _ = qwen3_next.torch_recurrent_gated_delta_rule(
            *(x[None] for x in (query, key, value, decay.log(), beta)), None, False, use_qk_l2norm_in_kernel=True
        )
        torch.testing.assert_close(output, expected[0], rtol=1e-5, atol=1e-5)
        return
    # The sum that defines state space duality: what token j adds to token i decays from j on.
    logs = decay.log().cumsum(0).t()
    decays = torch.exp(logs[:, :, None] - logs[:, None, :]).tril()
    scores = torch.einsum("ihk,jhk->hij", query, key) * 32**-0.5 * decays * beta.t()[:, None, :]
    expected = torch.einsum("hij,jhv->ihv", scores, value)
    skipped = memory.run(case, [Part({**tokens, "query": torch.zeros_like(query)}, memory.new_table(), 0, 33)])[0]
    torch.testing.assert_close(output - skipped, expected, rtol=1e-4, atol=1e-4)
