"""Causal attention of rows with several new tokens over their paged contexts.

A query tile holds tokens of one row times the query heads that share a KV head, so that keys and values are read once
for all of them. Tiles of all rows form one flat grid; each program finds its row by binary search in the rows' starts,
so that the host needs to know no length.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.reference_attention import ScoreRule
from kernels.triton.launch import launch, padded
from kernels.triton.paged_batch import PagedBatch, Shape
from kernels.triton.paged_tiles import find_context, load_keys_and_values, load_vectors, store_vectors
from kernels.triton.scores import Scoring, make_scores, score_unit, sink_scores
from kernels.triton.softmax import PRECISION, add_tile, finish_softmax, start_softmax

_CHANGING = ("table_stride", "num_rows")
_INDEXES = ("block_tables", "query_start_loc", "seq_lens")


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """How the prefill kernel is cut and launched.

    Attributes:
        query_tile: new tokens times query heads of one KV head that a program attends for, a power of two.
        tile: tokens whose keys are loaded at once, a power of two of at least 16.
    """

    query_tile: int = 128
    tile: int = 64
    num_warps: int = 8
    num_stages: int = 5


@triton.jit
def _find_row(query_start_loc, query_tile, num_rows, TILE_TOKENS: tl.constexpr):
    """The row to which a query tile belongs: row r's tiles start at `query_start_loc[r] // TILE_TOKENS + r`.

    That leaves room for every row's tiles, the last of which may be empty.
    """
    low = 0
    high = num_rows
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(query_start_loc + middle) // TILE_TOKENS + middle <= query_tile:
            low = middle
        else:
            high = middle
    return low


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_INDEXES)
def _prefill_kernel(
    output, query, kv_cache, block_tables, query_start_loc, seq_lens, alibi_slopes, sinks, scale, soft_cap,
    sliding_window, query_stride, value_offset, table_stride, num_rows,
    SHAPE: Shape, TILE_TOKENS: tl.constexpr, QUERY_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # The last tokens of a chunk see most keys: the longest programs start first, all heads of a tile side by side.
    query_tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // SHAPE.num_kv_heads
    head = tl.program_id(0) % SHAPE.num_kv_heads
    row = _find_row(query_start_loc, query_tile, num_rows, TILE_TOKENS)
    row_start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - row_start
    first = (query_tile - row_start // TILE_TOKENS - row) * TILE_TOKENS
    if num_tokens < 2 or first >= num_tokens:
        return
    num_computed = tl.load(seq_lens + row) - num_tokens

    members = tl.arange(0, QUERY_TILE)
    tokens, heads = first + members // SHAPE.group, head * SHAPE.group + members % SHAPE.group
    wanted = (members < TILE_TOKENS * SHAPE.group) & (tokens < num_tokens)
    flat_tokens = (row_start + tokens).to(tl.int64)
    queries = load_vectors(query, flat_tokens * query_stride + heads * SHAPE.head_dim, wanted, SHAPE)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=wanted, other=0.0)
    first_scores = None
    if sinks is not None:
        first_scores = tl.load(sinks + heads, mask=wanted, other=float("-inf"))
    scoring = Scoring(scale, soft_cap, slopes, first_scores)
    context = find_context(kv_cache, value_offset, block_tables, table_stride, row, head, SHAPE)
    last = tl.minimum(first + TILE_TOKENS, num_tokens) - 1
    attended = _attend_to_context(
        queries, num_computed + tokens, context, scoring, num_computed + first, num_computed + last, sliding_window,
        SHAPE, QUERY_TILE, TILE,
    )  # fmt: skip
    lines = flat_tokens * SHAPE.num_heads + heads
    store_vectors(output, lines * SHAPE.head_dim, wanted, attended, SHAPE)


@triton.jit
def _attend_to_context(
    queries, query_positions, context, scoring, first, last, sliding_window,
    SHAPE: Shape, QUERY_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What `queries` [M, D], the positions of which go from `first` to `last`, find in the keys that they may see."""
    running = start_softmax(sink_scores(scoring), QUERY_TILE, 1, SHAPE.head_pad)
    # From `inner` to `outer` every query sees all keys: these tiles need no mask.
    inner = 0
    outer = (first + 1) // TILE * TILE
    if sliding_window is not None:
        begin = tl.maximum(first + 1 - sliding_window, 0) // TILE * TILE
        inner = tl.minimum(tl.cdiv(tl.maximum(last + 1 - sliding_window, 0), TILE) * TILE, outer)
        running = _attend_to_tiles(
            running, queries, query_positions, context, scoring, begin, inner, sliding_window, SHAPE, TILE, True
        )
    running = _attend_to_tiles(
        running, queries, query_positions, context, scoring, inner, outer, None, SHAPE, TILE, False
    )
    running = _attend_to_tiles(
        running, queries, query_positions, context, scoring, outer, last + 1, sliding_window, SHAPE, TILE, True
    )
    attended, _ = finish_softmax(running, score_unit(scoring))
    return attended


@triton.jit
def _attend_to_tiles(
    running, queries, query_positions, context, scoring, begin, end, sliding_window,
    SHAPE: Shape, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes in the keys from `begin` to `end`, which no query sees beyond; unless MASKED, every query sees all."""
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        keys, values = load_keys_and_values(context, positions, end, SHAPE)  # pyright: ignore[reportGeneralTypeIssues]
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        distances = positions[None, :] - query_positions[:, None]
        scores = make_scores(scoring, products, distances)
        if MASKED:
            visible = distances <= 0
            if sliding_window is not None:
                visible &= distances > -sliding_window
            scores = tl.where(visible, scores, float("-inf"))
        running = add_tile(running, scores, score_unit(scoring), values)
    return running


def prefill_attention(output: torch.Tensor, batch: PagedBatch, scores: ScoreRule, *, tiling: PrefillTiling) -> None:
    """Writes the lines of `output` [T, Hq, D] that belong to rows with several new tokens; leaves all others alone."""
    query_tile = max(tiling.query_tile, padded(batch.group))
    tile_tokens = query_tile // batch.group
    launch(
        _prefill_kernel,
        ((output.shape[0] // tile_tokens + batch.num_rows) * batch.num_kv_heads,),
        output,
        *batch.tensors(),
        *(scores.alibi_slopes, scores.sinks, scores.scale, scores.soft_cap, scores.sliding_window),
        *batch.strides(),
        batch.num_rows,
        SHAPE=batch.shape,
        TILE_TOKENS=tile_tokens,
        QUERY_TILE=query_tile,
        TILE=tiling.tile,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
