"""The running batch, and the steps that are sent to the workers (the paper's sections 4.3 and 4.4)."""

from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Generic

import numpy as np

from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.block_tables import BlockTables, HostBlocks
from scheduler_svc.core.paging.rows import Array, RowTable
from scheduler_svc.core.paging.sequence import S, SequenceGroup, SequenceStatus


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """A sequence that enters a row: sent whole, once. Later steps send only changes."""

    row: int
    token_ids: SequenceOf[int]
    block_table: SequenceOf[BlockId]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step of all workers. Arrays are int64; `num_new_tokens` and `num_computed_tokens` belong to `rows`."""

    step_id: int
    swap_out: Array  # [o, 2] GPU block, host block: before all else
    swap_in: Array  # [i, 2] host block, GPU block: after swap_out
    copy: Array  # [c, 2] source block, destination block: copy-on-write, after swap_in
    release: Array  # [r] rows that hold nothing any more, before `assign`
    assign: SequenceOf[RowAssignment]
    fork: Array  # [f, 2] parent row, child row: the child gets all that the parent held before this step
    set_tokens: Array  # [t, 3] row, position, token id that was chosen for it there (beam search)
    block_table_deltas: Array  # [d, 3] row, logical index, block id
    rows: Array  # [b] the batch; each row once
    num_new_tokens: Array
    num_computed_tokens: Array
    samples: Array  # [s, 2] row that samples, row of the batch whose last token's logits it samples from


class StepDraft:
    """The next step while it is built: all changes for the worker since the last step, also those between two plans.
    `budget` is the number of further tokens that the batch may have."""

    def __init__(self, token_budget: int) -> None:
        self.budget: int = token_budget
        self.copies: list[tuple[BlockId, BlockId]] = []
        self.assign: dict[int, RowAssignment] = {}
        self.parents: dict[int, int] = {}  # parent by child row
        self.tokens: dict[int, tuple[int, int]] = {}  # position and id of the chosen token, by dependent row
        self.blocks: dict[tuple[int, int], BlockId] = {}  # by row and logical index
        self._release: dict[int, None] = {}
        # Decoding rows and their computed tokens; after them chunks, as (row, new tokens, computed tokens).
        self._rows = self._num_computed = np.zeros(0, dtype=np.int64)
        self._chunks: list[tuple[int, int, int]] = []
        self.chunk_samples: list[tuple[int, int]] = []  # sampling row, row that it samples from

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not (len(self._rows) or self._chunks)

    def release(self, rows: SequenceOf[int]) -> None:
        """The rows hold nothing any more. Drops their earlier changes."""
        for changes in (self.assign, self.parents, self.tokens):
            if changes:
                for row in rows:
                    changes.pop(row, None)
        if self.blocks and rows:
            released = set(rows)
            self.blocks = {place: block for place, block in self.blocks.items() if place[0] not in released}
        self._release.update(dict.fromkeys(rows))

    def decode(self, rows: Array, num_computed: Array) -> None:
        """Adds rows that compute one token each and sample, int64[n]. Called once, before the chunks."""
        assert self.is_empty, "decodes come once, and first"
        self._spend(len(rows))
        self._rows, self._num_computed = rows, num_computed

    def add_chunk(self, row: int, num_new: int, num_computed: int, *, samples: bool) -> None:
        """Adds a chunk of one row, which samples with it if `samples`."""
        self._spend(num_new)
        self._chunks.append((row, num_new, num_computed))
        if samples:
            self.chunk_samples.append((row, row))

    def _spend(self, num_tokens: int) -> None:
        self.budget -= num_tokens
        assert self.budget >= 0, "the step exceeds its token budget"

    def finish(self, step_id: int, host: HostBlocks) -> StepPlan:
        """The step as a value, with the copies between pool and host."""
        swap_out, swap_in = host.take_copies()
        rows, num_computed = self._rows, self._num_computed
        num_new_tokens, samples = np.ones_like(rows), rows.repeat(2).reshape(-1, 2)
        if self._chunks:
            chunks = _array(self._chunks, 3)
            rows = np.concatenate((rows, chunks[:, 0]))
            num_new_tokens = np.concatenate((num_new_tokens, chunks[:, 1]))
            num_computed = np.concatenate((num_computed, chunks[:, 2]))
            samples = np.concatenate((samples, _array(self.chunk_samples, 2)))
        return StepPlan(
            step_id=step_id,
            swap_out=_array(swap_out, 2),
            swap_in=_array(swap_in, 2),
            copy=_array(self.copies, 2),
            release=np.array(list(self._release), dtype=np.int64),
            assign=tuple(self.assign.values()),
            fork=_array([(parent, child) for child, parent in self.parents.items()], 2),
            set_tokens=_array([(row, *chosen) for row, chosen in self.tokens.items()], 3),
            block_table_deltas=_array([(*place, block) for place, block in self.blocks.items()], 3),
            rows=rows,
            num_new_tokens=num_new_tokens,
            num_computed_tokens=num_computed,
            samples=samples,
        )


_NOTHING = {width: np.zeros((0, width), dtype=np.int64) for width in (2, 3)}


def _array(entries: SequenceOf[tuple[int, ...]], width: int) -> Array:
    # Most parts of most steps are empty.
    return np.array(entries, dtype=np.int64) if entries else _NOTHING[width]


class Batch(Generic[S]):
    """Rows, GPU blocks, and the next step in `draft`."""

    def __init__(self, blocks: BlockTables[S], rows: RowTable[S], draft: StepDraft) -> None:
        self.blocks = blocks
        self.rows = rows
        self.draft = draft
        self._block_size, self._token_budget = blocks.block_size, draft.budget

    def sequence(self, row: int) -> S:
        sequence = self.rows.sequences[row]
        assert sequence is not None, f"row {row} holds no sequence"
        return sequence

    def enter(self, sequence: S, order: int, num_computed: int) -> int:
        """Puts a sequence that has its blocks into a row. Returns the row."""
        row = self.rows.occupy(sequence, order)
        self.rows.activate(row, sequence, self._block_size, num_computed)
        sequence.status = SequenceStatus.RUNNING
        self.draft.assign[row] = self._assignment(row, sequence)
        return row

    def _assignment(self, row: int, sequence: S) -> RowAssignment:
        return RowAssignment(row, tuple(sequence.token_ids), tuple(sequence.block_table))

    def fork(self, parent: S, child: S) -> int:
        """The child, which has a row and no blocks, shares all blocks of the parent and continues its tokens. Returns
        the child's row."""
        assert parent.row is not None
        assert child.row is not None
        self.blocks.fork(parent, child)
        self.rows.fork(parent.row, child.row, self._block_size)
        self.draft.parents[child.row] = parent.row
        child.status = SequenceStatus.RUNNING
        return child.row

    def append_chosen(self, sequence: S, token_id: int) -> None:
        """Gives a dependent row the token that was chosen for it."""
        assert sequence.row is not None
        self.draft.tokens[sequence.row] = (sequence.num_tokens, token_id)
        self.rows.num_tokens[sequence.row] += 1
        self.rows.num_known[sequence.row] += 1
        sequence.token_ids.append(token_id)

    def release_rows(self, sequences: SequenceOf[S]) -> None:
        """Frees the sequences' rows. Steps in flight may still write to their blocks; later steps run after them."""
        rows = [sequence.row for sequence in sequences if sequence.row is not None]
        self.draft.release(rows)
        self.rows.release(rows)

    def end(self, sequences: SequenceOf[S]) -> None:
        """The sequences are finished: frees their rows now, and their blocks now or soon."""
        self.release_rows(sequences)
        self.blocks.retire(sequences)
        for sequence in sequences:
            sequence.status = SequenceStatus.FINISHED

    def blocks_for_decodes(self) -> int:
        """Free blocks that the next token of every decoding row takes: new ones, and the copies that all writers of a
        shared block make but its last holder."""
        num_new = len(self.rows.without_slot(self.rows.decoding()))
        if not (sharing := self.rows.sharing_tail().tolist()):
            return num_new
        writers = Counter(self._tail(row)[1] for row in sharing)
        return num_new + sum(min(count, self.blocks.pool.ref_count(block) - 1) for block, count in writers.items())

    def _tail(self, row: int) -> tuple[int, BlockId]:
        """Logical index and block of the slot that the row's next token is written to."""
        index = int(self.rows.num_computed[row]) // self._block_size
        return index, self.sequence(row).block_table[index]

    def add_decodes(self) -> None:
        """Adds every decoding row to the step, with a slot for its next token, whose block must be free."""
        rows = self._give_slots()
        if len(rows):
            self.draft.decode(rows, self.rows.num_computed[rows])

    def _give_slots(self) -> Array:
        """Gives every decoding row a slot of its own for its next token. Returns these rows."""
        rows = self.rows.decoding()
        for row in self.rows.without_slot(rows).tolist():
            self._append_block(row)
        for row in self.rows.sharing_tail().tolist():
            self._copy_on_write(row)
        return rows

    def _append_block(self, row: int) -> None:
        sequence = self.sequence(row)
        block = self.blocks.append_slot(sequence)
        self.draft.blocks[row, len(sequence.block_table) - 1] = block
        self.rows.num_slots[row] += self._block_size

    def _copy_on_write(self, row: int) -> None:
        """Gives a row that is about to write to a shared block its own copy; the last holder writes in place."""
        index, _ = self._tail(row)
        pair = self.blocks.make_writable(self.sequence(row), index)
        if pair is not None:
            self.draft.copies.append(pair)
            self.draft.blocks[row, index] = pair[1]
        self.rows.shares_tail[row] = False

    def add_chunk(self, row: int, group: SequenceGroup[S]) -> None:
        """Adds the row's uncomputed tokens to the step, up to the budget. With the last chunk, each sequence of the
        group that waits for it shares its blocks and samples from its logits (the paper's figure 8)."""
        remaining = self.rows.num_uncomputed(row)
        chunk = min(remaining, self.draft.budget)
        self.draft.add_chunk(row, chunk, int(self.rows.num_computed[row]), samples=chunk == remaining)
        parent = self.sequence(row)
        if chunk < remaining or parent.num_output_tokens:
            return
        for child in group.unfinished:
            if child is not parent and child.status is SequenceStatus.WAITING:
                self.draft.chunk_samples.append((self.fork(parent, child), row))

    def commit(self, step_id: int) -> StepPlan:
        """Finishes the step. Its tokens count as computed from now on, although its result comes later."""
        plan = self.draft.finish(step_id, self.blocks.host)
        self.draft = type(self.draft)(self._token_budget)
        sampling = plan.samples[:, 0]
        self.rows.num_computed[plan.rows] += plan.num_new_tokens
        self.rows.prefills[sampling] = False
        self.rows.num_tokens[sampling] += ~self.rows.dependent[sampling]
        return plan
