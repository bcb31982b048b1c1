"""Attention of rows with one new token over their paged contexts.

A program attends for one row, one KV head and one piece of the context, with all query heads that share the KV head:
keys and values are read once. Where contexts are cut into several pieces, a second kernel joins what they give.

The host says into how many pieces a context is cut at most, from the longest that may come. How long they are follows
from each row's own length, which is read on the device: a graph that was recorded for long contexts cuts short ones
evenly too.
"""

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.reference_attention import ScoreRule
from kernels.triton.kv_split import DecodeTiling, split_length
from kernels.triton.launch import ceil_div, launch, padded
from kernels.triton.paged_batch import PagedBatch
from kernels.triton.softmax import PRECISION, add_tile, kv_offsets, make_scores

# Arguments that change from step to step, and index tensors that may be views into a step's buffer.
_CHANGING = ("table_stride", "num_splits")
_INDEXES = ("block_tables", "query_start_loc", "seq_lens")
# Pieces that are joined at once.
SPLIT_TILE = tl.constexpr(16)


@triton.jit
def _piece_tokens(context, num_splits, LEAST: tl.constexpr, TILE: tl.constexpr):
    """Tokens in each piece of a context, the last one excepted: at least LEAST, else a multiple of the tile."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, num_splits), TILE) * TILE, LEAST)


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_INDEXES)
def _decode_kernel(
    output,
    partial,
    partial_lse,
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
    num_splits,
    NUM_KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    GROUP_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
    SPLIT: tl.constexpr,
):
    # Heads of a row and a piece run side by side: their tiles are neighbours in memory.
    head, split, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    token = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    seq_len = tl.load(seq_lens + row)
    first = 0
    if sliding_window is not None:
        first = tl.maximum(seq_len - sliding_window, 0)
    piece = _piece_tokens(seq_len - first, num_splits, LEAST, TILE)
    begin = first + split * piece
    if begin >= seq_len:
        return
    end = tl.minimum(begin + piece, seq_len)

    members, dims = tl.arange(0, GROUP_PAD), tl.arange(0, HEAD_PAD)
    heads = head * GROUP + members
    stored = (members < GROUP)[:, None] & (dims < HEAD_DIM)[None, :]
    query_line = query + token.to(tl.int64) * query_stride
    queries = tl.load(query_line + heads[:, None] * HEAD_DIM + dims[None, :], mask=stored, other=0.0)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=members < GROUP, other=0.0)
    block_table = block_tables + row.to(tl.int64) * table_stride

    best = tl.full((GROUP_PAD,), float("-inf"), tl.float32)
    total = tl.zeros((GROUP_PAD,), tl.float32)
    attended = tl.zeros((GROUP_PAD, HEAD_PAD), tl.float32)
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        present = positions < end
        offsets = kv_offsets(block_table, positions, present, head, dims, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        # Slots beyond the context may hold NaN, which no weight of zero would silence.
        loaded = present[:, None] & (dims < HEAD_DIM)[None, :]
        keys = tl.load(kv_cache + offsets, mask=loaded, other=0.0)
        values = tl.load(kv_cache + value_offset + offsets, mask=loaded, other=0.0)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = make_scores(products, (positions - seq_len + 1)[None, :], slopes, scale, soft_cap)
        scores = tl.where(present[None, :], scores, float("-inf"))
        best, total, attended = add_tile(scores, values, best, total, attended)
    attended = attended / total[:, None]

    if SPLIT:
        line = (row.to(tl.int64) * num_splits + split) * (NUM_KV_HEADS * GROUP)
        tl.store(partial + (line + heads)[:, None] * HEAD_DIM + dims[None, :], attended, mask=stored)
        tl.store(partial_lse + line + heads, best + tl.log2(total), mask=members < GROUP)
    else:
        line = token.to(tl.int64) * (NUM_KV_HEADS * GROUP)
        offsets = (line + heads)[:, None] * HEAD_DIM + dims[None, :]
        tl.store(output + offsets, attended.to(output.dtype.element_ty), mask=stored)


@triton.jit(do_not_specialize=("num_splits",), do_not_specialize_on_alignment=_INDEXES)
def _join_kernel(
    output,
    partial,
    partial_lse,
    query_start_loc,
    seq_lens,
    sliding_window,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    TILE: tl.constexpr,
    LEAST: tl.constexpr,
):
    head, row = tl.program_id(0), tl.program_id(1)
    token = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    context = tl.load(seq_lens + row)
    if sliding_window is not None:
        context = tl.minimum(context, sliding_window)
    used = tl.cdiv(context, _piece_tokens(context, num_splits, LEAST, TILE))
    dims = tl.arange(0, HEAD_PAD)
    first_line = row.to(tl.int64) * num_splits * NUM_HEADS + head

    best = float("-inf")
    total = 0.0
    attended = tl.zeros((HEAD_PAD,), tl.float32)
    for start in range(0, used, SPLIT_TILE):
        splits = start + tl.arange(0, SPLIT_TILE)
        lines = first_line + splits * NUM_HEADS
        lse = tl.load(partial_lse + lines, mask=splits < used, other=float("-inf"))
        loaded = (splits < used)[:, None] & (dims < HEAD_DIM)[None, :]
        pieces = tl.load(partial + lines[:, None] * HEAD_DIM + dims[None, :], mask=loaded, other=0.0)
        new_best = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - new_best)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 0)
        attended = attended * shrink + tl.sum(weights[:, None] * pieces, 0)
        best = new_best
    offsets = (token.to(tl.int64) * NUM_HEADS + head) * HEAD_DIM + dims
    tl.store(output + offsets, (attended / total).to(output.dtype.element_ty), mask=dims < HEAD_DIM)


def decode_attention(
    output: torch.Tensor, batch: PagedBatch, scores: ScoreRule, *, max_seq_len: int, tiling: DecodeTiling
) -> None:
    """Writes the lines of `output` [T, Hq, D] that belong to rows with one new token; leaves all others alone."""
    num_programs = batch.num_rows * batch.num_kv_heads
    longest = max_seq_len if scores.sliding_window is None else min(max_seq_len, scores.sliding_window)
    num_splits = ceil_div(longest, split_length(tiling, num_programs, longest, _num_sms(output.device)))
    partial, partial_lse = _partial_results(output, batch.num_rows, num_splits)
    launch(
        _decode_kernel,
        (batch.num_kv_heads, num_splits, batch.num_rows),
        *(output, partial, partial_lse),
        *batch.tensors(),
        *(scores.alibi_slopes, scores.scale, scores.soft_cap, scores.sliding_window),
        *batch.strides(),
        num_splits,
        **batch.constants(),
        GROUP_PAD=padded(batch.group, 16),
        TILE=tiling.tile,
        LEAST=tiling.shortest_split,
        SPLIT=num_splits > 1,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_splits > 1:
        _, num_heads, head_dim = output.shape
        launch(
            _join_kernel,
            (num_heads, batch.num_rows),
            *(output, partial, partial_lse, batch.query_start_loc, batch.seq_lens),
            *(scores.sliding_window, num_splits),
            NUM_HEADS=num_heads,
            HEAD_DIM=head_dim,
            HEAD_PAD=padded(head_dim, 16),
            TILE=tiling.tile,
            LEAST=tiling.shortest_split,
            num_warps=2,
        )


def _partial_results(output: torch.Tensor, num_rows: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, S, Hq, D] for what each piece gives and [R, S, Hq] for its log-sum-exp; not used where there is one piece."""
    if num_splits == 1:
        return output, output
    _, num_heads, head_dim = output.shape
    partial = torch.empty(num_rows, num_splits, num_heads, head_dim, dtype=torch.float32, device=output.device)
    return partial, torch.empty(num_rows, num_splits, num_heads, dtype=torch.float32, device=output.device)


@cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors; on the CPU, where only the interpreter runs, 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
