"""All kernels, in Triton's interpreter and on a GPU if there is one: attention, the pool, operations on each line.

They are in one file, which one process of the test runner runs: each interpreter is a process that imports torch.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch

from quire_kernels.cuda.attention import (
    DecodeTiling,
    PrefillTiling,
    decode_attention,
    paged_attention,
    prefill_attention,
)
from quire_kernels.cuda.blocks import WORDS, copy_blocks, reshape_and_cache, rotary_and_cache, swap_blocks
from quire_kernels.cuda.pointwise import TILE, layer_norm, rms_norm, rotary, silu_and_mul
from quire_kernels.cuda.tiles import PagedBatch
from quire_kernels.reference import ScoreRule
from tests.support.pairwise import pairwise
from tests.support.triton_devices import KernelDevice
from tests.unit.kernels.test_paged_attention import (
    SINKS,
    TOLERANCE,
    Batch,
    make_batch,
    naive_attention,
    without_tokens_before,
)
from tests.unit.kernels.test_pointwise import naive_layer_norm, naive_rms_norm, naive_rotary, naive_silu_and_mul

pytestmark = pytest.mark.extended
DTYPES = [torch.float32, torch.bfloat16, torch.float16]

MIXED = [(1, 1), (3, 3), (1, 17), (4, 11), (40, 71), (1, 150)]
# Both kernels, for tests that do not depend on sizes.
SHORT = [(1, 1), (3, 3), (1, 17), (4, 11)]
# Small contexts then have many pieces, more than are joined at once.
MANY_PIECES = DecodeTiling(tile=16, shortest_split=16, longest_split=16)
PREFILL_TILING = PrefillTiling(query_tile=16, tile=16)


def attend(device: KernelDevice, batch: Batch, scale: float = 0.3, **options: Any) -> torch.Tensor:
    return device.run(paged_attention, *batch.tensors, scores=ScoreRule(scale, **options), **batch.limits).result


def assert_close(
    actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, tolerance: Mapping[torch.dtype, float] = TOLERANCE
) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance[dtype], atol=tolerance[dtype])


def assert_matches_naive(device: KernelDevice, batch: Batch, **options: Any) -> None:
    assert_close(attend(device, batch, **options), naive_attention(batch, **options), batch.query.dtype)


@pytest.mark.parametrize(
    ("heads", "block_size"), [((6, 2), 16), ((2, 2), 1), ((4, 1), 5), ((20, 1), 5), ((6, 2), 64), ((2, 2), 32)]
)
def test_mixed_batch_matches_naive(device: KernelDevice, heads: tuple[int, int], block_size: int) -> None:
    assert_matches_naive(device, make_batch(MIXED, heads=heads, block_size=block_size))


@pytest.mark.parametrize("head_dim", [80, 8, 128, 192, 256])
def test_head_sizes_match_naive(device: KernelDevice, head_dim: int) -> None:
    for seed, dtype in enumerate(device.dot_dtypes):
        batch = make_batch(MIXED, heads=(4, 2), head_dim=head_dim, block_size=16, dtype=dtype, seed=seed)
        assert_matches_naive(device, batch, scale=head_dim**-0.5)


@pytest.mark.parametrize(
    ("sliding_window", "soft_cap", "alibi", "sinks"),
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


@pytest.mark.parametrize(
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


# One row has more pieces than are joined at once.
@pytest.mark.parametrize(
    ("lengths", "sliding_window", "sinks"), pairwise([[16, 17, 270, 1, 130], [1]], [40, None], [SINKS, None])
)
def test_contexts_in_many_pieces_match_naive(
    device: KernelDevice, lengths: list[int], sliding_window: int | None, sinks: torch.Tensor | None
) -> None:
    batch = make_batch([(1, length) for length in lengths], heads=(6, 2), head_dim=48)
    scores = ScoreRule(0.3, sliding_window, sinks=sinks)
    output = torch.full_like(batch.query, torch.nan)
    rows, longest = PagedBatch(*batch.tensors), max(lengths)
    outcome = device.run(decode_attention, output, rows, scores, max_seq_len=longest, tiling=MANY_PIECES)
    expected = naive_attention(batch, sliding_window=sliding_window, sinks=sinks)
    assert_close(outcome.arguments[0], expected, batch.query.dtype)


@pytest.mark.parametrize("sliding_window", [None, 40])
def test_rows_far_shorter_than_the_longest_that_may_come_match_naive(
    device: KernelDevice, sliding_window: int | None
) -> None:
    """As in a recorded graph, whose contexts are cut for the longest one."""
    batch = make_batch([(1, length) for length in (1, 16, 17, 300)], heads=(6, 2))
    scores = ScoreRule(0.3, sliding_window, sinks=SINKS)
    result = device.run(paged_attention, *batch.tensors, scores=scores, max_query_len=1, max_seq_len=20_000).result
    expected = naive_attention(batch, sliding_window=sliding_window, sinks=SINKS)
    assert_close(result, expected, batch.query.dtype)


def test_each_kernel_leaves_the_rows_of_the_other_alone(device: KernelDevice) -> None:
    batch = make_batch(SHORT)
    expected, starts = naive_attention(batch), batch.query_start_loc.tolist()
    is_decode = torch.tensor([new == 1 for new, _ in SHORT for _ in range(new)])
    assert len(is_decode) == starts[-1]
    output = torch.full_like(batch.query, torch.nan)
    scores, rows = ScoreRule(0.3), PagedBatch(*batch.tensors)
    (decoded, *_) = device.run(
        decode_attention, output.clone(), rows, scores, max_seq_len=150, tiling=DecodeTiling()
    ).arguments
    (prefilled, *_) = device.run(prefill_attention, output.clone(), rows, scores, tiling=PREFILL_TILING).arguments
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


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_strided_query_is_accepted(device: KernelDevice, axis: int) -> None:
    batch = make_batch(SHORT)
    doubled = torch.stack((batch.query, batch.query), dim=axis + 1)
    strided = replace(batch, query=doubled.select(axis + 1, 0))
    assert not strided.query.is_contiguous()
    assert_close(attend(device, strided), naive_attention(batch), torch.float32)


def test_no_rows_give_an_empty_result(device: KernelDevice) -> None:
    none = torch.empty(0, 3, dtype=torch.int32)
    tensors = (torch.empty(0, 4, 32), torch.zeros(2, 3, 2, 5, 32), none, torch.zeros(1, dtype=torch.int32), none[:, 0])
    outcome = device.run(paged_attention, *tensors, scores=ScoreRule(1.0), max_query_len=1, max_seq_len=1)
    assert outcome.result.shape == (0, 4, 32)


@pytest.mark.parametrize("sliding_window", [17, 1, 15, 16, 63, 150])
def test_windows_that_begin_and_end_anywhere_in_tiles_match_naive(device: KernelDevice, sliding_window: int) -> None:
    """Whole tiles lie between the keys that some queries of a tile no longer see and keys that some do not see yet."""
    batch, sinks = make_batch([(40, 150), (2, 97), (33, 33), (5, 64)], heads=(3, 1)), SINKS[:3]
    output = torch.full_like(batch.query, torch.nan)
    rows, scores = PagedBatch(*batch.tensors), ScoreRule(0.3, sliding_window, sinks=sinks)
    outcome = device.run(prefill_attention, output, rows, scores, tiling=PREFILL_TILING)
    expected = naive_attention(batch, sliding_window=sliding_window, sinks=sinks)
    assert_close(outcome.arguments[0], expected, batch.query.dtype)
    without = without_tokens_before(batch, sliding_window)
    again = device.run(prefill_attention, output, PagedBatch(*without.tensors), scores, tiling=PREFILL_TILING)
    assert torch.equal(again.arguments[0], outcome.arguments[0])


def test_scores_of_any_size_match_naive(device: KernelDevice) -> None:
    """Products of hundreds would overflow in exp2 if the largest one were not subtracted first."""
    batch = make_batch([*SHORT, (1, 50)], heads=(2, 1))
    assert_matches_naive(device, batch, scale=30.0)
    assert_matches_naive(device, batch, scale=1e-6)


@pytest.mark.parametrize("scale", [10.0, 1e-6])
def test_sinks_of_any_size_match_naive(device: KernelDevice, scale: float) -> None:
    batch = make_batch([*SHORT, (1, 700)], heads=(4, 1))
    sinks = torch.tensor([float("-inf"), -50.0, 0.0, 50.0])
    assert_matches_naive(device, batch, scale=scale, sinks=sinks)
    assert_matches_naive(device, batch, scale=scale, sinks=sinks, sliding_window=5)


@pytest.mark.parametrize("scale", [0.0, -0.1, float("nan")])
def test_scales_that_are_not_positive_are_refused(device: KernelDevice, scale: float) -> None:
    with pytest.raises(ValueError, match=f"scale is {scale}; the GPU kernels take more than 0 only"):
        attend(device, make_batch([(1, 3)]), scale=scale)


# Writes into the pool and moves of blocks, compared with plain indexing

Shape = tuple[int, int, int]


def make_pool(num_blocks: int, shape: Shape = (3, 4, 8), *, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_blocks, *shape, generator=generator).to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("slots", "shape", "dtype"), pairwise([[0], [19, 5, 4, 6, 0], []], [(3, 4, 8), (1, 16, 64), (2, 5, 20)], DTYPES)
)
def test_tokens_land_in_their_slots_and_nowhere_else(
    device: KernelDevice, slots: list[int], shape: Shape, dtype: torch.dtype
) -> None:
    pool = make_pool(5, shape, dtype=dtype)
    num_heads, block_size, head_dim = shape
    qkv = torch.randn(len(slots), 3 * num_heads, head_dim).to(dtype)
    _, key, value = qkv.split(num_heads, dim=1)
    expected = pool.clone()
    for token, slot in enumerate(slots):
        expected[0, slot // block_size, :, slot % block_size] = key[token]
        expected[1, slot // block_size, :, slot % block_size] = value[token]
    outcome = device.run(reshape_and_cache, key, value, pool, torch.tensor(slots, dtype=torch.int64))
    assert_same_bits(outcome.arguments[2], expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 20, 64])
def test_fused_rotary_and_cache_is_the_one_after_the_other(
    device: KernelDevice, head_dim: int, dtype: torch.dtype
) -> None:
    pool = make_pool(4, (3, 4, head_dim), dtype=dtype)
    query, key, value = torch.randn(5, 12, head_dim).to(dtype).split((6, 3, 3), dim=1)
    table = torch.rand(50, head_dim)
    positions, slots = torch.tensor([0, 49, 7, 7, 3]), torch.tensor([15, 2, 3, 4, 8])
    turned_query, turned_key = device.run(rotary, query, key, positions, table).result
    expected = device.run(reshape_and_cache, turned_key, value, pool.clone(), slots).arguments[2]
    outcome = device.run(rotary_and_cache, query, key, value, positions, table, pool, slots)
    assert_same_bits(outcome.result, turned_query)
    assert_same_bits(outcome.arguments[5], expected)


COPIES = {
    "chain": [(0, 1), (1, 2), (4, 0)],
    "swap of two": [(2, 3), (3, 2)],
    "fan out": [(5, 0), (5, 1), (5, 2)],
    "one": [(0, 5)],
    "onto itself": [(3, 3)],
}


# The last shape has blocks that take several programs; the last program is not full.
@pytest.mark.parametrize(
    ("pairs", "shape", "dtype"),
    pairwise(list(COPIES.values()), [(3, 4, 8), (1, 3, 5), (3, 32, WORDS // 64)], [torch.float32, torch.bfloat16]),
)
def test_copies_read_all_sources_before_they_write(
    device: KernelDevice, pairs: list[tuple[int, int]], shape: Shape, dtype: torch.dtype
) -> None:
    pools = [make_pool(6, (width, *shape[1:]), seed=width, dtype=dtype) for width in (shape[0], 1, shape[0], 1)]
    pools[1][0, 5, 0, 0, 0] = torch.nan
    outcome = device.run(copy_blocks, pools, torch.tensor(pairs))
    for actual, before in zip(outcome.arguments[0], pools, strict=True):
        expected = before.clone()
        for source, destination in pairs:
            expected[:, destination] = before[:, source]
        assert_same_bits(actual, expected)


# The last shape has more pieces than there are programs.
@pytest.mark.parametrize(
    ("sizes", "shape", "dtype"), pairwise([(10, 4), (4, 10)], [(3, 4, 8), (3, 32, WORDS // 64)], DTYPES)
)
def test_swap_moves_blocks_between_pools_of_different_size(
    device: KernelDevice, sizes: tuple[int, int], shape: Shape, dtype: torch.dtype
) -> None:
    pairs = [(sizes[0] - 1, 0), (2, 3), (2, 1)]
    shapes = [shape, (2, *shape[1:]), shape]
    source = [make_pool(sizes[0], each, seed=layer, dtype=dtype) for layer, each in enumerate(shapes)]
    destination = [make_pool(sizes[1], each, seed=layer + 9, dtype=dtype) for layer, each in enumerate(shapes)]
    expected = [pool.clone() for pool in destination]
    for pool, old in zip(source, expected, strict=True):
        for first, second in pairs:
            old[:, second] = pool[:, first]
    moved = device.run(swap_blocks, source, destination, torch.tensor(pairs)).arguments[1]
    for actual, wanted in zip(moved, expected, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("move", [copy_blocks, lambda pools, pairs: swap_blocks(pools, pools, pairs)])
def test_no_pairs_and_no_layers_change_nothing(move: Callable[..., None]) -> None:
    pool = make_pool(3)
    before = pool.clone()
    move([pool], torch.empty(0, 2, dtype=torch.int64))
    move([], torch.tensor([[0, 1]]))
    assert torch.equal(pool, before)


# Norms, rotary embeddings and activations, compared with their formulas in float64

# The interpreter truncates bfloat16 where a GPU rounds.
LINE_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [(1, 1), (1, 8), (7, 80), (3, 5, 33), (2, 4100), (0, 16)]


def assert_lines_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert_close(actual, expected, dtype, LINE_TOLERANCE)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(device: KernelDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    assert_lines_close(device.run(rms_norm, x, weight, 1e-3).result, naive_rms_norm(x, weight), dtype)
    summed = device.run(rms_norm, x, weight, 1e-3, 0.0, residual)
    stream = summed.arguments[4]
    assert_lines_close(stream, x.double() + residual.double(), dtype)
    assert_lines_close(summed.result, naive_rms_norm(stream, weight), dtype)
    factor = weight.double() + 1
    assert_lines_close(device.run(rms_norm, x, weight, 1e-3, 1.0).result, naive_rms_norm(x, factor), dtype)
    summed = device.run(rms_norm, x, weight, 1e-3, 1.0, residual)
    assert_lines_close(summed.result, naive_rms_norm(summed.arguments[4], factor), dtype)


def test_norms_of_strided_lines(device: KernelDevice) -> None:
    wide, weight = torch.randn(5, 20), torch.rand(8)
    for x in (wide[:, 4:12], wide[:, ::2][:, :8], torch.randn(8, 5).T):
        assert_lines_close(device.run(rms_norm, x, weight, 1e-3).result, naive_rms_norm(x, weight), x.dtype)
        residual = torch.randn(5, 20)[:, 4:12]
        summed = device.run(rms_norm, x, weight, 1e-3, 0.0, residual)
        assert torch.equal(summed.arguments[4], x + residual)
        assert_lines_close(summed.result, naive_rms_norm(x + residual, weight), x.dtype)


@pytest.mark.parametrize(("shape", "affine", "dtype"), pairwise(SHAPES, [True, False], DTYPES))
def test_layer_norm(device: KernelDevice, shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(shape) + 1).to(dtype)
    weight, bias = torch.rand(2, shape[-1]).to(dtype) if affine else (None, None)
    assert_lines_close(device.run(layer_norm, x, weight, bias, 1e-5).result, naive_layer_norm(x, weight, bias), dtype)
    part = torch.randn(shape).to(dtype)
    summed = device.run(layer_norm, part, weight, bias, 1e-5, x - part)
    stream = summed.arguments[4]
    assert_lines_close(stream, (x - part).double() + part.double(), dtype)
    assert_lines_close(summed.result, device.run(layer_norm, stream, weight, bias, 1e-5).result.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 32, 80])
def test_rotary_turns_pairs_of_halves(device: KernelDevice, head_dim: int, dtype: torch.dtype) -> None:
    table, positions = torch.randn(50, head_dim), torch.tensor([0, 49, 7, 7])
    query, key = torch.randn(4, 8, head_dim).to(dtype).split((6, 2), dim=1)
    for turned, x in zip(device.run(rotary, query, key, positions, table).result, (query, key), strict=True):
        assert_lines_close(turned, naive_rotary(x, positions, table), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 14), (1, 2, 2), (2, 2 * TILE + 6), (0, 8)], ids=str)
def test_silu_and_mul(device: KernelDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    assert_lines_close(device.run(silu_and_mul, x).result, naive_silu_and_mul(x), dtype)
