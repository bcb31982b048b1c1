"""What decode and prefill attention have in common: where keys lie, how scores are made, softmax tile by tile.

Scores are kept in units of log 2, since exp2 is what the hardware has.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# float32 by three products of matrix units, about as exact as float32 itself. Without them ("ieee") the tiles of large
# heads do not fit into registers: compiled for sm_90, head size 256 spilled 5 kB a thread in decode, this way nothing.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def kv_offsets(
    block_table,
    positions,
    present,
    head,
    dims,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """Offsets [N, D] in a layer's keys of the tokens at `positions` [N]; where not `present` [N] they mean nothing."""
    block_ids = tl.load(block_table + positions // BLOCK_SIZE, mask=present, other=0).to(tl.int64)
    lines = (block_ids * NUM_KV_HEADS + head) * BLOCK_SIZE + positions % BLOCK_SIZE
    return lines[:, None] * HEAD_DIM + dims[None, :]


@triton.jit
def make_scores(products, distances, slopes, scale, soft_cap):
    """Scores from `products` of queries and keys, both [M, N].

    `distances` are key minus query positions, `slopes` [M]; both are used for ALiBi only, where `slopes` is not None.
    """
    if soft_cap is None:
        scores = products * (scale * LOG2_E)
    else:
        # tanh by exp: exact at both ends, where exp is 0 or infinite.
        tanh = 1.0 - 2.0 / (tl.exp(products * (2.0 * scale / soft_cap)) + 1.0)
        scores = tanh * (soft_cap * LOG2_E)
    if slopes is not None:
        scores += (slopes * LOG2_E)[:, None] * distances
    return scores


@triton.jit
def add_tile(scores, values, best, total, attended):
    """Takes one more tile of keys into a running softmax.

    Args:
        scores: [M, N], minus infinity where a query does not see a key.
        values: [N, D].
        best, total, attended: [M], [M], [M, D]: the highest score so far, and sums relative to it.

    Returns:
        The new best, total and attended.
    """
    new_best = tl.maximum(best, tl.max(scores, 1))
    # A query that has seen no key yet has no best score to be relative to.
    base = tl.where(new_best == float("-inf"), 0.0, new_best)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(best - base)
    total = total * shrink + tl.sum(weights, 1)
    attended = tl.dot(weights.to(values.dtype), values, attended * shrink[:, None], input_precision=PRECISION)
    return new_best, total, attended
