"""Which drafts a pass verifies: those that give more tokens a second than a pass without them.

A pass of n rows gives n tokens, and of each row those of its drafts that are right. The k-th is right if all before it
are: with the probability p ** k, where p is the share of drafts of its kind that were right, of this row lately and of
all rows. Each draft makes the pass longer, by what the worker measured at its start. The most probable drafts are taken
until a further one would lower the tokens a second.

A row whose drafts are not taken learns nothing by verification. So its next guess is compared with what it draws, less
and less often while that does not pay, and within a budget of time: a small share of the passes, and a part of what
drafts saved lately. So rows that do not pay cost nearly what they cost without speculation, however many they are.

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
_LOOKING_S, _LOOKING_ROW_S = 130e-6, 20e-6
"""What it costs to look for guesses that are not verified, in a further pass of a step. In the first one, which shares
the processors and the interpreter with the results of the step before, it takes three times as long: there it is only
done where the step before had no further pass either."""
_KEPT = 0.9
"""Of what a row showed, at its next draft."""
_WEIGHT_OF_ALL = 2.0
"""What all rows showed counts for a row as much as so many drafts of its own."""
_WEIGHT_EXPECTED, _MAX_SEEN = 8.0, 512.0
_SHARE_OF_LOOKING, _SHARE_OF_SAVED = 0.005, 0.25
"""Looking for guesses that are not verified takes so much of the time of passes, and of the time that drafts saved."""
_NUM_HOPED = 3
"""So many looks at a new row, or at one whose drafts paid, are free."""
_MAX_LOOKS = 8
"""What is not spent is kept for so many looks at all rows: where rows leave their predictions, a few looks, one after
the other, find the place again."""
_MAX_PERIOD, _LONGER = 32, 4
"""A row that does not pay is looked at every few passes, together with the others, and each time after so many times as
many."""


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

    def due(self, rows: NDArray[np.integer], num_rows: int, *, is_first: bool) -> NDArray[np.bool_]:
        """Which of these rows to guess for in the next pass, which has `num_rows` rows without drafts. `is_first` in
        the first pass of a step."""
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
        # Whether the last look at a row ended in drafts, and how many looks are free.
        self._pays, self._num_hoped = np.zeros(max_num_rows, np.bool_), np.zeros(max_num_rows, np.int64)
        self._num_passes, self._was_first, self._max_period = 0, True, 1
        # Of the pass, and what may be spent on looking; below 0 where more was spent.
        self._num_rows, self._pass_s, self._budget_s = 0, 0.0, 0.0

    def enter(self, row: int) -> None:
        self._right[row] = self._checked[row] = 0.0
        self._due_at[row], self._periods[row] = 0, 1
        self._pays[row], self._num_hoped[row] = False, _NUM_HOPED

    def due(self, rows: NDArray[np.integer], num_rows: int, *, is_first: bool) -> NDArray[np.bool_]:
        self._num_passes += 1
        if num_rows != self._num_rows:
            self._num_rows, self._pass_s = num_rows, float(self._costs.of(np.array([num_rows]))[0])
            # Where passes are long, it is worth to look at rows each time.
            needed = (_LOOKING_S + _LOOKING_ROW_S * num_rows) / (_SHARE_OF_LOOKING * self._pass_s)
            self._max_period = min(1 << max(int(needed), 1).bit_length(), _MAX_PERIOD)
        self._earn(_SHARE_OF_LOOKING * self._pass_s)
        may_look = self._pays[rows]
        if self._was_first or not is_first:
            may_look = may_look | (self._num_hoped[rows] > 0) | (self._budget_s > 0)
        self._was_first = is_first
        return may_look & (self._due_at[rows] <= self._num_passes)

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
            # Without drafts so many tokens take longer by this part.
            self._earn(_SHARE_OF_SAVED * float(costs[best] * (rates[best] / rates[0] - 1)))
        counts = taken.reshape(gains.shape).sum(1)
        paying = rows[counts > 0]
        self._periods[paying], self._pays[paying], self._num_hoped[paying] = 1, True, _NUM_HOPED
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
        num_charged = int(np.count_nonzero(self._num_hoped[rows] <= 0))
        self._num_hoped[rows] -= 1
        if num_charged:
            self._budget_s -= _LOOKING_S + _LOOKING_ROW_S * num_charged
        before = self._periods[rows]
        periods = np.minimum(_LONGER * before, np.minimum(np.maximum(max_periods, before), self._max_period))
        self._periods[rows], self._pays[rows] = periods, False
        self._due_at[rows] = (self._num_passes // periods + 1) * periods

    def _earn(self, seconds: float) -> None:
        """Adds to what may be spent on looking."""
        all_rows_s = _LOOKING_S + _LOOKING_ROW_S * self._num_rows
        self._budget_s = min(self._budget_s + seconds, _MAX_LOOKS * all_rows_s)
