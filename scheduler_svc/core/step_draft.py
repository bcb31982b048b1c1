"""The next step while it is being put together."""

from collections.abc import Sequence as SequenceOf

import numpy as np

from scheduler_svc.core.block import BlockHash, BlockId
from scheduler_svc.core.step_plan import RowAssignment, StepPlan


class StepDraft:
    """All that the worker has to be told, from one step's plan to the next.

    What happens between two plans (rows released, beams forked, blocks swapped out) is kept here too, so nothing is
    forgotten when there is nothing to compute. `budget` is how many tokens more the batch may have, without those that
    are set aside.
    """

    def __init__(self, token_budget: int) -> None:
        self.budget = token_budget
        self.aside: list[tuple[int, int]] = []
        """Rows whose chunk is planned last, and how much of the budget is theirs then at the least."""
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
        # Rows that decode and how many of their tokens are computed, as arrays; after them chunks of single rows, as
        # (row, new tokens, computed tokens).
        self._rows = self._num_computed = np.zeros(0, dtype=np.int64)
        self._chunks: list[tuple[int, int, int]] = []
        self._chunk_samples: list[tuple[int, int]] = []

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (len(self._rows) or self._chunks)

    def release(self, rows: SequenceOf[int]) -> None:
        """The rows hold nothing any more; what was to be said of them before is void."""
        for changes in (self._assign, self._parent_of, self._seeds, self._tokens):
            if changes:
                for row in rows:
                    changes.pop(row, None)
        if self._blocks and rows:
            gone = set(rows)
            self._blocks = {place: block for place, block in self._blocks.items() if place[0] not in gone}
        self._release.update(dict.fromkeys(rows))

    def set_aside(self, row: int, num_tokens: int) -> None:
        """Keeps a part of the budget for a row whose chunk is planned last."""
        assert 0 <= num_tokens <= self.budget
        self.budget -= num_tokens
        self.aside.append((row, num_tokens))

    def take_aside(self) -> list[tuple[int, int]]:
        """What was set aside, in order; the budget does not have it back yet."""
        aside, self.aside = self.aside, []
        return aside

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

    def decode(self, rows: np.ndarray, num_computed: np.ndarray) -> None:
        """Adds rows that compute one token each, and sample. int64[n] each. To be called once, before chunks."""
        assert self.is_empty, "decodes come once, and first"
        self._spend(len(rows))
        self._rows, self._num_computed = rows, num_computed

    def add_chunk(self, row: int, num_new: int, num_computed: int, *, samples: bool) -> None:
        """Adds a chunk of one row, with which it samples or does not."""
        self._spend(num_new)
        self._chunks.append((row, num_new, num_computed))
        if samples:
            self._chunk_samples.append((row, row))

    def sample_from(self, parent: int, child: int) -> None:
        """Lets the child's row sample from the logits of the parent's."""
        self._chunk_samples.append((child, parent))

    def _spend(self, num_tokens: int) -> None:
        self.budget -= num_tokens
        assert self.budget >= 0, "the step exceeds its token budget"

    def finish(self, step_id: int) -> StepPlan:
        """The step as a value. The draft must not be empty."""
        forks = [(parent, child) for child, parent in self._parent_of.items()]
        deltas = [(row, index, block) for (row, index), block in self._blocks.items()]
        rows, num_computed = self._rows, self._num_computed
        num_new_tokens, samples = np.ones_like(rows), np.stack((rows, rows), axis=1)
        if self._chunks:
            chunks = _array(self._chunks, 3)
            rows = np.concatenate((rows, chunks[:, 0]))
            num_new_tokens = np.concatenate((num_new_tokens, chunks[:, 1]))
            num_computed = np.concatenate((num_computed, chunks[:, 2]))
            samples = np.concatenate((samples, _array(self._chunk_samples, 2)))
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
            rows=rows,
            num_new_tokens=num_new_tokens,
            num_computed_tokens=num_computed,
            samples=samples,
            sealed=tuple(self.sealed),
        )


def _array(entries: SequenceOf[tuple[int, ...]], width: int) -> np.ndarray:
    return np.array(entries, dtype=np.int64).reshape(-1, width)
