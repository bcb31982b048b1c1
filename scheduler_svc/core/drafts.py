"""How many drafts rows may have, and what came of them.

The worker guesses tokens and verifies those guesses that pay; the scheduler says how many it may verify, since they
need blocks and a share of the step. A step of n decodes takes as long as f + n tokens, where f is what reading the
weights costs. So drafts that are right with a probability below n / (f + n) do not pay, and none are allowed where that
is nearly 1.
"""

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.step import Array

_MAX_PROBABILITY = 0.9
"""How probable a draft is at most, to be worth blocks."""


@dataclass(slots=True)
class DraftCounts:
    """What came of drafts so far: samples that had some, all their drafts, and how many of these were right, by their
    place behind the sample."""

    num_samples: int = 0
    num_drafts: int = 0
    right_at: list[int] = field(default_factory=list[int])

    def add(self, num_right: Array, num_drafts: Array, num_passes: int) -> None:
        """A step verified so many drafts of its samples. Of a step in which the model ran several times, each time
        counts as if it had as many right ones."""
        self.num_samples += int(np.count_nonzero(num_drafts))
        self.num_drafts += int(num_drafts.sum())
        longest = -(-int(num_right.max()) // num_passes)
        self.right_at += [0] * (longest - len(self.right_at))
        for place in range(longest):
            self.right_at[place] += int(np.clip(num_right - place * num_passes, 0, num_passes).sum())


class DraftBudget:
    """The drafts that rows may have in the next step.

    Args:
        max_drafts: of one row, each time the model runs.
        fixed_tokens: what a step costs beside its tokens, in tokens.
    """

    def __init__(self, max_num_rows: int, max_drafts: int, fixed_tokens: int) -> None:
        self._max_drafts = max_drafts
        self._fixed_tokens = fixed_tokens
        self._had_some = np.ones(max_num_rows, np.bool_)

    def enter(self, row: int) -> None:
        """Another sequence has the row."""
        self._had_some[row] = True

    def of(self, rows: Array, max_passes: int) -> Array:
        """How many drafts each of these rows may have, which decode in one step. int64[n]. One that had none lately is
        not expected to have some each time."""
        if len(rows) > _MAX_PROBABILITY * (self._fixed_tokens + len(rows)):
            return np.zeros(len(rows), np.int64)
        return self._max_drafts * np.where(self._had_some[rows], max_passes, 1)

    def had_some(self, rows: Array) -> Array:
        """Which of these rows had drafts in their last step, or have none behind them. bool[n]."""
        return self._had_some[rows]

    def answered(self, rows: Array, num_drafts: Array) -> None:
        """So many drafts of these rows were verified."""
        self._had_some[rows] = num_drafts > 0
