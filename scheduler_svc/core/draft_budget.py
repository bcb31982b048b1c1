"""The maximum number of drafts of each row, and counts of how many were right."""

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.paging.batch import Array

_MAX_PROBABILITY = 0.9
"""Assumed upper bound of the probability that a draft is right."""


@dataclass(slots=True)
class DraftCounts:
    """Results of drafts so far: samples that had drafts, all their drafts, and the number of right drafts by their
    place after the sample."""

    num_samples: int = 0
    num_drafts: int = 0
    right_at: list[int] = field(default_factory=list[int])

    def add(self, num_right: Array, num_drafts: Array, num_passes: int) -> None:
        """Counts a step's verified drafts, by sample. If the model ran several times in the step, each run counts an
        equal part of the right drafts."""
        self.num_samples += int(np.count_nonzero(num_drafts))
        self.num_drafts += int(num_drafts.sum())
        longest = -(-int(num_right.max()) // num_passes)
        self.right_at += [0] * (longest - len(self.right_at))
        for place in range(longest):
            self.right_at[place] += int(np.clip(num_right - place * num_passes, 0, num_passes).sum())


class DraftBudget:
    """The drafts that rows may have in the next step. The worker drafts tokens and verifies the drafts that pay. They
    need blocks and a share of the step, so the scheduler limits them: a step of n decodes takes as long as f + n
    tokens, where f is the cost of reading the weights. Drafts that are right with a probability below n / (f + n) do
    not pay, and none are allowed if that bound is nearly 1.

    Args:
        max_drafts: maximum drafts of one row, each time the model runs.
        fixed_tokens: fixed cost of a step, without its tokens, as a number of tokens.
    """

    def __init__(self, max_num_rows: int, max_drafts: int, fixed_tokens: int) -> None:
        self._max_drafts = max_drafts
        self._fixed_tokens = fixed_tokens
        self.had_some = np.ones(max_num_rows, np.bool_)
        """Which rows had drafts in their last step, or whose sequence has had no step yet. bool[rows]."""

    def of(self, rows: Array, max_passes: int) -> Array:
        """The number of drafts that each of these rows may have if all decode in one step. int64[n]. A row that had
        none in its last step gets drafts for one run of the model only."""
        if len(rows) > _MAX_PROBABILITY * (self._fixed_tokens + len(rows)):
            return np.zeros(len(rows), np.int64)
        return self._max_drafts * np.where(self.had_some[rows], max_passes, 1)

    def answered(self, rows: Array, num_drafts: Array) -> None:
        """Records the number of verified drafts of each of these rows."""
        self.had_some[rows] = num_drafts > 0
