"""Which drafts a pass verifies: those that give more tokens a second than a pass without them.

A pass of n rows gives n tokens, and of each row those of its drafts that are right. The k-th is right if all before it
are: with the probability p ** k, where p is the share of drafts of its kind that were right, of this row lately and of
all rows. Each draft makes the pass longer, by what the worker measured at its start. The most probable drafts are taken
until a further one would lower the tokens a second.

A row whose drafts are not taken learns nothing by verification. So its next guess is compared with what it draws, less
and less often while that does not pay, and within a budget of time: a small share of the passes, and a part of what
drafts saved lately. So rows that do not pay cost nearly what they cost without speculation, however many they are.

All of it follows from what rows drew, and all ranks do the same: with several of them a step is one pass, and how long
passes take is only measured at the start.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from worker_svc.device.pass_times import PassCosts, PassTimes
from worker_svc.sampling.drafters import EXPECTED_RIGHT

_MIN_GAIN = 1.12
"""What is expected of drafts at least, in tokens a second: expectations of what is chosen are too high on average."""
_MAX_LONGER = 2.0
"""A pass of several rows that takes longer than what is left of its step takes at most so many times as long as without
drafts: its rows get their tokens together, those that have no drafts, too."""
_LOOKING_S, _LOOKING_ROW_S = 130e-6, 25e-6
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
_MAX_LOOKS = 8
"""What is not spent is kept for so many looks at all rows: where rows leave their predictions, a few looks, one after
the other, find the place again."""
_MAX_PERIOD, _LONGER = 32, 4
"""A row that does not pay is looked at every few passes, together with the others, and each time after so many times as
many."""
_MAX_RIGHT, _MAX_OF_ROW = 0.9, 7
"""Where so many right ones of so many drafts of each row would not pay, no row is looked at."""


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

    def begin_pass(self, num_rows: int, left_s: float, *, is_first: bool) -> bool:
        """Whether there may be a row to guess for in the next pass, which has `num_rows` rows without drafts.
        `is_first` in the first pass of a step, which may take so many seconds more."""
        ...

    def due(self, rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of these rows to guess for in the pass that began."""
        ...

    def found_nothing(self, rows: Sequence[int], max_periods: Sequence[int]) -> None:
        """There is no guess for these rows in this pass. For each, one is looked for within so many passes."""
        ...

    def choose(self, guesses: Guesses, num_rows: int) -> NDArray[np.int64]:
        """How many tokens of each guess the pass verifies. It has `num_rows` rows without drafts."""
        ...

    def plan(self, guesses: Guesses, num_rows: int, num_missing: int) -> NDArray[np.int64]:
        """How many tokens a draft model guesses for each of these rows, `num_tokens` at most. It has to compute so many
        tokens first, at least one for each row."""
        ...

    def saw(self, guesses: Guesses, num_checked: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        """Of the first so many tokens of each guess, so many were drawn, in order."""
        ...


class PayingDrafts:
    """Those that give more tokens a second."""

    def __init__(self, max_num_rows: int, times: PassTimes, model_costs: PassCosts | None = None) -> None:
        """`model_costs` are those of a draft model."""
        self._times = times
        self._model_costs, self._model_budget_s = model_costs or PassCosts(), 0.0
        num_kinds = len(EXPECTED_RIGHT)
        self._right, self._checked = np.zeros((2, max_num_rows, num_kinds))
        self._right_of_all = np.array(EXPECTED_RIGHT) * _WEIGHT_EXPECTED
        self._checked_of_all = np.full(num_kinds, _WEIGHT_EXPECTED)
        # The next pass in which to look at each row, and every how many passes it is looked at.
        self._due_at, self._periods = np.zeros(max_num_rows, np.int64), np.ones(max_num_rows, np.int64)
        # Whether the last look at a row ended in drafts, and whether that is so of any row. No row is due earlier than
        # in pass `due_from`.
        self._pays, self._any_pays, self._due_from = np.zeros(max_num_rows, np.bool_), False, 0
        self._num_passes, self._was_first, self._may_look, self._max_period = 0, True, True, 1
        # Of passes of so many rows: what each adds to what may be spent on looking, up to which maximum, and whether
        # any drafts may pay. The budget is below 0 where more was spent.
        self._num_rows, self._share_s, self._max_budget_s, self._may_pay = 0, 0.0, 0.0, True
        self._budget_s, self._left_s = 0.0, 0.0

    def enter(self, row: int) -> None:
        self._right[row] = self._checked[row] = 0.0
        self._due_at[row], self._periods[row], self._pays[row], self._due_from = 0, 1, False, 0

    def begin_pass(self, num_rows: int, left_s: float, *, is_first: bool) -> bool:
        self._num_passes += 1
        self._left_s = left_s
        if num_rows != self._num_rows or self._num_passes % _MAX_PERIOD == 0:
            self._note_pass(num_rows)
        self._earn(self._share_s)
        self._may_look = self._budget_s > 0 and (self._was_first or not is_first)
        self._model_budget_s += self._share_s
        self._was_first = is_first
        return self._may_pay and (self._may_look or self._any_pays) and self._due_from <= self._num_passes

    def due(self, rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        due_at = self._due_at[rows]
        is_due = due_at <= self._num_passes
        if not is_due.any():
            self._due_from = int(due_at.min())
        return is_due if self._may_look else is_due & self._pays[rows]

    def found_nothing(self, rows: Sequence[int], max_periods: Sequence[int]) -> None:
        self._put_off(np.array(rows), np.array(max_periods))

    def plan(self, guesses: Guesses, num_rows: int, num_missing: int) -> NDArray[np.int64]:
        counts, _ = self._best(guesses, num_rows, self._model_costs)
        look_s = float(self._model_costs.of(np.array([num_missing]))[0])
        self._model_budget_s = min(self._model_budget_s, _MAX_LOOKS * look_s)
        if not counts.any() and self._model_budget_s >= look_s:
            # One token of each, to know when it begins to pay.
            self._model_budget_s -= look_s
            counts = np.minimum(guesses.num_tokens, 1)
        return counts

    def choose(self, guesses: Guesses, num_rows: int) -> NDArray[np.int64]:
        rows = guesses.rows
        counts, saved_s = self._best(guesses, num_rows)
        self._earn(_SHARE_OF_SAVED * saved_s)
        paying = rows[counts > 0]
        self._periods[paying], self._pays[paying] = 1, True
        self._any_pays = self._any_pays or len(paying) > 0
        if not counts.all():
            self._put_off(rows[counts == 0], _MAX_PERIOD)
        return counts

    def _best(
        self, guesses: Guesses, num_rows: int, model_costs: PassCosts | None = None
    ) -> tuple[NDArray[np.int64], float]:
        """How many tokens of each guess give the most tokens a second, none where that is too little, and the time that
        this saves. With `model_costs` the guesses are still to be made: for each place by a pass of the draft model."""
        rows, kinds = guesses.rows, guesses.kinds
        of_all = self._right_of_all[kinds] / self._checked_of_all[kinds] * _WEIGHT_OF_ALL
        p = (self._right[rows, kinds] + of_all) / (self._checked[rows, kinds] + _WEIGHT_OF_ALL)
        places = np.arange(1, int(guesses.num_tokens.max()) + 1)
        gains = np.where(places <= guesses.num_tokens[:, None], p[:, None] ** places, 0.0)
        order = np.argsort(-gains, axis=None, kind="stable")[: int(guesses.num_tokens.sum())]
        measured = self._times.costs
        reads = measured.draft_context_s * guesses.lengths
        costs = self._times.with_drafts(num_rows, np.arange(len(order) + 1), len(rows))
        costs += num_rows * measured.context_s * guesses.lengths.mean()
        costs[1:] += np.cumsum(reads[order // len(places)])
        if model_costs is not None:
            num_passes = np.maximum.accumulate(order % len(places)) + 1
            of_pass = model_costs.of(np.arange(1, len(order) + 1) / num_passes)
            costs[1:] += num_passes * of_pass + model_costs.context_s * np.cumsum(guesses.lengths[order // len(places)])
        rates = (num_rows + np.concatenate(([0.0], np.cumsum(gains.ravel()[order])))) / costs
        if num_rows > 1:
            rates[costs > max(self._left_s, _MAX_LONGER * costs[0])] = 0.0
        best = int(np.argmax(rates))
        taken, saved_s = np.zeros(gains.size, np.int64), 0.0
        if rates[best] >= _MIN_GAIN * rates[0]:
            taken[order[:best]] = 1
            # Without drafts so many tokens take longer by this part.
            saved_s = float(costs[best] * (rates[best] / rates[0] - 1))
        return taken.reshape(gains.shape).sum(1), saved_s

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

    def _note_pass(self, num_rows: int) -> None:
        """What a pass of so many rows takes now, and how often rows that do not pay are looked at for that."""
        counts = np.arange(_MAX_OF_ROW * num_rows + 1)
        seconds = self._times.with_drafts(num_rows, counts, num_rows)
        rates = (num_rows + _MAX_RIGHT * counts) / seconds
        self._num_rows, self._may_pay = num_rows, bool(rates.max() >= _MIN_GAIN * rates[0])
        all_rows_s = _LOOKING_S + _LOOKING_ROW_S * num_rows
        self._share_s, self._max_budget_s = _SHARE_OF_LOOKING * float(seconds[0]), _MAX_LOOKS * all_rows_s
        # Where passes are long, it is worth to look at rows each time.
        needed = all_rows_s / self._share_s
        self._max_period = min(1 << max(int(needed), 1).bit_length(), _MAX_PERIOD)

    def _put_off(self, rows: NDArray[np.integer], max_periods: NDArray[np.integer] | int) -> None:
        self._budget_s -= _LOOKING_S + _LOOKING_ROW_S * len(rows)
        before = self._periods[rows]
        periods = np.minimum(_LONGER * before, np.minimum(np.maximum(max_periods, before), self._max_period))
        self._periods[rows], self._pays[rows] = periods, False
        self._any_pays = bool(self._pays.any())
        self._due_at[rows] = due_at = (self._num_passes // periods + 1) * periods
        self._due_from = min(self._due_from, int(due_at.min()))

    def _earn(self, seconds: float) -> None:
        """Adds to what may be spent on looking."""
        self._budget_s = min(self._budget_s + seconds, self._max_budget_s)
