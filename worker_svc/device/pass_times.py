"""How long a pass takes: what was measured at the start, and what the latest passes took."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WEIGHT_OF_LATEST, _FORGOTTEN = 0.1, 0.005
_NONE = np.zeros(0, np.int64)
_WEIGHT_OF_DRAFTS = 0.05
"""Of the latest pass with drafts: what some rows add is little beside what passes differ in."""
_LEAST, _MOST = 1 / 16, 16.0
"""Of a factor."""
_GUESSING_S, _GUESSING_ROW_S = 150e-6, 8e-6
"""What drafts cost a pass beside the model, for a pass and for each row that has a guess, measured on an EPYC."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """How long a pass takes: `seconds` with `num_rows`, which rise, and so much more for each token of context."""

    num_rows: Sequence[int] = (1, 64)
    seconds: Sequence[float] = (1.0, 4.0)
    context_s: float = 0.0

    def of(self, num_rows: NDArray[np.integer] | NDArray[np.floating]) -> NDArray[np.float64]:
        """Without contexts. Beyond what was measured each row costs as much as the last ones did."""
        within = np.interp(num_rows, self.num_rows, self.seconds)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.num_rows[-1] - self.num_rows[-2])
        return within + slope * np.maximum(num_rows - self.num_rows[-1], 0)


class PassTimes:
    """Predicts how long a pass takes: what was measured at the start, times factors that follow the passes since.

    On the CPU, the first pass of a step shares the processors with the scheduler and the gateway, which handle the
    tokens of the step before; the passes behind it have them to themselves. Of 64 rows of quire-tiny on two cores the
    first takes 10 ms, each further one 2.6 ms. So a first pass is only an upper bound.

    What drafts add has a factor of its own. On a busy machine threads wait for each other, and further rows cost nearly
    nothing: there a pass of quire-tiny takes 4 ms with one row and 6.7 with 64, else 0.4 and 1.4. So what was measured
    beside other work is wrong without it, and the other way round.
    """

    def __init__(self, costs: PassCosts | None = None) -> None:
        """Without costs, the next pass is expected to take as long as the last one."""
        self._costs = costs
        self._slowdown, self._latest_s = 1.0, 0.0
        # What drafts added to passes lately, and what they were expected to add.
        self._added_s, self._expected_to_add_s = 0.0, 0.0

    @property
    def context_s(self) -> float:
        """As `PassCosts.context_s`."""
        return 0.0 if self._costs is None else self._costs.context_s

    def took(self, num_rows: int, seconds: float, num_drafts: NDArray[np.integer] = _NONE, *, is_first: bool) -> None:
        """A pass of a step took so long, with so many rows, and drafts of some of them."""
        self._latest_s = seconds
        if self._costs is None:
            return
        count, num_guesses = int(num_drafts.sum()), np.count_nonzero(num_drafts)
        if count and not is_first:
            plain, drafted = self._costs.of(num_rows + np.array([0, count]))
            added_s = seconds / self._slowdown - plain - _GUESSING_S - _GUESSING_ROW_S * num_guesses
            expected_s = drafted - plain
            if not self._expected_to_add_s:
                self._added_s = self._expected_to_add_s = expected_s
            # One that was interrupted says nothing.
            self._added_s += _WEIGHT_OF_DRAFTS * (min(added_s, _MOST * expected_s) - self._added_s)
            self._expected_to_add_s += _WEIGHT_OF_DRAFTS * (expected_s - self._expected_to_add_s)
            return
        slowdown = self._slowdown * seconds / self.expected_s(num_rows, num_drafts)
        if is_first:
            # Forgets a little each time, so that a slow moment does not end further passes for good.
            forgotten = max((1 - _FORGOTTEN) * self._slowdown, min(self._slowdown, 1.0))
            self._slowdown = max(min(slowdown, forgotten), _LEAST)
        else:
            self._slowdown += _WEIGHT_OF_LATEST * (slowdown - self._slowdown)
            # Nor drafts, which are not verified while they seem to cost too much.
            self._added_s = max((1 - _FORGOTTEN) * self._added_s, min(self._added_s, self._expected_to_add_s))

    def expected_s(self, num_rows: int, num_drafts: NDArray[np.integer] = _NONE) -> float:
        """The seconds of one more pass with so many rows, and drafts of some of them."""
        if self._costs is None:
            return self._latest_s
        return float(self.with_drafts(num_rows, num_drafts.sum(keepdims=True), int(np.count_nonzero(num_drafts)))[0])

    def with_drafts(self, num_rows: int, num_drafts: NDArray[np.integer], num_guesses: int) -> NDArray[np.float64]:
        """The seconds of passes with so many rows and each of these numbers of drafts, without contexts. So many rows
        have a guess."""
        assert self._costs is not None, "costs"
        plain = self._costs.of(np.array([num_rows]))
        of_drafts = self._added_s / self._expected_to_add_s if self._expected_to_add_s else 1.0
        more = min(max(of_drafts, _LEAST), _MOST) * (self._costs.of(num_rows + num_drafts) - plain)
        return self._slowdown * (plain + more + (num_drafts > 0) * (_GUESSING_S + _GUESSING_ROW_S * num_guesses))
