"""Speculative decoding: chooses which guessed tokens (drafts) one run of the model (a pass) verifies.

The chosen drafts give the most tokens per second:

- A pass of n rows gives n tokens, plus the correct drafts of each row.
- The k-th draft of a row is correct only if all drafts before it are. The probability is p ** k. The acceptance rate p
  of the draft's kind is estimated from recent drafts of this row and of all rows.
- Each draft lengthens the pass, by a cost that the worker measured at its start (`pass_times`).
- Drafts are added, the most probable first, until a further draft would lower the tokens per second.

A row whose drafts are not verified gives no new evidence. Therefore its next guess is compared with the token that it
samples (a "look"). Looks become rarer while the row's drafts do not pay, and have a time budget: a small share of the
time of passes, plus a part of the time that drafts saved lately. So speculation costs nearly nothing while no drafts
pay, whatever the number of rows.

All ranks choose alike, from sampled tokens and measurements: with several ranks a step is one pass, and the time of
passes is measured at the start only.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from worker_svc.device.pass_times import PassCosts, PassTimes
from worker_svc.sampling.drafters import EXPECTED_RIGHT

_MIN_GAIN = 1.12
"""Minimum expected gain in tokens per second; expectations of chosen drafts are too high on average."""
_MAX_LONGER = 2.0
"""Maximum slowdown, compared to a pass without drafts, of a pass of several rows that exceeds the rest of its step's
time: all rows get their tokens at the end of the pass, including rows without drafts."""
_LOOKING_S, _LOOKING_ROW_S = 130e-6, 25e-6
"""Cost of a look, per pass and per row, except in the first pass of a step: there it triples, since the results of the
previous step use the processors, too. A first pass therefore has looks only if the previous step had a single pass."""
_KEPT = 0.9
"""Factor by which a row's evidence decays at its next draft."""
_WEIGHT_OF_ALL = 2.0
"""Weight of all rows' evidence in the estimate for a row, in drafts of the row."""
_WEIGHT_EXPECTED, _MAX_SEEN = 8.0, 512.0
_SHARE_OF_LOOKING, _SHARE_OF_SAVED = 0.005, 0.25
"""Budget for looks: shares of the time of passes, and of the time that drafts saved."""
_MAX_LOOKS = 8
"""Maximum unspent budget, in looks at all rows: when rows leave their predictions, a few consecutive looks find the
place again."""
_MAX_PERIOD, _LONGER = 32, 4
"""Maximum passes between two looks at a row whose drafts do not pay, and the factor by which each look lengthens this
period. Periods are powers of two, so that rows are looked at together."""
_MAX_RIGHT, _MAX_OF_ROW = 0.9, 7
"""If this acceptance rate, with this number of drafts for each row, would not pay, no row is looked at."""


class Guesses(NamedTuple):
    """Available guesses: each array has an item for each guess."""

    rows: NDArray[np.int64]
    kinds: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    """At least 1."""
    lengths: NDArray[np.int64]
    """Tokens of each row."""


class PayingDrafts:
    """Chooses the drafts that give the most tokens per second."""

    def __init__(self, max_num_rows: int, times: PassTimes, model_costs: PassCosts | None = None) -> None:
        """`model_costs` are the costs of the draft model's passes."""
        self._times = times
        self._model_costs, self._model_budget_s = model_costs or PassCosts(), 0.0
        num_kinds = len(EXPECTED_RIGHT)
        self._right, self._checked = np.zeros((2, max_num_rows, num_kinds))
        self._right_of_all = np.array(EXPECTED_RIGHT) * _WEIGHT_EXPECTED
        self._checked_of_all = np.full(num_kinds, _WEIGHT_EXPECTED)
        # For each row, the pass in which it is looked at next, and the period of its looks.
        self._due_at, self._periods = np.zeros(max_num_rows, np.int64), np.ones(max_num_rows, np.int64)
        # Whether the last look at a row led to drafts, and whether any row's did; no row is due before `_due_from`.
        self._pays, self._any_pays, self._due_from = np.zeros(max_num_rows, np.bool_), False, 0
        self._num_passes, self._was_first, self._may_look, self._max_period = 0, True, True, 1
        # For passes of `_num_rows` rows: the budget that each adds, the maximum budget, and whether drafts may pay. The
        # budget is negative after overspending.
        self._num_rows, self._share_s, self._max_budget_s, self._may_pay = 0, 0.0, 0.0, True
        self._budget_s, self._left_s = 0.0, 0.0

    def enter(self, row: int) -> None:
        """Forgets the evidence of a row that a new sequence occupies."""
        self._right[row] = self._checked[row] = 0.0
        self._due_at[row], self._periods[row], self._pays[row], self._due_from = 0, 1, False, 0

    def begin_pass(self, num_rows: int, left_s: float, *, is_first: bool) -> bool:
        """Starts a pass, which has `num_rows` rows without drafts. Returns False if no row needs a guess. `is_first`
        marks the first pass of a step, and `left_s` is the rest of the step's time."""
        self._num_passes += 1
        self._left_s = left_s
        if num_rows != self._num_rows or self._num_passes % _MAX_PERIOD == 0:
            self._update_estimates(num_rows)
        self._add_to_budget(self._share_s)
        self._may_look = self._budget_s > 0 and (self._was_first or not is_first)
        self._model_budget_s += self._share_s
        self._was_first = is_first
        return self._may_pay and (self._may_look or self._any_pays) and self._due_from <= self._num_passes

    def are_due(self, rows: NDArray[np.integer]) -> NDArray[np.bool_]:
        """Which of these rows need a guess in the current pass."""
        due_at = self._due_at[rows]
        is_due = due_at <= self._num_passes
        if not is_due.any():
            self._due_from = int(due_at.min())
        return is_due if self._may_look else is_due & self._pays[rows]

    def found_nothing(self, rows: Sequence[int], max_periods: Sequence[int]) -> None:
        """Records that these rows have no guess in this pass. Each is looked at again within its maximum of passes."""
        self._postpone(np.array(rows), np.array(max_periods))

    def plan(self, guesses: Guesses, num_rows: int, num_missing: int) -> NDArray[np.int64]:
        """Returns the number of tokens, `num_tokens` at most, that a draft model shall guess for each of these rows.
        The draft model must first compute `num_missing` tokens, at least one per row."""
        counts, _ = self._best(guesses, num_rows, self._model_costs)
        look_s = float(self._model_costs.seconds_for(np.array([num_missing]))[0])
        self._model_budget_s = min(self._model_budget_s, _MAX_LOOKS * look_s)
        if not counts.any() and self._model_budget_s >= look_s:
            # Guesses one token for each, to learn when drafts begin to pay.
            self._model_budget_s -= look_s
            counts = np.minimum(guesses.num_tokens, 1)
        return counts

    def choose(self, guesses: Guesses, num_rows: int) -> NDArray[np.int64]:
        """Returns the number of tokens of each guess to verify in a pass that has `num_rows` rows without drafts."""
        rows = guesses.rows
        counts, saved_s = self._best(guesses, num_rows)
        self._add_to_budget(_SHARE_OF_SAVED * saved_s)
        paying = rows[counts > 0]
        self._periods[paying], self._pays[paying] = 1, True
        self._any_pays = self._any_pays or len(paying) > 0
        if not counts.all():
            self._postpone(rows[counts == 0], _MAX_PERIOD)
        return counts

    def _best(
        self, guesses: Guesses, num_rows: int, model_costs: PassCosts | None = None
    ) -> tuple[NDArray[np.int64], float]:
        """Returns the number of tokens of each guess that gives the most tokens per second (0 if the gain is too
        small), and the time that they save. `model_costs` are given if a draft model is yet to guess: one pass per
        place."""
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
            of_pass = model_costs.seconds_for(np.arange(1, len(order) + 1) / num_passes)
            costs[1:] += num_passes * of_pass + model_costs.context_s * np.cumsum(guesses.lengths[order // len(places)])
        rates = (num_rows + np.concatenate(([0.0], np.cumsum(gains.ravel()[order])))) / costs
        if num_rows > 1:
            rates[costs > max(self._left_s, _MAX_LONGER * costs[0])] = 0.0
        best = int(np.argmax(rates))
        taken, saved_s = np.zeros(gains.size, np.int64), 0.0
        if rates[best] >= _MIN_GAIN * rates[0]:
            taken[order[:best]] = 1
            # Without drafts, the same number of tokens takes this much longer.
            saved_s = float(costs[best] * (rates[best] / rates[0] - 1))
        return taken.reshape(gains.shape).sum(1), saved_s

    def record_outcomes(self, guesses: Guesses, num_checked: NDArray[np.int64], num_right: NDArray[np.int64]) -> None:
        """Records that the first `num_right` of the `num_checked` tokens of each guess were sampled, in order."""
        rows, kinds = guesses.rows, guesses.kinds
        # Drafts after an incorrect one are no evidence.
        num_shown = np.minimum(num_right + 1, num_checked)
        self._right[rows, kinds] = _KEPT * self._right[rows, kinds] + num_right
        self._checked[rows, kinds] = _KEPT * self._checked[rows, kinds] + num_shown
        np.add.at(self._right_of_all, kinds, num_right)
        np.add.at(self._checked_of_all, kinds, num_shown)
        if (is_full := self._checked_of_all > _MAX_SEEN).any():
            self._right_of_all[is_full] /= 2
            self._checked_of_all[is_full] /= 2

    def _update_estimates(self, num_rows: int) -> None:
        """Estimates the time of a pass with `num_rows` rows, and from it the budget and the period of looks."""
        counts = np.arange(_MAX_OF_ROW * num_rows + 1)
        seconds = self._times.with_drafts(num_rows, counts, num_rows)
        rates = (num_rows + _MAX_RIGHT * counts) / seconds
        self._num_rows, self._may_pay = num_rows, bool(rates.max() >= _MIN_GAIN * rates[0])
        all_rows_s = _LOOKING_S + _LOOKING_ROW_S * num_rows
        self._share_s, self._max_budget_s = _SHARE_OF_LOOKING * float(seconds[0]), _MAX_LOOKS * all_rows_s
        # If passes are long, rows can be looked at in each.
        needed = all_rows_s / self._share_s
        self._max_period = min(1 << max(int(needed), 1).bit_length(), _MAX_PERIOD)

    def _postpone(self, rows: NDArray[np.integer], max_periods: NDArray[np.integer] | int) -> None:
        """Takes the time of a look at these rows from the budget, and delays the next look at them."""
        self._budget_s -= _LOOKING_S + _LOOKING_ROW_S * len(rows)
        before = self._periods[rows]
        periods = np.minimum(_LONGER * before, np.minimum(np.maximum(max_periods, before), self._max_period))
        self._periods[rows], self._pays[rows] = periods, False
        self._any_pays = bool(self._pays.any())
        self._due_at[rows] = due_at = (self._num_passes // periods + 1) * periods
        self._due_from = min(self._due_from, int(due_at.min()))

    def _add_to_budget(self, seconds: float) -> None:
        """Adds to the budget for looks."""
        self._budget_s = min(self._budget_s + seconds, self._max_budget_s)
