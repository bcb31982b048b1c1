"""Medians, and the intervals in which they lie."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

_CONFIDENCE = 0.95


@dataclass(frozen=True, slots=True)
class Median:
    """A median with its 95% interval, from order statistics: no distribution is assumed. With fewer than six values the
    interval is all of them."""

    value: float
    low: float
    high: float
    count: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f} to {self.high:.2f})"


def median_of(values: Sequence[float]) -> Median | None:
    """None if there are no values."""
    ordered, count = sorted(values), len(values)
    if not count:
        return None
    middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
    # The largest rank below which the median lies with at most half of what the interval may miss.
    rank, below = 0, 0.0
    while (below := below + math.comb(count, rank) / 2**count) <= (1 - _CONFIDENCE) / 2:
        rank += 1
    first = max(rank - 1, 0)
    return Median(middle, ordered[first], ordered[count - 1 - first], count)
