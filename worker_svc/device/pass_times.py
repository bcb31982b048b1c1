"""Predicts how long a pass (one run of the model) takes, with and without guessed tokens (drafts) to verify.

The worker measures passes of 1, 2, 4 and more rows at its start (`PassCosts`). `PassTimes` multiplies these costs by
factors that follow the latest passes.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_WEIGHT_OF_LATEST, _FORGOTTEN = 0.1, 0.005
_NONE = np.zeros(0, np.int64)
_WEIGHT_OF_DRAFTS, _WEIGHT_OF_START = 0.05, 1
"""Weight of the latest pass with drafts in the average; low, because passes differ by more than a few rows add. The
first passes weigh more: the measurement at the start counts as one of them (`_WEIGHT_OF_START`)."""
_NUM_UNTRIED, _UNTRIED = 512, 0.5
"""After `_NUM_UNTRIED` passes without drafts, drafts are expected to add at most this share of the measured cost."""
_LEAST, _MOST = 1 / 16, 16.0
"""Bounds of a factor."""
_NUM_SIZES = 64
_LEAST_OF_ROW = 1 / 1024
"""Minimum cost of a further row, as a share of a pass of one row."""
_GUESSING_S, _GUESSING_ROW_S = 150e-6, 8e-6
"""Cost of drafts outside the model, per pass and per row that has a guess, measured on an EPYC."""


@dataclass(frozen=True, slots=True)
class PassCosts:
    """Measured times of passes: `seconds[i]` with `num_rows[i]` rows, which rise, plus times per context token of each
    row and of each draft."""

    num_rows: Sequence[int] = (1, 64)
    seconds: Sequence[float] = (1.0, 4.0)
    context_s: float = 0.0
    draft_context_s: float = 0.0

    @classmethod
    def from_measurements(
        cls, seconds: Sequence[float], context_s: float = 0.0, draft_context_s: float = 0.0
    ) -> "PassCosts":
        """The costs from measured passes of 1, 2, 4 and so on rows, without noise of other processes: fewer rows take
        no longer, twice the rows take at most twice as long, and each further row costs something."""
        plausible = [*np.minimum.accumulate(seconds[::-1])[::-1].tolist()]
        for index in range(1, len(plausible)):
            before, more = plausible[index - 1], _LEAST_OF_ROW * plausible[0] * 2 ** (index - 1)
            plausible[index] = min(max(plausible[index], before + more), 2 * before)
        return cls([2**index for index in range(len(plausible))], plausible, context_s, draft_context_s)

    def seconds_for(self, num_rows: NDArray[np.integer] | NDArray[np.floating]) -> NDArray[np.float64]:
        """Returns the seconds of passes without context. Rows beyond the measured ones cost what the last ones did."""
        within = np.interp(num_rows, self.num_rows, self.seconds)
        slope = (self.seconds[-1] - self.seconds[-2]) / (self.num_rows[-1] - self.num_rows[-2])
        return within + slope * np.maximum(num_rows - self.num_rows[-1], 0)


class PassTimes:
    """Predicts how long a pass takes: the measurement of the start, times factors that follow the passes since.

    On the CPU, the first pass of a step shares the processors with the scheduler and the gateway, which handle the
    tokens of the previous step; later passes have the processors to themselves. With 64 rows of quire-tiny on two
    cores, the first pass takes 10 ms and each further one 2.6 ms. A first pass therefore is only an upper bound.

    The cost of drafts has its own factors, one for each size of a pass: 1 row, 2 to 3, 4 to 7, and so on. On a busy
    machine threads wait for each other, and further rows cost nearly nothing: a pass of quire-tiny there takes 4 ms
    with one row and 6.7 ms with 64; on an idle machine, 0.4 ms and 1.4 ms. A measurement on a busy machine thus is
    wrong on an idle one and the other way round, perhaps for some sizes only. Masks, which drafts of constrained rows
    need, are not measured at the start at all.
    """

    def __init__(self, costs: PassCosts | None = None) -> None:
        """Without costs, the next pass is expected to take as long as the last one."""
        self._costs = costs
        self._slowdown, self._latest_s = 1.0, 0.0
        # By size: the seconds that drafts added to passes lately, the seconds that they were expected to add, the
        # number of passes behind these averages, and the number of passes without drafts since.
        self._added_s, self._expected_to_add_s = np.ones((2, _NUM_SIZES))
        self._num_known, self._num_without = np.zeros((2, _NUM_SIZES), np.int64)

    @property
    def costs(self) -> PassCosts:
        """The costs measured at the start."""
        assert self._costs is not None, "costs"
        return self._costs

    def record_pass(
        self, num_rows: int, seconds: float, num_drafts: NDArray[np.integer] = _NONE, *, is_first: bool
    ) -> None:
        """Records that a pass with `num_rows` rows, some of them with drafts, took `seconds`."""
        self._latest_s = seconds
        if self._costs is None:
            return
        count, num_guesses, size = int(num_drafts.sum()), np.count_nonzero(num_drafts), num_rows.bit_length()
        if count and not is_first:
            plain, drafted = self._costs.seconds_for(num_rows + np.array([0, count]))
            added_s = seconds / self._slowdown - plain - _GUESSING_S - _GUESSING_ROW_S * num_guesses
            expected_s = drafted - plain
            if not self._num_known[size]:
                self._added_s[size] *= expected_s / self._expected_to_add_s[size]
                self._expected_to_add_s[size] = expected_s
            self._num_known[size] += 1
            weight = max(1 / (_WEIGHT_OF_START + self._num_known[size]), _WEIGHT_OF_DRAFTS)
            # The cap limits the effect of an interrupted pass.
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
                # Drafts are not verified while they seem too costly, so their factor forgets, too.
                self._added_s[size] = min(self._added_s[size], _UNTRIED * self._expected_to_add_s[size])
                self._num_known[size] = 0

    def expected_s(self, num_rows: int, num_drafts: NDArray[np.integer] = _NONE) -> float:
        """Returns the seconds that another pass with these rows and drafts would take."""
        if self._costs is None:
            return self._latest_s
        return float(self.with_drafts(num_rows, num_drafts.sum(keepdims=True), int(np.count_nonzero(num_drafts)))[0])

    def with_drafts(self, num_rows: int, num_drafts: NDArray[np.integer], num_guesses: int) -> NDArray[np.float64]:
        """Returns the seconds of passes without context that have `num_rows` rows and each of these numbers of drafts.
        `num_guesses` rows have a guess."""
        assert self._costs is not None, "costs"
        plain = self._costs.seconds_for(np.array([num_rows]))
        size = num_rows.bit_length()
        of_drafts = float(self._added_s[size] / self._expected_to_add_s[size])
        more = min(max(of_drafts, _LEAST), _MOST) * (self._costs.seconds_for(num_rows + num_drafts) - plain)
        return self._slowdown * (plain + more + (num_drafts > 0) * (_GUESSING_S + _GUESSING_ROW_S * num_guesses))
