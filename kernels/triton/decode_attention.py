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
from kernels.triton.paged_batch import PagedBatch, Shape
from kernels.triton.paged_tiles import find_context, load_keys_and_values, load_vectors, store_vectors
from kernels.triton.scores import Scoring, make_scores, score_unit, sink_scores
from kernels.triton.softmax import PRECISION, add_tile, finish_softmax, start_softmax

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
    output, partial, partial_lse, query, kv_cache, block_tables, query_start_loc, seq_lens,
    alibi_slopes, sinks, scale, soft_cap, sliding_window, query_stride, value_offset, table_stride, num_splits,
    SHAPE: Shape, GROUP_PAD: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # Heads of a row and a piece run side by side: their tiles are neighbours in memory.
    place, head = tl.program_id(0) // SHAPE.num_kv_heads, tl.program_id(0) % SHAPE.num_kv_heads
    row, split = place // num_splits, place % num_splits
    token, next_token = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    seq_len = tl.load(seq_lens + row)
    begin, end = _find_piece(seq_len, sliding_window, split, num_splits, LEAST, TILE)  # pyright: ignore[reportGeneralTypeIssues]
    # One branch for both, so that the lengths are not waited for one after the other.
    if next_token - token != 1 or begin >= seq_len:
        return

    members = tl.arange(0, GROUP_PAD)
    heads, wanted = head * SHAPE.group + members, members < SHAPE.group
    query_line = query + token.to(tl.int64) * query_stride
    queries = load_vectors(query_line, heads * SHAPE.head_dim, wanted, SHAPE)
    slopes = None
    if alibi_slopes is not None:
        slopes = tl.load(alibi_slopes + heads, mask=wanted, other=0.0)
    first_scores = None
    if sinks is not None:
        # The piece that every context has takes the sink in.
        first_scores = tl.load(sinks + heads, mask=wanted & (split == 0), other=float("-inf"))
    scoring = Scoring(scale, soft_cap, slopes, first_scores)
    context = find_context(kv_cache, value_offset, block_tables, table_stride, row, head, SHAPE)
    attended, lse = _attend_to_piece(queries, context, scoring, begin, end, seq_len - 1, SHAPE, GROUP_PAD, TILE)

    if SPLIT:
        lines = (row.to(tl.int64) * num_splits + split) * SHAPE.num_heads + heads
        store_vectors(partial, lines * SHAPE.head_dim, wanted, attended, SHAPE)
        tl.store(partial_lse + lines, lse, mask=wanted)
    else:
        lines = token.to(tl.int64) * SHAPE.num_heads + heads
        store_vectors(output, lines * SHAPE.head_dim, wanted, attended, SHAPE)


@triton.jit
def _find_piece(seq_len, sliding_window, split, num_splits, LEAST: tl.constexpr, TILE: tl.constexpr):
    """Where piece `split` of a context begins and ends; it begins beyond the context where there are fewer pieces."""
    first = 0
    if sliding_window is not None:
        first = tl.maximum(seq_len - sliding_window, 0)
    length = _piece_tokens(seq_len - first, num_splits, LEAST, TILE)
    begin = first + split * length
    return begin, tl.minimum(begin + length, seq_len)


@triton.jit
def _attend_to_piece(
    queries, context, scoring, begin, end, query_position,
    SHAPE: Shape, GROUP_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """What `queries` [M, D] of one token find from `begin` to `end`, as `finish_softmax` returns it."""
    running = start_softmax(sink_scores(scoring), GROUP_PAD, TILE, SHAPE.head_pad)
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        keys, values = load_keys_and_values(context, positions, end, SHAPE)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = make_scores(scoring, products, (positions - query_position)[None, :])
        scores = tl.where((positions < end)[None, :], scores, float("-inf"))
        running = add_tile(running, scores, score_unit(scoring), values)
    return finish_softmax(running, score_unit(scoring))


@triton.jit(do_not_specialize=("num_splits",), do_not_specialize_on_alignment=_INDEXES)
def _join_kernel(
    output, partial, partial_lse, query_start_loc, seq_lens, sliding_window, num_splits,
    SHAPE: Shape, TILE: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // SHAPE.num_heads, tl.program_id(0) % SHAPE.num_heads
    token = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    context = tl.load(seq_lens + row)
    if sliding_window is not None:
        context = tl.minimum(context, sliding_window)
    used = tl.cdiv(context, _piece_tokens(context, num_splits, LEAST, TILE))
    first_line = row.to(tl.int64) * num_splits * SHAPE.num_heads + head
    dims = tl.arange(0, SHAPE.head_pad)

    best = float("-inf")
    total = 0.0
    attended = tl.zeros_like(dims).to(tl.float32)
    for start in range(0, used, SPLIT_TILE):
        splits = start + tl.arange(0, SPLIT_TILE)
        lines = first_line + splits * SHAPE.num_heads
        lse = tl.load(partial_lse + lines, mask=splits < used, other=float("-inf"))
        pieces = load_vectors(partial, lines * SHAPE.head_dim, splits < used, SHAPE)
        new_best = tl.maximum(best, tl.max(lse, 0))
        weights = tl.exp2(lse - new_best)
        shrink = tl.exp2(best - new_best)
        total = total * shrink + tl.sum(weights, 0)
        attended = attended * shrink + tl.sum(weights[:, None] * pieces, 0)
        best = new_best
    line = output + (token.to(tl.int64) * SHAPE.num_heads + head) * SHAPE.head_dim
    tl.store(line + dims, (attended / total).to(output.dtype.element_ty), mask=dims < SHAPE.head_dim)


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
        (batch.num_rows * num_splits * batch.num_kv_heads,),
        *(output, partial, partial_lse),
        *batch.tensors(),
        *(scores.alibi_slopes, scores.sinks, scores.scale, scores.soft_cap, scores.sliding_window),
        *batch.strides(),
        num_splits,
        SHAPE=batch.shape,
        GROUP_PAD=padded(batch.group, 16),
        TILE=tiling.tile,
        LEAST=tiling.shortest_split,
        SPLIT=num_splits > 1,
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_splits > 1:
        launch(
            _join_kernel,
            (batch.num_rows * output.shape[1],),
            *(output, partial, partial_lse, batch.query_start_loc, batch.seq_lens),
            *(scores.sliding_window, num_splits),
            SHAPE=batch.shape,
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
