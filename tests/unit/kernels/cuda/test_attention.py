"""Decode and prefill attention against a loop over tokens and heads in float64."""

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch

from kernels.cuda.attention import DecodeTiling, PrefillTiling, decode_attention, paged_attention, prefill_attention
from kernels.cuda.tiles import PagedBatch
from kernels.reference import ScoreRule
from tests.support.pairwise import pairwise
from tests.support.tiers import parametrize_once
from tests.support.triton_devices import KernelDevice
from tests.unit.kernels.test_paged_attention import SINKS, TOLERANCE, Batch, make_batch, naive_attention

MIXED = [(1, 1), (3, 3), (1, 17), (4, 11), (40, 71), (1, 150)]
# So that small contexts have many pieces, more than are joined at once.
MANY_PIECES = DecodeTiling(tile=16, shortest_split=16, longest_split=16)


def attend(device: KernelDevice, batch: Batch, scale: float = 0.3, **options: Any) -> torch.Tensor:
    return device.run(paged_attention, *rows_of(batch), scores=ScoreRule(scale, **options), **batch.limits).result


def rows_of(batch: Batch) -> tuple[torch.Tensor, ...]:
    return batch.query, batch.kv_cache, batch.block_tables, batch.query_start_loc, batch.seq_lens


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def assert_matches_naive(device: KernelDevice, batch: Batch, **options: Any) -> None:
    assert_close(attend(device, batch, **options), naive_attention(batch, **options), batch.query.dtype)


@parametrize_once(
    "heads, block_size", [((6, 2), 16), ((2, 2), 1), ((4, 1), 5), ((20, 1), 5), ((6, 2), 64), ((2, 2), 32)]
)
def test_mixed_batch_matches_naive(device: KernelDevice, heads: tuple[int, int], block_size: int) -> None:
    assert_matches_naive(device, make_batch(MIXED, heads=heads, block_size=block_size))


@parametrize_once("head_dim", [80, 8, 128, 192, 256])
def test_head_sizes_match_naive(device: KernelDevice, head_dim: int) -> None:
    for seed, dtype in enumerate(device.dot_dtypes):
        batch = make_batch(MIXED, heads=(4, 2), head_dim=head_dim, block_size=16, dtype=dtype, seed=seed)
        assert_matches_naive(device, batch, scale=head_dim**-0.5)


@parametrize_once(
    "sliding_window, soft_cap, alibi, sinks",
    [(33, 1.5, True, SINKS), *pairwise([None, 1, 33, 1000], [None, 1.5], [False, True], [None, SINKS])],
)
def test_score_options_match_naive(
    device: KernelDevice,
    sliding_window: int | None,
    soft_cap: float | None,
    alibi: bool,
    sinks: torch.Tensor | None,
) -> None:
    slopes = torch.tensor([2.0**-n for n in range(6)]) if alibi else None
    options = {"sliding_window": sliding_window, "soft_cap": soft_cap, "alibi_slopes": slopes, "sinks": sinks}
    assert_matches_naive(device, make_batch(MIXED, heads=(6, 2)), **options)


@parametrize_once(
    "rows",
    [
        [(64, 64), (32, 32), (1, 1), (32, 65)],
        [(1, 1)],
        [(1, 64)],
        [(2, 2)],
        [(33, 100)],
        [(1, n) for n in range(1, 34)],
        [(n, n + 3) for n in range(1, 18)],
    ],
    ids=lambda rows: f"{len(rows)}rows-{rows[0][0]}of{rows[0][1]}",
)
def test_batches_of_any_shape_match_naive(device: KernelDevice, rows: list[tuple[int, int]]) -> None:
    assert_matches_naive(device, make_batch(rows, heads=(4, 1), block_size=16))


@parametrize_once("seed", range(4))
def test_random_batches_match_naive(device: KernelDevice, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    draw = torch.randint(1, 40, (7, 2), generator=generator).tolist()
    rows = [(new if new % 2 else 1, new + before) for new, before in draw]
    assert_matches_naive(device, make_batch(rows, heads=(6, 3), block_size=7, seed=seed))


@parametrize_once(
    "lengths, sliding_window, sinks", list(product([[16, 17, 500, 1, 300], [1]], [40, None], [SINKS, None]))
)
def test_contexts_in_many_pieces_match_naive(
    device: KernelDevice, lengths: list[int], sliding_window: int | None, sinks: torch.Tensor | None
) -> None:
    batch = make_batch([(1, length) for length in lengths], heads=(6, 2), head_dim=48)
    scores = ScoreRule(0.3, sliding_window, sinks=sinks)
    output = torch.full_like(batch.query, torch.nan)
    rows, longest = PagedBatch(*rows_of(batch)), max(lengths)
    outcome = device.run(decode_attention, output, rows, scores, max_seq_len=longest, tiling=MANY_PIECES)
    expected = naive_attention(batch, sliding_window=sliding_window, sinks=sinks)
    assert_close(outcome.arguments[0], expected, batch.query.dtype)


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_rows_far_shorter_than_the_longest_that_may_come_match_naive(
    device: KernelDevice, sliding_window: int | None
) -> None:
    """What a recorded graph does, whose contexts are cut for the longest one."""
    batch = make_batch([(1, length) for length in (1, 16, 17, 300)], heads=(6, 2))
    scores = ScoreRule(0.3, sliding_window, sinks=SINKS)
    result = device.run(paged_attention, *rows_of(batch), scores=scores, max_query_len=1, max_seq_len=20_000).result
    expected = naive_attention(batch, sliding_window=sliding_window, sinks=SINKS)
    assert_close(result, expected, batch.query.dtype)


def test_a_lone_decode_of_which_more_tokens_were_expected_matches_naive(device: KernelDevice) -> None:
    batch = make_batch([(1, 40)])
    scores = ScoreRule(0.3)
    result = device.run(paged_attention, *rows_of(batch), scores=scores, max_query_len=7, max_seq_len=60).result
    assert_close(result, naive_attention(batch), batch.query.dtype)


def test_each_kernel_leaves_the_rows_of_the_other_alone(device: KernelDevice) -> None:
    batch = make_batch(MIXED)
    expected, starts = naive_attention(batch), batch.query_start_loc.tolist()
    is_decode = torch.tensor([new == 1 for new, _ in MIXED for _ in range(new)])
    assert len(is_decode) == starts[-1]
    output = torch.full_like(batch.query, torch.nan)
    scores, rows = ScoreRule(0.3), PagedBatch(*rows_of(batch))
    decoded = device.run(
        decode_attention, output.clone(), rows, scores, max_seq_len=150, tiling=DecodeTiling()
    ).arguments[0]
    prefilled = device.run(
        prefill_attention, output.clone(), rows, scores, tiling=PrefillTiling(query_tile=16, tile=16)
    ).arguments[0]
    assert torch.equal(decoded.isnan().all(dim=(1, 2)), ~is_decode)
    assert torch.equal(prefilled.isnan().all(dim=(1, 2)), is_decode)
    assert_close(torch.where(is_decode[:, None, None], decoded, prefilled), expected, batch.query.dtype)


def test_poisoned_row_leaves_its_neighbours_alone(device: KernelDevice) -> None:
    batch = make_batch([(1, 20), (1, 23), (3, 9), (2, 12)])
    expected = naive_attention(batch)
    for row in (1, 3):
        batch.kv_cache[:, batch.block_tables[row, 0].long()] = torch.inf
    actual = attend(device, batch)
    assert actual[1].isnan().any()
    assert actual[5:].isnan().any()
    assert_close(actual[[0, 2, 3, 4]], expected[[0, 2, 3, 4]], torch.float32)


def test_row_alone_gives_what_it_gives_in_a_batch(device: KernelDevice) -> None:
    batch = make_batch(MIXED, block_size=16)
    together = attend(device, batch)
    for row in range(len(MIXED)):
        start, end = batch.query_start_loc[row : row + 2].tolist()
        alone = replace(
            batch,
            query=batch.query[start:end],
            block_tables=batch.block_tables[row : row + 1],
            query_start_loc=torch.tensor([0, end - start], dtype=torch.int32),
            seq_lens=batch.seq_lens[row : row + 1],
        )
        torch.testing.assert_close(attend(device, alone), together[start:end], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strided_query_is_accepted(device: KernelDevice, axis: int) -> None:
    batch = make_batch(MIXED)
    doubled = torch.stack((batch.query, batch.query), dim=axis + 1)
    strided = replace(batch, query=doubled.select(axis + 1, 0))
    assert not strided.query.is_contiguous()
    assert_close(attend(device, strided), naive_attention(batch), torch.float32)


def test_no_rows_give_an_empty_result(device: KernelDevice) -> None:
    none = torch.empty(0, 3, dtype=torch.int32)
    tensors = (torch.empty(0, 4, 32), torch.zeros(2, 3, 2, 5, 32), none, torch.zeros(1, dtype=torch.int32), none[:, 0])
    outcome = device.run(paged_attention, *tensors, scores=ScoreRule(1.0), max_query_len=1, max_seq_len=1)
    assert outcome.result.shape == (0, 4, 32)


@parametrize_once("sliding_window", [17, 1, 15, 16, 63, 150])
def test_windows_that_begin_and_end_anywhere_in_tiles_match_naive(device: KernelDevice, sliding_window: int) -> None:
    """Between the keys that some queries of a tile no longer see and those that some do not see yet lie whole tiles."""
    batch = make_batch([(40, 150), (2, 97), (33, 33), (5, 64)], heads=(6, 2))
    output = torch.full_like(batch.query, torch.nan)
    rows, scores = PagedBatch(*rows_of(batch)), ScoreRule(0.3, sliding_window, sinks=SINKS)
    outcome = device.run(prefill_attention, output, rows, scores, tiling=PrefillTiling(query_tile=16, tile=16))
    expected = naive_attention(batch, sliding_window=sliding_window, sinks=SINKS)
    assert_close(outcome.arguments[0], expected, batch.query.dtype)


def test_scores_of_any_size_match_naive(device: KernelDevice) -> None:
    """Products of hundreds would overflow in exp2, were the best of them not taken off first."""
    batch = make_batch(MIXED, heads=(4, 2))
    assert_matches_naive(device, batch, scale=30.0)
    assert_matches_naive(device, batch, scale=1e-6)


@parametrize_once("scale", [10.0, 1e-6])
def test_sinks_of_any_size_match_naive(device: KernelDevice, scale: float) -> None:
    batch = make_batch([*MIXED, (1, 700)], heads=(4, 2))
    sinks = torch.tensor([float("-inf"), -50.0, 0.0, 50.0])
    assert_matches_naive(device, batch, scale=scale, sinks=sinks)
    assert_matches_naive(device, batch, scale=scale, sinks=sinks, sliding_window=5)


@pytest.mark.parametrize("scale", [0.0, -0.1, float("nan")])
def test_scales_that_are_not_positive_are_refused(device: KernelDevice, scale: float) -> None:
    with pytest.raises(ValueError, match=f"scale is {scale}; the GPU kernels take more than 0 only"):
        attend(device, make_batch([(1, 3)]), scale=scale)


def test_heads_that_do_not_fit_are_refused(device: KernelDevice) -> None:
    batch = make_batch([(1, 3)], head_dim=272)
    with pytest.raises(ValueError, match="head size 272; the GPU kernels take at most 256"):
        attend(device, batch)


def test_padded_block_tables_are_accepted(device: KernelDevice) -> None:
    batch = make_batch(MIXED)
    wide = torch.cat((batch.block_tables, torch.full_like(batch.block_tables, -1)), dim=1)
    padded = replace(batch, block_tables=wide[:, : batch.block_tables.shape[1]])
    assert_close(attend(device, padded), naive_attention(batch), torch.float32)
