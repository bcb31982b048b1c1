"""How many drafts rows may have: as many as pay.

A step of n decodes takes as long as f + n tokens, where f is what reading the weights costs; the worker measures it. A
further token then makes a step longer by 1 / (f + n), and the n tokens that it brings later with it. So a draft pays if
it is right with a probability of at least n / (f + n): nearly any for one stream whose step reads all weights, and none
where steps are full.

The k-th draft of a row is right if all before it are, with the probability p ** k, where p is the share of its drafts
that were right lately. What a row showed is forgotten step by step, so that drafts that did not pay are tried again.
"""

from dataclasses import dataclass, field

import numpy as np

from scheduler_svc.core.step import Array

_PRIOR_RIGHT, _PRIOR_WRONG = 1.5, 1.0
"""What a row counts for before its first drafts. Drafters have none for most tokens that are hard to guess."""
_KEPT = 0.97
"""Of what a row showed, after a step."""


@dataclass(slots=True)
class DraftCounts:
    """What came of drafts so far: samples that had some, all their drafts, and how many of these were right, by their
    place behind the sample."""

    num_samples: int = 0
    num_drafts: int = 0
    right_at: list[int] = field(default_factory=list[int])

    def add(self, num_right: Array, num_drafts: Array) -> None:
        """A step verified so many drafts of its samples. Of a step in which the model ran several times, the right ones
        count as if they had followed each other."""
        self.num_samples += int(np.count_nonzero(num_drafts))
        self.num_drafts += int(num_drafts.sum())
        longest = int(num_right.max())
        self.right_at += [0] * (longest - len(self.right_at))
        for place in range(longest):
            self.right_at[place] += int(np.count_nonzero(num_right > place))


class DraftBudget:
    """The drafts that rows may have in the next step.

    Args:
        max_drafts: of one row.
        fixed_tokens: what a step costs beside its tokens, in tokens.
    """

    def __init__(self, max_num_rows: int, max_drafts: int, fixed_tokens: int) -> None:
        self._max_drafts = max_drafts
        self._fixed_tokens = fixed_tokens
        self._right, self._wrong = np.zeros((2, max_num_rows))

    def enter(self, row: int) -> None:
        """Another sequence has the row."""
        self._right[row] = self._wrong[row] = 0.0

    def of(self, rows: Array) -> Array:
        """How many drafts pay for each of these rows, which decode in one step. int64[n]."""
        self._right[rows] *= _KEPT
        self._wrong[rows] *= _KEPT
        right, wrong = self._right[rows] + _PRIOR_RIGHT, self._wrong[rows] + _PRIOR_WRONG
        pays = len(rows) / (self._fixed_tokens + len(rows))
        return np.minimum(np.log(pays) / np.log(right / (right + wrong)), self._max_drafts).astype(np.int64)

    def answered(self, rows: Array, num_right: Array, num_drafts: Array) -> None:
        """So many drafts of these rows were verified, and so many of them were right."""
        self._right[rows] += num_right
        self._wrong[rows] += num_right < num_drafts
