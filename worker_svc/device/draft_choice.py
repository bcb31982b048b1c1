"""Which drafts a pass verifies: those that give more tokens a second than a pass without them.

A pass of n rows gives n tokens, and of each row those of its drafts that are right. The k-th is right if all before it
are: with the probability p ** k, where p is the share of drafts of its kind that were right, of this row lately and of
all rows. Each draft makes the pass longer, by what the worker measured at its start. The most probable drafts are taken
until a further one would lower the tokens a second.

A row whose drafts are not taken learns nothing by verification. So its next guess is compared with what it draws, and
less and less often while that does not pay: then such a row costs what it costs without speculation.

All of it follows from what rows drew, and all ranks do the same.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from worker_svc.device.pass_times import PassCosts
from worker_svc.sampling.drafters import EXPECTED_RIGHT

_MIN_GAIN = 1.12
"""What is expected of drafts at least, in tokens a second: expectations of what is chosen are too high on average."""
_GUESSING_S, _GUESSING_ROW_S = 150e-6, 8e-6
"""What drafts cost a pass beside the model, for a pass and for each row that has a guess, measured on an EPYC."""
_KEPT = 0.9
"""Of what a row showed, at its next draft."""
_WEIGHT_OF_ALL = 2.0
"""What all rows showed counts for a row as much as so many drafts of its own."""
_WEIGHT_EXPECTED, _MAX_SEEN = 8.0, 512.0
_SHARE_OF_GUESSING, _MAX_PERIOD, _LONGER = 0.005, 32, 4
"""To look for guesses that are not verified takes such a share of the time at most: a row that does not pay is looked
at every few passes, together with the others, and each time after so many times as many."""


class Guesses(NamedTuple):
    """What may be drafted, for each of some rows."""

    rows: NDArray[np.int64]
    kinds: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    """At least 1."""
    lengths: NDArray[np.int64]
    """Tokens of each row."""


class DraftChoice(Protocol):
    """Chooses what is verified."""

    def enter(self, row: int) -> None:
        """Another sequence has the row."""
        ...

    def due(self, rows: NDArray[np.integer], num_rows: int) -> NDArray[np.bool_]:
        """Which of these rows to guess for in the next pass, which has `num_rows` rows without drafts."""
        ...

    def found_nothing(self, rows: Sequence[int], max_periods: Sequence[int]) -> None:
        """There is no guess for these rows in this pass. For each, one is looked for within so many passes."""
        ...

    def choose(self, guesses: Guesses, num_rows: int) -> NDArray[np.int64]:
        """How many tokens of each guess the pass verifies. It has `num_rows` rows without drafts."""
        ...

    def saw(self, guesses: Guesses, num_checked: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        """Of the first so many tokens of each guess, so many were drawn, in order."""
        ...


class PayingDrafts:
    """Those that give more tokens a second."""

    def __init__(self, max_num_rows: int, costs: PassCosts) -> None:
        self._costs = costs
        num_kinds = len(EXPECTED_RIGHT)
        self._right, self._checked = np.zeros((2, max_num_rows, num_kinds))
        self._right_of_all = np.array(EXPECTED_RIGHT) * _WEIGHT_EXPECTED
        self._checked_of_all = np.full(num_kinds, _WEIGHT_EXPECTED)
        # The next pass in which to look at each row, and every how many passes it is looked at.
        self._due_at, self._periods = np.zeros(max_num_rows, np.int64), np.ones(max_num_rows, np.int64)
        self._num_passes, self._num_rows, self._max_period = 0, 0, 1

    def enter(self, row: int) -> None:
        self._right[row] = self._checked[row] = 0.0
        self._due_at[row], self._periods[row] = 0, 1

    def due(self, rows: NDArray[np.integer], num_rows: int) -> NDArray[np.bool_]:
        self._num_passes += 1
        if num_rows != self._num_rows:
            self._num_rows = num_rows
            guessing_s = _GUESSING_S + _GUESSING_ROW_S * num_rows
            needed = guessing_s / (_SHARE_OF_GUESSING * float(self._costs.of(np.array([num_rows]))[0]))
            self._max_period = min(1 << max(int(needed), 1).bit_length(), _MAX_PERIOD)
        return self._due_at[rows] <= self._num_passes

    def found_nothing(self, rows: Sequence[int], max_periods: Sequence[int]) -> None:
        self._put_off(np.array(rows), np.array(max_periods))

    def choose(self, guesses: Guesses, num_rows: int) -> NDArray[np.int64]:
        rows, kinds = guesses.rows, guesses.kinds
        of_all = self._right_of_all[kinds] / self._checked_of_all[kinds] * _WEIGHT_OF_ALL
        p = (self._right[rows, kinds] + of_all) / (self._checked[rows, kinds] + _WEIGHT_OF_ALL)
        places = np.arange(1, int(guesses.num_tokens.max()) + 1)
        gains = np.where(places <= guesses.num_tokens[:, None], p[:, None] ** places, 0.0)
        order = np.argsort(-gains, axis=None, kind="stable")[: int(guesses.num_tokens.sum())]
        reads = self._costs.context_s * guesses.lengths
        costs = self._costs.of(num_rows + np.arange(len(order) + 1)) + num_rows * reads.mean()
        costs[1:] += np.cumsum(reads[order // len(places)]) + _GUESSING_S + _GUESSING_ROW_S * len(rows)
        rates = (num_rows + np.concatenate(([0.0], np.cumsum(gains.ravel()[order])))) / costs
        best = int(np.argmax(rates))
        taken = np.zeros(gains.size, np.int64)
        if rates[best] >= _MIN_GAIN * rates[0]:
            taken[order[:best]] = 1
        counts = taken.reshape(gains.shape).sum(1)
        self._periods[rows[counts > 0]] = 1
        if not counts.all():
            self._put_off(rows[counts == 0], _MAX_PERIOD)
        return counts

    def saw(self, guesses: Guesses, num_checked: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        rows, kinds = guesses.rows, guesses.kinds
        # What follows a wrong one shows nothing.
        num_shown = np.minimum(num_right + 1, num_checked)
        self._right[rows, kinds] = _KEPT * self._right[rows, kinds] + num_right
        self._checked[rows, kinds] = _KEPT * self._checked[rows, kinds] + num_shown
        np.add.at(self._right_of_all, kinds, num_right)
        np.add.at(self._checked_of_all, kinds, num_shown)
        if (is_full := self._checked_of_all > _MAX_SEEN).any():
            self._right_of_all[is_full] /= 2
            self._checked_of_all[is_full] /= 2

    def _put_off(self, rows: NDArray[np.integer], max_periods: NDArray[np.integer] | int) -> None:
        before = self._periods[rows]
        longest = np.minimum(np.maximum(max_periods, before), self._max_period)
        periods = np.minimum(_LONGER * before, longest)
        self._periods[rows] = periods
        self._due_at[rows] = (self._num_passes // periods + 1) * periods
