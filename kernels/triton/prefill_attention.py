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
from kernels.triton.paged_batch import PagedBatch
from kernels.triton.softmax import PRECISION, add_tile, kv_offsets, make_scores

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


@triton.jit
def _attend_tiles(
    queries,
    query_positions,
    best,
    total,
    attended,
    begin,
    end,
    kv_cache,
    value_offset,
    block_table,
    head,
    dims,
    slopes,
    scale,
    soft_cap,
    sliding_window,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TILE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Attends to the keys at positions `begin` to `end`; unless MASKED, every query sees all of them."""
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        present = positions < end
        offsets = kv_offsets(block_table, positions, present, head, dims, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        # Slots beyond the context may hold NaN, which no weight of zero would silence.
        loaded = present[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(kv_cache + offsets, mask=loaded, other=0.0)
        values = tl.load(kv_cache + value_offset + offsets, mask=loaded, other=0.0)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        distances = positions[None, :] - query_positions[:, None]
        scores = make_scores(products, distances, slopes, scale, soft_cap)
        if MASKED:
            visible = (distances <= 0) & present[None, :]
            if sliding_window is not None:
                visible &= distances > -sliding_window
            scores = tl.where(visible, scores, float("-inf"))
        best, total, attended = add_tile(scores, values, best, total, attended)
    return best, total, attended


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_INDEXES)
def _prefill_kernel(
    output,
    query,
    kv_cache,
    block_tables,
    query_start_loc,
    seq_lens,
    alibi_slopes,
    scale,
    soft_cap,
    sliding_window,
    query_stride,
    value_offset,
    table_stride,
    num_rows,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE_TOKENS: tl.constexpr,
    QUERY_TILE: tl.constexpr,
    TILE: tl.constexpr,
):
    head = tl.program_id(0)
    # The last tokens of a chunk see most keys: the longest programs start first.
    query_tile = tl.num_programs(1) - 1 - tl.program_id(1)
    row = _find_row(query_start_loc, query_tile, num_rows, TILE_TOKENS)
    row_start = tl.load(query_start_loc + row)
    num_tokens = tl.load(query_start_loc + row + 1) - row_start
    first = (query_tile - row_start // TILE_TOKENS - row) * TILE_TOKENS
    if num_tokens < 2 or first >= num_tokens:
        return
    seq_len = tl.load(seq_lens + row)
    first_position = seq_len - num_tokens + first
    end = tl.minimum(first_position + TILE_TOKENS, seq_len)

    lines, dims = tl.arange(0, QUERY_TILE), tl.arange(0, HEAD_PAD)
    tokens = first + lines // GROUP
    heads = head * GROUP + lines % GROUP
    wanted = (lines < TILE_TOKENS * GROUP) & (tokens < num_tokens)
    stored = wanted[:, None] & (dims < HEAD_DIM)[None, :]
    flat_tokens = (row_start + tokens).to(tl.int64)
    query_offsets = flat_tokens * query_stride + heads * HEAD_DIM
    queries = tl.load(query + query_offsets[:, None] + dims[None, :], mask=stored, other=0.0)
    query_positions = seq_len - num_tokens + tokens
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=wanted, other=0.0)
    block_table = block_tables + row.to(tl.int64) * table_stride

    best = tl.full((QUERY_TILE,), float("-inf"), tl.float32)
    total = tl.zeros((QUERY_TILE,), tl.float32)
    attended = tl.zeros((QUERY_TILE, HEAD_PAD), tl.float32)
    begin = 0
    if sliding_window is None:
        # Whole tiles that even the first query sees need no mask.
        seen_by_all = (first_position + 1) // TILE * TILE
        best, total, attended = _attend_tiles(
            queries, query_positions, best, total, attended, begin, seen_by_all, kv_cache, value_offset, block_table,
            head, dims, slopes, scale, soft_cap, None, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE, False,
        )  # fmt: skip
        begin = seen_by_all
    else:
        begin = tl.maximum(first_position - sliding_window + 1, 0)
    best, total, attended = _attend_tiles(
        queries, query_positions, best, total, attended, begin, end, kv_cache, value_offset, block_table,
        head, dims, slopes, scale, soft_cap, sliding_window, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM, TILE, True,
    )  # fmt: skip

    attended = attended / total[:, None]
    output_offsets = (flat_tokens * (NUM_KV_HEADS * GROUP) + heads) * HEAD_DIM
    tl.store(output + output_offsets[:, None] + dims[None, :], attended.to(output.dtype.element_ty), mask=stored)


def prefill_attention(output: torch.Tensor, batch: PagedBatch, scores: ScoreRule, *, tiling: PrefillTiling) -> None:
    """Writes the lines of `output` [T, Hq, D] that belong to rows with several new tokens; leaves all others alone."""
    query_tile = max(tiling.query_tile, padded(batch.group))
    tile_tokens = query_tile // batch.group
    launch(
        _prefill_kernel,
        (batch.num_kv_heads, output.shape[0] // tile_tokens + batch.num_rows),
        output,
        *batch.tensors(),
        *(scores.alibi_slopes, scores.scale, scores.soft_cap, scores.sliding_window),
        *batch.strides(),
        batch.num_rows,
        **batch.constants(),
        TILE_TOKENS=tile_tokens,
        QUERY_TILE=query_tile,
        TILE=tiling.tile,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
