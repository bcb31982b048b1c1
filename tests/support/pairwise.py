"""Reduces combinations of test parameters to a few that have every pair of values of different parameters."""

from collections.abc import Sequence
from itertools import combinations
from typing import Any


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """A few cases, in a fixed order, that have every pair of values of two axes."""
    missing = {
        (first, a, second, b)
        for first, second in combinations(range(len(axes)), 2)
        for a in range(len(axes[first]))
        for b in range(len(axes[second]))
    }
    cases = []
    while missing:
        first, a, second, b = min(missing)
        case: dict[int, int] = {first: a, second: b}
        for axis in range(len(axes)):
            if axis not in case:
                values = range(len(axes[axis]))
                case[axis] = max(values, key=lambda value, axis=axis: _met(missing, case, axis, value))
        missing = {(i, x, j, y) for i, x, j, y in missing if case[i] != x or case[j] != y}
        cases.append(tuple(axes[axis][case[axis]] for axis in range(len(axes))))
    return cases


def _met(missing: set[tuple[int, int, int, int]], case: dict[int, int], axis: int, value: int) -> int:
    """The number of missing pairs of the value and values that the case already has."""
    return sum((min((axis, value), pair) + max((axis, value), pair)) in missing for pair in case.items())
