"""Paged attention: decodes and prefill chunks of one flat batch, each by a kernel that passes over the other's rows.

Decode: a program attends for one row, one KV head and one piece of the context, with all query heads that share the KV
head, so that keys and values are read once. Where contexts are cut into several pieces, a second kernel joins their
results. The host chooses the largest number of pieces from `max_seq_len`. Their length follows from each row's own
length, which the device reads: a graph recorded for long contexts cuts short ones evenly too.

Prefill: a query tile holds tokens of one row times the query heads that share a KV head, so that keys and values are
read once for all of them. Tiles of all rows form one flat grid. Each program finds its row by binary search in the
rows' starts, so that the host needs to know no length.
"""

import functools
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire_kernels.cuda.launch import ceil_div, launch, padded, with_contiguous_heads
from quire_kernels.cuda.tiles import (
    PRECISION,
    PagedBatch,
    Scoring,
    Shape,
    add_tile,
    find_context,
    finish_softmax,
    load_keys_and_values,
    load_vectors,
    make_scores,
    score_unit,
    sink_scores,
    start_softmax,
    store_vectors,
)
from quire_kernels.reference import ScoreRule

MAX_HEAD_DIM = 256
# Index tensors that may be views into a step's buffer.
_INDEXES = ("block_tables", "query_start_loc", "seq_lens")
# Pieces that are joined at once.
SPLIT_TILE = tl.constexpr(16)
# Fewer pieces are preferred if their utilization is at least this share of the best one.
GOOD_ENOUGH = 0.9


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """How the decode kernel is cut and launched.

    Attributes:
        tile: tokens whose keys are loaded at once, a power of two of at least 16.
        programs_per_sm: programs that keep a multiprocessor's share of the memory busy; more may run at a time. One has
            two tiles on their way, 64 kB with heads of 128 in bfloat16; a multiprocessor of an H200 must have about 36
            kB on their way (4.8 TB/s, an answer in 1 us). The second covers for the time in which the first computes.
            Estimated, not measured.
        shortest_split, longest_split: bounds on the tokens of a piece. Shorter ones cost more to join than they win;
            longer ones leave multiprocessors idle where rows differ in length.
    """

    tile: int = 64
    num_warps: int = 4
    num_stages: int = 5
    programs_per_sm: int = 2
    shortest_split: int = 256
    longest_split: int = 2048


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


def paged_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scores: ScoreRule,
    max_query_len: int,
    max_seq_len: int,
) -> torch.Tensor:
    """`quire_kernels.ops.paged_attention`. Each kernel passes over the rows of the other: the host reads no length.

    Raises:
        ValueError: a head size of more than 256, whose tiles do not fit into a multiprocessor; a scale that is not
            positive, with which the best of all products would not be the best of all scores.
    """
    if not scores.scale > 0:
        raise ValueError(f"scale is {scores.scale}; the GPU kernels take more than 0 only")
    if kv_cache.shape[4] > MAX_HEAD_DIM:
        raise ValueError(f"kv_cache has head size {kv_cache.shape[4]}; the GPU kernels take at most {MAX_HEAD_DIM}")
    output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if not query.numel():
        return output
    indexes = (block_tables.contiguous(), query_start_loc.contiguous(), seq_lens.contiguous())
    batch = PagedBatch(with_contiguous_heads(query), kv_cache, *indexes)
    head_dim, dtype = kv_cache.shape[4], kv_cache.dtype
    # `max_query_len` may exceed the length of each row, but a single row has all tokens.
    num_tokens = query.shape[0]
    if max_query_len > 1 and num_tokens > 1:
        prefill_attention(output, batch, scores, tiling=prefill_tiling(head_dim, dtype))
    if num_tokens == 1 or batch.num_rows > 1:
        decode_attention(output, batch, scores, max_seq_len=max_seq_len, tiling=decode_tiling(head_dim, dtype))
    return output


def decode_tiling(head_dim: int, dtype: torch.dtype) -> DecodeTiling:
    """Tiles of bounded size in bytes, since the tiles of all stages share a multiprocessor's memory."""
    vector_bytes = head_dim * dtype.itemsize
    if vector_bytes > 512:
        return DecodeTiling(tile=32, num_warps=8)
    return DecodeTiling(tile=32) if vector_bytes > 256 else DecodeTiling()


def prefill_tiling(head_dim: int, dtype: torch.dtype) -> PrefillTiling:
    """As large as the registers and the memory of a multiprocessor of an H100 or H200 hold, two tiles in flight."""
    if dtype != torch.float32:
        return PrefillTiling() if head_dim <= 128 else PrefillTiling(tile=32)
    if head_dim <= 128:
        return PrefillTiling(query_tile=32, tile=32, num_warps=4, num_stages=2)
    return PrefillTiling(query_tile=16, tile=32, num_warps=8, num_stages=2)


@triton.jit
def _piece_tokens(context, num_splits, MIN_PIECE: tl.constexpr, TILE: tl.constexpr):
    """Tokens in each piece of a context, the last one excepted: at least MIN_PIECE, else a multiple of the tile."""
    return tl.maximum(tl.cdiv(tl.cdiv(context, num_splits), TILE) * TILE, MIN_PIECE)


@triton.jit(do_not_specialize=("table_stride", "num_splits"), do_not_specialize_on_alignment=_INDEXES)
def _decode_kernel(
    output, partial, partial_lse, query, kv_cache, block_tables, query_start_loc, seq_lens,
    alibi_slopes, sinks, scale, soft_cap, sliding_window, query_stride, value_offset, table_stride, num_splits,
    SHAPE: Shape, GROUP_PAD: tl.constexpr, TILE: tl.constexpr, MIN_PIECE: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    # Heads of a row and a piece run side by side: their tiles are neighbours in memory.
    place, head = tl.program_id(0) // SHAPE.num_kv_heads, tl.program_id(0) % SHAPE.num_kv_heads
    row, split = place // num_splits, place % num_splits
    token, next_token = tl.load(query_start_loc + row), tl.load(query_start_loc + row + 1)
    seq_len = tl.load(seq_lens + row)
    begin, end = _find_piece(  # pyrefly: ignore
        seq_len, sliding_window, split, num_splits, MIN_PIECE, TILE
    )
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
def _find_piece(seq_len, sliding_window, split, num_splits, MIN_PIECE: tl.constexpr, TILE: tl.constexpr):
    """The begin and end of piece `split` of a context; it begins beyond the context if there are fewer pieces."""
    first = 0
    if sliding_window is not None:
        first = tl.maximum(seq_len - sliding_window, 0)
    length = _piece_tokens(seq_len - first, num_splits, MIN_PIECE, TILE)
    begin = first + split * length
    return begin, tl.minimum(begin + length, seq_len)


@triton.jit
def _attend_to_piece(
    queries, context, scoring, begin, end, query_position,
    SHAPE: Shape, GROUP_PAD: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The attention of `queries` [M, D] of one token from `begin` to `end`, as `finish_softmax` returns it."""
    running = start_softmax(sink_scores(scoring), GROUP_PAD, TILE, SHAPE.head_pad)
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        keys, values = load_keys_and_values(context, positions, 0, end, SHAPE)
        products = tl.dot(queries, tl.trans(keys), input_precision=PRECISION)
        scores = make_scores(scoring, products, (positions - query_position)[None, :])
        scores = tl.where((positions < end)[None, :], scores, float("-inf"))
        running = add_tile(running, scores, score_unit(scoring), values)
    return finish_softmax(running, score_unit(scoring))


@triton.jit(do_not_specialize=("num_splits",), do_not_specialize_on_alignment=_INDEXES)
def _join_kernel(
    output, partial, partial_lse, query_start_loc, seq_lens, sliding_window, num_splits,
    SHAPE: Shape, TILE: tl.constexpr, MIN_PIECE: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) // SHAPE.num_heads, tl.program_id(0) % SHAPE.num_heads
    token = tl.load(query_start_loc + row)
    if tl.load(query_start_loc + row + 1) - token != 1:
        return
    context = tl.load(seq_lens + row)
    if sliding_window is not None:
        context = tl.minimum(context, sliding_window)
    used = tl.cdiv(context, _piece_tokens(context, num_splits, MIN_PIECE, TILE))
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
    """Writes the lines of `output` [T, Hq, D] that belong to rows with one new token; other lines stay unchanged."""
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
        MIN_PIECE=tiling.shortest_split,
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
            MIN_PIECE=tiling.shortest_split,
            num_warps=2,
        )


def _partial_results(output: torch.Tensor, num_rows: int, num_splits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """[R, S, Hq, D] for the results of pieces and [R, S, Hq] for their log-sum-exp; unused if there is one piece."""
    if num_splits == 1:
        return output, output
    _, num_heads, head_dim = output.shape
    partial = torch.empty(num_rows, num_splits, num_heads, head_dim, dtype=torch.float32, device=output.device)
    return partial, torch.empty(num_rows, num_splits, num_heads, dtype=torch.float32, device=output.device)


@functools.cache
def _num_sms(device: torch.device) -> int:
    """Multiprocessors; on the CPU, where only the interpreter runs, 1."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


# It is the same for all layers of a step, and takes longer than their launches.
@functools.lru_cache(maxsize=64)
def split_length(tiling: DecodeTiling, num_programs: int, max_seq_len: int, num_sms: int) -> int:
    """Tokens in each piece of the longest context; a multiple of the tile.

    Shorter contexts are cut into as many pieces, or fewer where they would be shorter than the shortest. Few rows get
    many pieces, so that all multiprocessors have work; many rows get few.

    Args:
        num_programs: rows times KV heads, the number without a split.
        max_seq_len: the longest context.
        num_sms: multiprocessors of the device.
    """
    slots = num_sms * tiling.programs_per_sm
    fewest = ceil_div(max_seq_len, tiling.longest_split)
    greatest = max(fewest, min(ceil_div(max_seq_len, tiling.shortest_split), ceil_div(4 * slots, num_programs)))
    counts = range(fewest, greatest + 1)
    utilizations = [_utilization(num_programs * count, slots) for count in counts]
    enough = GOOD_ENOUGH * max(utilizations)
    pieces = next(count for count, each in zip(counts, utilizations, strict=True) if each >= enough)
    return ceil_div(ceil_div(max_seq_len, pieces), tiling.tile) * tiling.tile


def _utilization(num_programs: int, slots: int) -> float:
    """The share of slots in use over all waves in which equally long programs run."""
    return num_programs / (ceil_div(num_programs, slots) * slots)


@triton.jit
def _find_row(query_start_loc, query_tile, num_rows, TILE_TOKENS: tl.constexpr):
    """The row to which a query tile belongs: row r's tiles start at `query_start_loc[r] // TILE_TOKENS + r`.

    That leaves room for every row's tiles; the last tile may be empty.
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


@triton.jit(do_not_specialize=("table_stride", "num_rows"), do_not_specialize_on_alignment=_INDEXES)
def _prefill_kernel(
    output, query, kv_cache, block_tables, query_start_loc, seq_lens, alibi_slopes, sinks, scale, soft_cap,
    sliding_window, query_stride, value_offset, table_stride, num_rows,
    SHAPE: Shape, TILE_TOKENS: tl.constexpr, QUERY_TILE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    # The last tokens of a chunk see the most keys: the longest programs start first, all heads of a tile side by side.
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
    """The attention of `queries` [M, D] at the positions from `first` to `last` over the keys that they may see."""
    running = start_softmax(sink_scores(scoring), QUERY_TILE, 1, SHAPE.head_pad)
    # From `inner` to `outer` every query sees all keys: these tiles need no mask.
    inner = 0
    first_seen = 0
    outer = (first + 1) // TILE * TILE
    if sliding_window is not None:
        first_seen = tl.maximum(first + 1 - sliding_window, 0)
        begin = first_seen // TILE * TILE
        inner = tl.minimum(tl.cdiv(tl.maximum(last + 1 - sliding_window, 0), TILE) * TILE, outer)
        running = _attend_to_tiles(
            running,
            queries,
            query_positions,
            context,
            scoring,
            begin,
            inner,
            first_seen,
            sliding_window,
            SHAPE,
            TILE,
            True,
        )
    running = _attend_to_tiles(
        running, queries, query_positions, context, scoring, inner, outer, first_seen, None, SHAPE, TILE, False
    )
    running = _attend_to_tiles(
        running,
        queries,
        query_positions,
        context,
        scoring,
        outer,
        last + 1,
        first_seen,
        sliding_window,
        SHAPE,
        TILE,
        True,
    )
    attended, _ = finish_softmax(running, score_unit(scoring))
    return attended


@triton.jit
def _attend_to_tiles(
    running, queries, query_positions, context, scoring, begin, end, first_seen, sliding_window,
    SHAPE: Shape, TILE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Takes in the keys from `begin` to `end`, which no query sees beyond; unless MASKED, every query sees all.

    No query sees a key before `first_seen`, whose block may be gone.
    """
    for start in range(begin, end, TILE):
        positions = start + tl.arange(0, TILE)
        loaded = load_keys_and_values(context, positions, first_seen, end, SHAPE)
        keys, values = loaded
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
    """Writes the lines of `output` [T, Hq, D] that belong to rows with several new tokens; others stay unchanged."""
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
