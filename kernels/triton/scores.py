"""How a query scores a key: scale, soft cap and ALiBi; and what a sink scores."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


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

    What would multiply all scores alike is left to `score_unit`.
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
    """What scores are to be multiplied by to be in units of log 2, since exp2 is what the hardware has.

    It is done where the best score is taken off, by the same instruction.
    """
    unit = scoring.scale * LOG2_E
    if scoring.soft_cap is not None:
        unit = scoring.soft_cap * LOG2_E
    if scoring.slopes is not None:
        unit = 1.0 * LOG2_E
    return unit
