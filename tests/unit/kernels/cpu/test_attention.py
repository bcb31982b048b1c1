"""Attention in C++ and in the reference compared with dense attention in float64, over shapes that fit no vector."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels.backends import Implementation
from quire_kernels.int8 import quantized_lines
from quire_kernels.reference import ScoreRule
from tests.support.cpu_kernels import ISAS, make_implementation, parametrize_pairwise, torch_threads
from tests.unit.kernels.test_paged_attention import TOLERANCE, Batch, alone_rows, exact_attention, make_batch

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

ROWS = st.one_of(
    st.tuples(st.just(1), st.one_of(st.integers(1, 300), st.integers(1, 3000))),
    st.tuples(st.integers(2, 150), st.integers(0, 200)).map(lambda row: (row[0], row[0] + row[1])),
)


def attend(implementation: Implementation, batch: Batch, scores: ScoreRule, **limits: int) -> torch.Tensor:
    return implementation.paged_attention(*batch.tensors, scores=scores, **(limits or batch.limits))


def assert_exact(isa: str, batch: Batch, scores: ScoreRule) -> None:
    actual = attend(make_implementation(isa), batch, scores)
    tolerance = TOLERANCE[batch.query.dtype]
    torch.testing.assert_close(actual.double(), exact_attention(batch, scores), rtol=tolerance, atol=tolerance)


@given(
    rows=st.lists(ROWS, min_size=1, max_size=4),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 4, 7, 8]),
    head_dim=st.one_of(st.integers(4, 32).map(lambda eighths: 8 * eighths), st.sampled_from([6, 20, 33])),
    block_size=st.sampled_from([1, 3, 16, 32]),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(1, 600),
    soft_cap=st.none() | st.floats(0.5, 30),
    alibi=st.booleans(),
    most_sink=st.none() | st.floats(-30, 30),
    threads=st.integers(1, 2),
    seed=st.integers(0, 99),
)
# The other instruction sets together get as many examples as the best one: they come from the same source.
@pytest.mark.parametrize(
    "isas",
    [
        pytest.param(isas, id=" ".join(isas), marks=[pytest.mark.all_isas] if isas == ISAS[1:] else [])
        for isas in (("reference",), ISAS[:1], ISAS[1:])
        if isas
    ],
)
def test_any_batch_matches_dense_attention(
    isas, rows, num_kv_heads, group, head_dim, block_size, dtype, window, soft_cap, alibi, most_sink, threads, seed
) -> None:
    num_heads = num_kv_heads * group
    batch = make_batch(
        rows, heads=(num_heads, num_kv_heads), head_dim=head_dim, block_size=block_size, dtype=dtype, seed=seed
    )
    slopes = 2.0 ** -torch.arange(1, num_heads + 1) if alibi else None
    sinks = None if most_sink is None else most_sink - torch.arange(num_heads, dtype=torch.float32)
    with torch_threads(threads):
        assert_exact(isas[seed % len(isas)], batch, ScoreRule(head_dim**-0.5, window, soft_cap, slopes, sinks))


@parametrize_pairwise("isa,length,dtype", ISAS, [255, 256, 257, 511, 513, 3000], DTYPES)
def test_contexts_about_as_long_as_a_chunk(length: int, dtype: torch.dtype, isa: str) -> None:
    batch = make_batch([(1, length), (1, 3)], heads=(8, 2), head_dim=64, block_size=16, dtype=dtype)
    assert_exact(isa, batch, ScoreRule(0.125))
    assert_exact(isa, batch, ScoreRule(0.125, sliding_window=250))
    sinks = torch.linspace(-2, 5, 8)
    assert_exact(isa, batch, ScoreRule(0.125, sinks=sinks))
    for window in (1, 250, 256, 512):
        assert_exact(isa, batch, ScoreRule(0.125, sliding_window=window, sinks=sinks))


@parametrize_pairwise("isa,tokens,dtype", ISAS, [15, 16, 17, 31, 33, 63, 64, 65, 127, 129, 200], DTYPES)
def test_chunks_about_as_long_as_a_tile(tokens: int, dtype: torch.dtype, isa: str) -> None:
    batch = make_batch([(tokens, tokens), (tokens, tokens + 37)], dtype=dtype)
    assert_exact(isa, batch, ScoreRule(0.2))
    assert_exact(isa, batch, ScoreRule(0.2, sliding_window=33, sinks=torch.tensor([0.0, 2.0, -9.0, 6.0])))


@pytest.mark.parametrize("heads", [(71, 1), (150, 1)])
def test_more_heads_than_a_tile_has_lines(heads: tuple[int, int], isa: str) -> None:
    batch = make_batch([(1, 40), (3, 21)], heads=heads, head_dim=64, dtype=torch.bfloat16)
    assert_exact(isa, batch, ScoreRule(0.125))


@pytest.mark.parametrize("dtype", DTYPES)
def test_results_depend_on_neither_neighbours_nor_threads(dtype: torch.dtype, isa: str) -> None:
    kernels, rule = make_implementation(isa), ScoreRule(0.125, sinks=torch.tensor([0.0, 2.0, -9.0, 6.0]))
    rows = [(1, 700), (20, 33), (1, 12), (1, 2000), (150, 300)]
    batch = make_batch(rows, heads=(4, 2), head_dim=64, block_size=16, dtype=dtype)
    with torch_threads(1):
        alone = [attend(kernels, part, rule) for part in alone_rows(batch)]
    for threads in (1, 2, 3):
        with torch_threads(threads):
            assert torch.equal(attend(kernels, batch, rule), torch.cat(alone))


def make_decodes(
    sequences: list[tuple[int, int]], heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype
) -> Batch:
    """Sequences of (context of the first row, rows): each next row has a token more, over the same blocks."""
    whole = make_batch(
        [(rows, length + rows - 1) for length, rows in sequences],
        heads=heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=torch.float32 if dtype == torch.int8 else dtype,
    )
    cache, rows = whole.kv_cache, torch.tensor([rows for _, rows in sequences])
    if dtype == torch.int8:
        lines = quantized_lines(cache.transpose(2, 3).reshape(-1, heads[1], head_dim))
        cache = lines.view(*cache.shape[:2], block_size, heads[1], -1).transpose(2, 3).contiguous()
    return Batch(
        whole.query if dtype != torch.int8 else whole.query.bfloat16(),
        cache,
        whole.block_tables.repeat_interleave(rows, 0),
        torch.arange(int(rows.sum()) + 1, dtype=torch.int32),
        torch.cat([length + torch.arange(rows) for length, rows in sequences]).int(),
    )


@given(
    sequences=st.lists(
        st.tuples(st.integers(1, 80) | st.integers(240, 260) | st.integers(490, 700), st.integers(1, 11)),
        min_size=1,
        max_size=3,
    ),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 7]),
    head_dim=st.sampled_from([6, 33, 64, 80]),
    block_size=st.sampled_from([1, 3, 16, 32]),
    dtype=st.sampled_from([*DTYPES, torch.int8]),
    window=st.none() | st.integers(1, 40) | st.integers(200, 300),
    soft_cap=st.none() | st.just(5.0),
    alibi=st.booleans(),
    has_sinks=st.booleans(),
    threads=st.integers(1, 3),
)
def test_rows_of_one_sequence_are_rounded_as_each_alone(
    sequences, num_kv_heads, group, head_dim, block_size, dtype, window, soft_cap, alibi, has_sinks, threads, isa
) -> None:
    num_heads = num_kv_heads * group
    batch = make_decodes(sequences, (num_heads, num_kv_heads), head_dim, block_size, dtype)
    slopes = 2.0 ** -torch.arange(1, num_heads + 1) if alibi else None
    sinks = torch.linspace(-2, 5, num_heads) if has_sinks else None
    kernels, rule = make_implementation(isa), ScoreRule(head_dim**-0.5, window, soft_cap, slopes, sinks)
    alone = torch.cat([attend(kernels, part, rule) for part in alone_rows(batch)])
    assert not alone.isnan().any()
    with torch_threads(threads):
        assert torch.equal(attend(kernels, batch, rule), alone)


def test_a_token_that_is_no_number_spoils_no_row_before_it(isa: str) -> None:
    kernels, rule = make_implementation(isa), ScoreRule(0.125)
    batch = make_decodes([(29, 6)], (4, 2), 64, 16, torch.float32)
    expected = attend(kernels, batch, rule)
    batch.kv_cache[:, batch.block_tables[0, 2].long(), :, 0] = float("nan")
    actual = attend(kernels, batch, rule)
    assert torch.equal(actual[:4], expected[:4])
    assert actual[4:].isnan().all()


def test_rows_over_other_blocks_are_no_sequence(isa: str) -> None:
    kernels, rule = make_implementation(isa), ScoreRule(0.125)
    batch = make_batch([(1, length) for length in range(30, 38)], block_size=16)
    alone = torch.cat([attend(kernels, part, rule) for part in alone_rows(batch)])
    assert torch.equal(attend(kernels, batch, rule), alone)


@pytest.mark.parametrize("window", [None, 33, 130])
def test_a_token_of_a_prompt_is_rounded_alike_in_any_chunk(window: int | None, isa: str) -> None:
    kernels, rule = make_implementation(isa), ScoreRule(0.125, sliding_window=window)
    batch = make_batch([(400, 400)], heads=(4, 2), head_dim=64, block_size=16, dtype=torch.bfloat16)
    whole = attend(kernels, batch, rule)
    for begin, end in ((0, 7), (7, 200), (200, 202), (202, 400)):
        starts, lengths = torch.tensor([0, end - begin], dtype=torch.int32), torch.tensor([end], dtype=torch.int32)
        part = replace(batch, query=batch.query[begin:end], query_start_loc=starts, seq_lens=lengths)
        assert torch.equal(attend(kernels, part, rule), whole[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
def test_nan_stays_in_its_head_and_is_not_lost(dtype: torch.dtype, isa: str) -> None:
    batch = make_batch([(1, 20), (1, 600), (5, 30)], heads=(4, 2), head_dim=40, block_size=16, dtype=dtype)
    kernels, rule = make_implementation(isa), ScoreRule(0.2)
    expected = attend(kernels, batch, rule)
    assert not expected.isnan().any()
    poisoned = torch.zeros(batch.query.shape[:2], dtype=torch.bool)
    poisoned[0, 1] = poisoned[1, 3] = poisoned[4, 2] = True
    batch.query[(*poisoned.nonzero(as_tuple=True), torch.tensor(7))] = float("nan")
    actual = attend(kernels, batch, rule)
    assert actual[poisoned].isnan().all()
    assert torch.equal(actual[~poisoned], expected[~poisoned])


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_poisoned_key_poisons_all_who_see_it(bad: float, tokens: int, isa: str) -> None:
    batch = make_batch([(tokens, 300), (tokens, 9)], head_dim=32, block_size=4)
    batch.kv_cache[0, batch.block_tables[0, 70].long(), :, 1] = bad
    actual = attend(make_implementation(isa), batch, ScoreRule(0.2))
    assert actual[:tokens].isnan().all()
    assert not actual[tokens:].isnan().any()


def test_scores_that_are_all_minus_infinity_give_nan_as_softmax_does(isa: str) -> None:
    batch = make_batch([(1, 20), (2, 20)], heads=(1, 1), head_dim=8, block_size=20)
    batch.kv_cache[0, batch.block_tables[:, 0].long(), :, :, 0] = float("-inf")
    batch.query[..., 0] = 1.0
    assert attend(make_implementation(isa), batch, ScoreRule(0.2)).isnan().all()


def test_large_scores_neither_overflow_nor_vanish(isa: str) -> None:
    batch = make_batch([(1, 500), (9, 70)], head_dim=32, block_size=16)
    assert_exact(isa, batch, ScoreRule(300.0))
    batch.kv_cache.mul_(1e-20)
    assert_exact(isa, batch, ScoreRule(1.0))


def test_views_are_read_where_they_are(isa: str) -> None:
    batch = make_batch([(1, 300), (30, 40)], heads=(4, 2), head_dim=24, block_size=16, dtype=torch.bfloat16)
    kernels, rule = make_implementation(isa), ScoreRule(0.2, alibi_slopes=torch.ones(8)[::2])
    wide = torch.full((batch.query.shape[0], 7, 30), float("nan"), dtype=torch.bfloat16)
    wide[:, 1:5, :24] = batch.query
    tables = torch.full((2, 99), 2**31 - 1, dtype=torch.int32)
    tables[:, : batch.block_tables.shape[1]] = batch.block_tables
    strided = replace(
        batch,
        query=wide[:, 1:5, :24],
        block_tables=tables[:, : batch.block_tables.shape[1]],
        seq_lens=torch.stack((batch.seq_lens, batch.seq_lens), dim=1)[:, 0],
    )
    assert torch.equal(attend(kernels, strided, rule), attend(kernels, batch, rule))
    transposed = replace(batch, query=batch.query.transpose(1, 2).contiguous().transpose(1, 2))
    assert torch.equal(attend(kernels, transposed, rule), attend(kernels, batch, rule))


def test_an_empty_batch_gives_nothing(isa: str) -> None:
    none = torch.zeros(0, dtype=torch.int32)
    pool, starts = torch.zeros(2, 5, 2, 16, 32), torch.zeros(1, dtype=torch.int32)
    batch = Batch(torch.zeros(0, 4, 32), pool, none.view(0, 3), starts, none)
    actual = attend(make_implementation(isa), batch, ScoreRule(1.0), max_query_len=1, max_seq_len=1)
    assert actual.shape == (0, 4, 32)


GOOD = make_batch([(1, 7), (2, 6)])
BAD: list[tuple[dict[str, Any], str]] = [
    ({"block_tables": GOOD.block_tables + 1000}, "block_tables names a block"),
    ({"block_tables": -GOOD.block_tables - 1}, "block_tables names a block"),
    ({"seq_lens": torch.tensor([7, 1], dtype=torch.int32)}, "contradict"),
    ({"seq_lens": torch.tensor([7, 600], dtype=torch.int32)}, "contradict"),
    ({"query_start_loc": torch.tensor([0, 4, 3], dtype=torch.int32)}, "contradict"),
    ({"query_start_loc": torch.tensor([0, 1, 2], dtype=torch.int32)}, "contradict"),
    ({"query_start_loc": torch.tensor([1, 2, 3], dtype=torch.int32)}, "contradict"),
]


@pytest.mark.parametrize(("changes", "message"), BAD)
def test_indexes_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(IndexError, match=message):
        attend(make_implementation(ISAS[0]), replace(GOOD, **changes), ScoreRule(1.0), **GOOD.limits)
