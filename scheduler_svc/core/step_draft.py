"""The next step while it is being put together."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from scheduler_svc.core.block import BlockHash, BlockId
from scheduler_svc.core.step_plan import RowAssignment, StepPlan


class StepDraft:
    """All that the worker has to be told, from one step's plan to the next.

    What happens between two plans (rows released, beams forked, blocks swapped out) is kept here too, so nothing is
    forgotten when there is nothing to compute. `budget` is how many tokens more the batch may have.
    """

    def __init__(self, token_budget: int) -> None:
        self.budget = token_budget
        self.copies: list[tuple[BlockId, BlockId]] = []
        self.swap_in: list[tuple[BlockId, BlockId]] = []
        self.sealed: list[tuple[BlockId, BlockHash]] = []
        self._swap_out: dict[BlockId, BlockId] = {}
        self._release: dict[int, None] = {}
        self._assign: dict[int, RowAssignment] = {}
        self._parent_of: dict[int, int] = {}
        self._seeds: dict[int, int] = {}
        self._tokens: dict[int, tuple[int, int]] = {}
        self._blocks: dict[tuple[int, int], BlockId] = {}
        self._rows: list[np.ndarray] = []
        self._num_new_tokens: list[np.ndarray] = []
        self._num_computed: list[np.ndarray] = []
        self._samples: list[np.ndarray] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self._rows

    def release(self, row: int) -> None:
        """The row holds nothing any more; what was to be said of it before is void."""
        for changes in (self._assign, self._parent_of, self._seeds, self._tokens):
            changes.pop(row, None)
        self._blocks = {place: block for place, block in self._blocks.items() if place[0] != row}
        self._release[row] = None

    def assign(self, assignment: RowAssignment) -> None:
        self._assign[assignment.row] = assignment

    def fork(self, parent: int, child: int) -> None:
        """Lets the child's row start as a copy of the parent's, as it was before this step."""
        self._parent_of[child] = parent

    def reseed(self, row: int, seed: int) -> None:
        self._seeds[row] = seed

    def append_token(self, row: int, position: int, token_id: int) -> None:
        """Gives a dependent row the token that was chosen for it."""
        self._tokens[row] = (position, token_id)

    def set_block(self, row: int, index: int, block: BlockId) -> None:
        self._blocks[row, index] = block

    def swap_out(self, pairs: list[tuple[BlockId, BlockId]]) -> None:
        """Pairs (GPU block, host block). A host block that was given back since, before any plan, goes to another."""
        self._swap_out.update((host, gpu) for gpu, host in pairs)

    def add(self, rows: np.ndarray, num_new: np.ndarray, num_computed: np.ndarray, sampling: np.ndarray) -> None:
        """Adds rows to the batch; `sampling` says which of them sample. All arrays have the length of `rows`."""
        self.budget -= int(num_new.sum())
        assert self.budget >= 0, "the step exceeds its token budget"
        self._rows.append(rows)
        self._num_new_tokens.append(num_new)
        self._num_computed.append(num_computed)
        self._samples.append(np.stack((rows[sampling], rows[sampling]), axis=1))

    def sample_from(self, parent: int, child: int) -> None:
        """Lets the child's row sample from the logits of the parent's."""
        self._samples.append(np.array([[child, parent]]))

    def finish(self, step_id: int) -> StepPlan:
        """The step as a value. The draft must not be empty."""
        forks = [(parent, child) for child, parent in self._parent_of.items()]
        deltas = [(row, index, block) for (row, index), block in self._blocks.items()]
        return StepPlan(
            step_id=step_id,
            swap_out=_array([(gpu, host) for host, gpu in self._swap_out.items()], 2),
            swap_in=_array(self.swap_in, 2),
            copies=_array(self.copies, 2),
            release=np.array(list(self._release), dtype=np.int64),
            assign=tuple(self._assign.values()),
            forks=_array(forks, 2),
            reseed=tuple(self._seeds.items()),
            set_tokens=_array([(row, *chosen) for row, chosen in self._tokens.items()], 3),
            block_table_deltas=_array(deltas, 3),
            rows=np.concatenate(self._rows),
            num_new_tokens=np.concatenate(self._num_new_tokens),
            num_computed_tokens=np.concatenate(self._num_computed),
            samples=np.concatenate(self._samples),
            sealed=tuple(self.sealed),
        )


def _array(entries: SequenceOf[tuple[int, ...]], width: int) -> np.ndarray:
    return np.array(entries, dtype=np.int64).reshape(-1, width)
