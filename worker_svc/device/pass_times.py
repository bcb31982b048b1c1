"""How long a pass takes: what was measured at the start, and what the latest passes took."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WEIGHT_OF_LATEST, _FORGOTTEN = 0.1, 0.005
_NONE = np.zeros(0, np.int64)
_WEIGHT_OF_DRAFTS, _WEIGHT_OF_START = 0.05, 1
"""Of the latest pass with drafts: what some rows add is little beside what passes differ in. The first ones weigh more:
what was measured at the start counts as much as so many of them."""
_NUM_UNTRIED, _UNTRIED = 512, 0.5
"""After so many passes without drafts, these are expected to add at most so much of what the start said."""
_LEAST, _MOST = 1 / 16, 16.0
"""Of a factor."""
_NUM_SIZES = 64
_LEAST_OF_ROW = 1 / 1024
"""What a further row adds at least to a pass of one row."""
_GUESSING_S, _GUESSING_ROW_S = 150e-6, 8e-6
"""What drafts cost a pass beside the model, for a pass and for each row that has a guess, measured on an EPYC."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """How long a pass takes: `seconds` with `num_rows`, which rise, and so much more for each token of context, of a
    row and of each of its drafts."""

    num_rows: Sequence[int] = (1, 64)
    seconds: Sequence[float] = (1.0, 4.0)
    context_s: float = 0.0
    draft_context_s: float = 0.0

    @classmethod
    def of_measured(cls, seconds: Sequence[float], context_s: float = 0.0, draft_context_s: float = 0.0) -> "PassCosts":
        """Of passes of 1, 2, 4 and so on rows, of which other processes may have disturbed some: fewer rows take no
        longer, twice as many rows take at most twice as long, and no row costs nothing."""
        plausible = [*np.minimum.accumulate(seconds[::-1])[::-1].tolist()]
        for index in range(1, len(plausible)):
            before, more = plausible[index - 1], _LEAST_OF_ROW * plausible[0] * 2 ** (index - 1)
            plausible[index] = min(max(plausible[index], before + more), 2 * before)
        return cls([2**index for index in range(len(plausible))], plausible, context_s, draft_context_s)

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

    What drafts add has factors of its own, one for each size of a pass: 1 row, 2 and 3, 4 to 7, and so on. On a busy
    machine threads wait for each other, and further rows cost nearly nothing: there a pass of quire-tiny takes 4 ms
    with one row and 6.7 with 64, else 0.4 and 1.4. So what was measured beside other work is wrong without them, and
    the other way round; and it may be so of some numbers of rows only. Masks, which drafts of constrained rows need,
    are not measured at the start at all.
    """

    def __init__(self, costs: PassCosts | None = None) -> None:
        """Without costs, the next pass is expected to take as long as the last one."""
        self._costs = costs
        self._slowdown, self._latest_s = 1.0, 0.0
        # By size: what drafts added to passes lately, and what they were expected to add; how many passes this is known
        # from, and how many passes without drafts there were since.
        self._added_s, self._expected_to_add_s = np.ones((2, _NUM_SIZES))
        self._num_known, self._num_without = np.zeros((2, _NUM_SIZES), np.int64)

    @property
    def costs(self) -> PassCosts:
        """What was measured at the start."""
        assert self._costs is not None, "costs"
        return self._costs

    def took(self, num_rows: int, seconds: float, num_drafts: NDArray[np.integer] = _NONE, *, is_first: bool) -> None:
        """A pass of a step took so long, with so many rows, and drafts of some of them."""
        self._latest_s = seconds
        if self._costs is None:
            return
        count, num_guesses, size = int(num_drafts.sum()), np.count_nonzero(num_drafts), num_rows.bit_length()
        if count and not is_first:
            plain, drafted = self._costs.of(num_rows + np.array([0, count]))
            added_s = seconds / self._slowdown - plain - _GUESSING_S - _GUESSING_ROW_S * num_guesses
            expected_s = drafted - plain
            if not self._num_known[size]:
                self._added_s[size] *= expected_s / self._expected_to_add_s[size]
                self._expected_to_add_s[size] = expected_s
            self._num_known[size] += 1
            weight = max(1 / (_WEIGHT_OF_START + self._num_known[size]), _WEIGHT_OF_DRAFTS)
            # One that was interrupted says nothing.
            self._added_s[size] += weight * (min(added_s, _MOST * expected_s) - self._added_s[size])
            self._expected_to_add_s[size] += weight * (expected_s - self._expected_to_add_s[size])
            self._num_without[size] = 0
            return
        slowdown = self._slowdown * seconds / self.expected_s(num_rows, num_drafts)
        if is_first:
            # Forgets a little each time, so that a slow moment does not end further passes for good.
            forgotten = max((1 - _FORGOTTEN) * self._slowdown, min(self._slowdown, 1.0))
            self._slowdown = max(min(slowdown, forgotten), _LEAST)
        else:
            self._slowdown += _WEIGHT_OF_LATEST * (slowdown - self._slowdown)
            self._num_without[size] += 1
            if self._num_without[size] % _NUM_UNTRIED == 0:
                # Nor drafts, which are not verified while they seem to cost too much.
                self._added_s[size] = min(self._added_s[size], _UNTRIED * self._expected_to_add_s[size])
                self._num_known[size] = 0

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
        size = num_rows.bit_length()
        of_drafts = float(self._added_s[size] / self._expected_to_add_s[size])
        more = min(max(of_drafts, _LEAST), _MOST) * (self._costs.of(num_rows + num_drafts) - plain)
        return self._slowdown * (plain + more + (num_drafts > 0) * (_GUESSING_S + _GUESSING_ROW_S * num_guesses))
