"""A step while it is being planned."""

import numpy as np

from scheduler_svc.core.block import BlockHash, BlockId
from scheduler_svc.core.step_plan import RowAssignment, StepPlan


class StepDraft:
    """Collects the rows of one step under its token budget."""

    def __init__(self, token_budget: int) -> None:
        self.budget = token_budget
        self.copies: list[tuple[BlockId, BlockId]] = []
        self.assign: list[RowAssignment] = []
        self.block_table_deltas: list[tuple[int, int, int]] = []
        self._forks: list[tuple[int, int]] = []
        self._reseed: list[tuple[int, int]] = []
        self._rows: list[np.ndarray] = []
        self._num_new_tokens: list[np.ndarray] = []
        self._num_computed: list[np.ndarray] = []
        self._samples: list[np.ndarray] = []

    @property
    def is_empty(self) -> bool:
        return not self._rows

    def add(self, rows: np.ndarray, num_new: np.ndarray, num_computed: np.ndarray, sampling: np.ndarray) -> None:
        """Adds rows to the batch; `sampling` says which of them sample. All arrays have the length of `rows`."""
        self.budget -= int(num_new.sum())
        assert self.budget >= 0, "the step exceeds its token budget"
        self._rows.append(rows)
        self._num_new_tokens.append(num_new)
        self._num_computed.append(num_computed)
        self._samples.append(np.stack((rows[sampling], rows[sampling]), axis=1))

    def fork(self, parent: int, child: int, seed: int) -> None:
        """Lets the child's row start as a copy of the parent's and sample from its logits, by a seed of its own."""
        self._forks.append((parent, child))
        self._reseed.append((child, seed))
        self._samples.append(np.array([[child, parent]]))

    def finish(self, step_id: int, release: list[int], sealed: list[tuple[BlockId, BlockHash]]) -> StepPlan:
        """The step as a value. The draft must not be empty."""
        return StepPlan(
            step_id=step_id,
            copies=np.array(self.copies, dtype=np.int64).reshape(-1, 2),
            release=np.array(release, dtype=np.int64),
            assign=tuple(self.assign),
            forks=np.array(self._forks, dtype=np.int64).reshape(-1, 2),
            reseed=tuple(self._reseed),
            block_table_deltas=np.array(self.block_table_deltas, dtype=np.int64).reshape(-1, 3),
            rows=np.concatenate(self._rows),
            num_new_tokens=np.concatenate(self._num_new_tokens),
            num_computed_tokens=np.concatenate(self._num_computed),
            samples=np.concatenate(self._samples),
            sealed=tuple(sealed),
        )
