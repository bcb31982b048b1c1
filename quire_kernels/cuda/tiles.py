"""The parts of both attention kernels: the paged batch, tiles of queries, keys and values, scores, and the softmax over
scores that come tile by tile."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import triton
import triton.language as tl

from quire_kernels.checks import offset_of_values
from quire_kernels.cuda.launch import padded

LOG2_E = tl.constexpr(1.4426950408889634)
# float32 by three products of matrix units, about as exact as float32 itself. Without them ("ieee") the tiles of large
# heads do not fit into registers: compiled for sm_90, head size 256 spilled 5 kB a thread in decode.
PRECISION = tl.constexpr("tf32x3")


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The model's part of the arguments: one constant of the kernels, which are compiled anew for each different one.

    Attributes:
        group: query heads that share a KV head.
        head_pad: the power of two in which a head fits.
        block_stride: elements from a block to the next one.
    """

    num_heads: int
    num_kv_heads: int
    group: int
    block_size: int
    head_dim: int
    head_pad: int
    block_stride: int


if TYPE_CHECKING:
    Shape = AttentionShape
else:
    # Triton's mark of a constant argument, in which a type checker would find no fields.
    Shape = tl.constexpr


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The tensors of `quire_kernels.ops.paged_attention`; `query` has contiguous heads, the indexes are contiguous."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.num_kv_heads

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.kv_cache, self.block_tables, self.query_start_loc, self.seq_lens

    def strides(self) -> tuple[int, int, int]:
        """From token to token of the queries, from keys to values, from row to row of the block tables."""
        return self.query.stride(0), offset_of_values(self.kv_cache), self.block_tables.stride(0)

    @property
    def shape(self) -> "AttentionShape":
        _, _, num_kv_heads, block_size, head_dim = self.kv_cache.shape
        stride = self.kv_cache.stride(1)
        return AttentionShape(
            self.query.shape[1], num_kv_heads, self.group, block_size, head_dim, padded(head_dim, 16), stride
        )


class Context(NamedTuple):
    """The view of one KV head's blocks in a layer's pool for one row.

    Attributes:
        keys: pointer to the head's keys in block 0.
        value_offset: from a key to its value.
        block_table: pointer to the row's block ids.
    """

    keys: Any
    value_offset: Any
    block_table: Any


@triton.jit
def find_context(kv_cache, value_offset, block_tables, table_stride, row, head, SHAPE: Shape):
    """The context of `row`, as the KV head `head` has it."""
    keys = kv_cache + head * (SHAPE.block_size * SHAPE.head_dim)
    return Context(keys, value_offset, block_tables + row.to(tl.int64) * table_stride)


@triton.jit
def load_keys_and_values(context, positions, first, end, SHAPE: Shape):
    """Keys and values [N, D] at `positions` [N]; positions before `first` repeat it, and positions from `end` on
    the token before `end`.

    Slots beyond a context may hold NaN, which no weight of zero would silence. So they are not read, and to read a
    token of the context once more costs less than a mask.
    """
    # Unsigned: divisions by powers of two become shifts.
    positions = tl.minimum(tl.maximum(positions, first), end - 1).to(tl.uint32)
    block_ids = tl.load(context.block_table + positions // SHAPE.block_size).to(tl.int64)
    slots = (positions % SHAPE.block_size).to(tl.int32)
    offsets = block_ids * SHAPE.block_stride + slots * SHAPE.head_dim
    keys = load_vectors(context.keys, offsets, None, SHAPE)
    values = load_vectors(context.keys + context.value_offset, offsets, None, SHAPE)
    return keys, values


@triton.jit
def load_vectors(base, offsets, wanted, SHAPE: Shape):
    """Vectors [N, D] that begin at `offsets` [N]; zeros where not `wanted` [N], which may be None for all."""
    dims = tl.arange(0, SHAPE.head_pad)
    return tl.load(base + offsets[:, None] + dims[None, :], mask=_mask(dims < SHAPE.head_dim, wanted), other=0.0)


@triton.jit
def store_vectors(base, offsets, wanted, vectors, SHAPE: Shape):
    """Stores the `wanted` [N] ones of `vectors` [N, D] to where `load_vectors` finds them."""
    dims = tl.arange(0, SHAPE.head_pad)
    mask = _mask(dims < SHAPE.head_dim, wanted)
    tl.store(base + offsets[:, None] + dims[None, :], vectors.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _mask(within, wanted):
    mask = within[None, :]
    if wanted is not None:
        mask = wanted[:, None] & mask
    return mask


class Scoring(NamedTuple):
    """How scores come from products of queries and keys.

    Attributes:
        scale, soft_cap: positive; no soft cap is None.
        slopes: of ALiBi, [M]; None without.
        sinks: scores of no key that are in the softmax, [M], minus infinity where there is none; None without.
    """

    scale: Any
    soft_cap: Any
    slopes: Any
    sinks: Any


@triton.jit
def make_scores(scoring, products, distances):
    """Scores from `products` of queries and keys; `distances` are key minus query positions. All [M, N].

    A factor of all scores is left to `score_unit`.
    """
    scores = products
    if scoring.soft_cap is not None:
        # tanh by exp: exact at both ends, where exp is 0 or infinite.
        scores = 1.0 - 2.0 / (tl.exp(products * (2.0 * scoring.scale / scoring.soft_cap)) + 1.0)
    if scoring.slopes is not None:
        scores *= scoring.scale if scoring.soft_cap is None else scoring.soft_cap
        scores += scoring.slopes[:, None] * distances
    return scores


@triton.jit
def sink_scores(scoring):
    """The sinks [M] as `make_scores` would return them, None without."""
    sinks = scoring.sinks
    if sinks is not None:
        sinks *= LOG2_E / score_unit(scoring)
    return sinks


@triton.jit
def score_unit(scoring):
    """The factor that converts scores to units of log 2, because the hardware has exp2.

    It is done where the best score is taken off, by the same instruction.
    """
    unit = scoring.scale * LOG2_E
    if scoring.soft_cap is not None:
        unit = scoring.soft_cap * LOG2_E
    if scoring.slopes is not None:
        unit = 1.0 * LOG2_E
    return unit


class Running(NamedTuple):
    """The state of the softmax after some tiles.

    Attributes:
        best: [M], the highest score so far, minus infinity before the first.
        totals: [M, N] or [M, 1], sums of weights relative to the best. With a sum for each column of the tiles,
            warps that share a query exchange nothing until the end; it costs registers.
        attended: [M, D], weighted sums of values.
    """

    best: Any
    totals: Any
    attended: Any


@triton.jit
def start_softmax(sinks, M: tl.constexpr, SUMS: tl.constexpr, D: tl.constexpr):
    """The state before the first tile; SUMS per query is the number of columns of a tile, or one.

    Args:
        sinks: [M], scores that count as seen, of values that are zeros; None without.
    """
    best = tl.full((M,), float("-inf"), tl.float32)
    totals = tl.zeros((M, SUMS), tl.float32)
    if sinks is not None:
        best = sinks
        # One of the sums has the sink's weight. Where the sink is minus infinity the first tile shrinks it to nothing.
        totals += tl.where(tl.arange(0, SUMS) == 0, 1.0, 0.0)[None, :]
    return Running(best, totals, tl.zeros((M, D), tl.float32))


@triton.jit
def add_tile(running, scores, unit, values):
    """Takes one more tile of `values` [N, D] in.

    Args:
        scores: [M, N], minus infinity where a query does not see a key.
        unit: of the scores, relative to log 2.
    """
    best = tl.maximum(running.best, tl.max(scores, 1))
    # A query that has seen no key yet has no best score to be relative to.
    base = tl.where(best == float("-inf"), 0.0, best) * unit
    weights = tl.exp2(scores * unit - base[:, None])
    shrink = tl.exp2(running.best * unit - base)[:, None]
    sums = weights if running.totals.shape[1] == weights.shape[1] else tl.sum(weights, 1, keep_dims=True)
    totals = running.totals * shrink + sums
    attended = tl.dot(weights.to(values.dtype), values, running.attended * shrink, input_precision=PRECISION)
    return Running(best, totals, attended)


@triton.jit
def finish_softmax(running, unit):
    """The attended values [M, D] and the log-sum-exp of the scores [M], in units of log 2."""
    total = tl.sum(running.totals, 1)
    return running.attended / total[:, None], running.best * unit + tl.log2(total)
