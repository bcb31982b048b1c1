"""Softmax of scores that come tile by tile, and the values that they weigh."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

# float32 by three products of matrix units, about as exact as float32 itself. Without them ("ieee") the tiles of large
# heads do not fit into registers: compiled for sm_90, head size 256 spilled 5 kB a thread in decode.
PRECISION = tl.constexpr("tf32x3")


class Running(NamedTuple):
    """What is known after some tiles.

    Attributes:
        best: [M], the highest score so far, minus infinity before the first.
        totals: [M, N] or [M, 1], sums of weights relative to the best. With a sum for each column of the tiles,
            warps that share a query have nothing to tell each other until the end; it costs registers.
        attended: [M, D], weighted sums of values.
    """

    best: Any
    totals: Any
    attended: Any


@triton.jit
def start_softmax(sinks, M: tl.constexpr, SUMS: tl.constexpr, D: tl.constexpr):
    """Before the first tile; SUMS for each query, as many as a tile has columns, or one.

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
