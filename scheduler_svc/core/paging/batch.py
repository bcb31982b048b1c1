"""The running batch: its rows, and the steps that are sent to the workers (the paper's sections 4.3 to 4.5)."""

import heapq
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Annotated, Any, Generic, get_type_hints

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.block_tables import BlockTables, HostBlocks
from scheduler_svc.core.paging.sequence import G, GroupQueue, Queues, S, SequenceStatus

Array = NDArray[Any]
Numbers = Annotated[Array, np.int64]
Flags = Annotated[Array, np.bool_]


class RowTable(Generic[S]):
    """Each attribute that is declared `Numbers` or `Flags`, here or in a derived table, is a column: an array of one
    entry per row of the worker. Entries of rows that are not `active` mean nothing."""

    active: Flags  # the row computes; otherwise it is free, or its sequence waits there to be forked
    num_tokens: Numbers  # tokens of the sequence, including the tokens that steps in flight may sample
    num_known: Numbers  # tokens of the sequence, counting only the results that came
    num_computed: Numbers  # tokens whose keys and values are in the pool once all steps in flight are done
    num_slots: Numbers  # slots of the sequence's block table
    max_len: Numbers  # the sequence ends at this many tokens; the last one is never computed
    order: Numbers  # place of the group in queues
    prefills: Flags  # the row still computes, in chunks, the tokens that it entered with; the last chunk samples
    shares_tail: Flags  # the block that the next token goes to may be shared with a sequence that forked
    dependent: Flags  # the worker draws no token: the scheduler chooses it from the step's result, as in beam search
    incarnation: Numbers  # rises whenever the row is released, so that results for its earlier sequences are dropped

    def __init__(self, max_num_rows: int) -> None:
        self.sequences: list[S | None] = [None] * max_num_rows
        self._free = list(range(max_num_rows))
        for name, declared in get_type_hints(type(self), include_extras=True).items():
            setattr(self, name, np.zeros(max_num_rows, declared.__metadata__[0]))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def occupy(self, sequence: S, order: int) -> int:
        """Gives a sequence the lowest free row, which is not active yet. Returns the row."""
        row = heapq.heappop(self._free)
        self.sequences[row] = sequence
        self.max_len[row], self.order[row] = sequence.max_len, order
        self.shares_tail[row], self.dependent[row] = False, sequence.is_dependent
        sequence.row = row
        return row

    def activate(self, row: int, sequence: S, num_slots: int, num_computed: int) -> None:
        """Starts the row's computation. The first `num_computed` tokens of its sequence are computed already."""
        self.active[row] = self.prefills[row] = True
        self.num_tokens[row] = self.num_known[row] = sequence.num_tokens
        self.num_computed[row] = num_computed
        self.num_slots[row] = num_slots

    def fork(self, parent: int, child: int, block_size: int) -> None:
        """Continues the row `child`, which no step in flight samples, after all tokens of the parent."""
        self.active[child] = True
        self.num_tokens[child] = self.num_computed[child] = self.num_tokens[parent]
        self.num_known[child] = self.num_known[parent]
        self.num_slots[child] = self.num_slots[parent]
        self.prefills[child] = False
        self.shares_tail[[parent, child]] = self.num_tokens[parent] % block_size != 0

    def release(self, rows: SequenceOf[int]) -> None:
        """Takes the sequences out of these rows, which are distinct."""
        for row in rows:
            sequence = self.sequences[row]
            assert sequence is not None, f"row {row} is free"
            sequence.row = None
            self.sequences[row] = None
            heapq.heappush(self._free, row)
        if rows:
            self.active[rows] = False
            self.incarnation[rows] += 1

    def decoding(self) -> Array:
        """Rows whose input is their own last sample, int64[n], rising."""
        return (self._can_compute() & ~self.prefills).nonzero()[0]

    def prefilling(self) -> Array:
        """Rows that compute the tokens that they entered with, int64[n]: the row that computes a shared block first."""
        rows = (self._can_compute() & self.prefills).nonzero()[0]
        return rows[np.argsort(self.order[rows], kind="stable")]

    def _can_compute(self) -> Array:
        # A sequence that reaches its end with the steps in flight needs no further step.
        num_tokens = self.num_tokens
        return self.active & (num_tokens < self.max_len) & (self.num_computed < num_tokens)

    def without_slot(self, rows: Array) -> Array:
        """The rows whose next token has no slot in a block yet."""
        return rows[self.num_slots[rows] <= self.num_computed[rows]]

    def num_uncomputed(self, row: int) -> int:
        """Tokens of the row that no planned step computes."""
        return int(self.num_tokens[row] - self.num_computed[row])


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

    def add_chunk(self, row: int, num_new: int, num_computed: int) -> None:
        self._spend(num_new)
        self._chunks.append((row, num_new, num_computed))

    def _spend(self, num_tokens: int) -> None:
        self.budget -= num_tokens
        assert self.budget >= 0, "the step exceeds its token budget"

    def finish(self, step_id: int, host: HostBlocks) -> StepPlan:
        """The step as a value, with the copies between pool and host."""
        swap_out, swap_in = host.take_copies()
        batch = self._rows, np.ones_like(self._rows), self._num_computed
        samples = self._rows.repeat(2).reshape(-1, 2)
        if self._chunks:
            batch = np.concatenate((batch, _array(self._chunks, 3).T), axis=1)
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
            rows=batch[0],
            num_new_tokens=batch[1],
            num_computed_tokens=batch[2],
            samples=samples,
        )


_NOTHING = {width: np.zeros((0, width), dtype=np.int64) for width in (2, 3)}


def _array(entries: SequenceOf[tuple[int, ...]], width: int) -> Array:
    # Most parts of most steps are empty.
    return np.array(entries, dtype=np.int64) if entries else _NOTHING[width]


class Batch(Generic[S, G]):
    """Rows, GPU blocks, and the next step in `draft`. Moves groups between the queues, with all that they hold."""

    def __init__(
        self, blocks: BlockTables[S], rows: RowTable[S], draft: StepDraft, queues: Queues[G], swaps_from: int
    ) -> None:
        """Groups of at least `swaps_from` unfinished sequences are preempted by swap, which keeps what they share."""
        self.blocks, self.rows, self.draft = blocks, rows, draft
        self._waiting, self._swapped, self._running = queues
        self._block_size, self._num_groups = blocks.block_size, blocks.num_groups
        self._token_budget, self._swaps_from = draft.budget, swaps_from

    def sequence(self, row: int) -> S:
        sequence = self.rows.sequences[row]
        assert sequence is not None, f"row {row} holds no sequence"
        return sequence

    def start(self, group: G) -> list[tuple[int, int]]:
        """Gives a waiting group, for which there is room, blocks and rows. Returns as `_enter_all` does."""
        return self._enter_all(group, self._waiting, self.blocks.allocate_slots(group.computing))

    def swap_in(self, group: G) -> None:
        """Gives a swapped group, for which there is room, GPU blocks and rows."""
        entered = self._enter_all(group, self._swapped, self.blocks.swap_in(group.computing))
        for row, num_computed in entered:
            sequence = self.sequence(row)
            self.rows.shares_tail[row] = len(entered) > 1
            # A sequence that lacks only its newest token, and forks no others, continues as a decode.
            self.rows.prefills[row] = not sequence.num_output_tokens or num_computed != sequence.num_tokens - 1

    def _enter_all(self, group: G, queue: GroupQueue[G], starts: SequenceOf[tuple[int, int]]) -> list[tuple[int, int]]:
        """Puts a group of this queue into rows. Returns the rows that compute, and their numbers of cached tokens."""
        self._running.add(queue.remove(group.key))
        entered = [
            (self.enter(sequence, group.order, *start), start[0])
            for sequence, start in zip(group.computing, starts, strict=True)
        ]
        for sequence in (each for each in group.unfinished if each.row is None):
            self.rows.occupy(sequence, group.order)  # it forks from the first one later
        return entered

    def enter(self, sequence: S, order: int, num_computed: int, num_cached_blocks: int) -> int:
        """Puts a sequence that has its blocks, the first of them from the cache, into a row. Returns the row."""
        row = self.rows.occupy(sequence, order)
        num_slots = len(sequence.block_table) // self._num_groups * self._block_size
        self.rows.activate(row, sequence, num_slots, num_computed)
        sequence.status = SequenceStatus.RUNNING
        self.draft.assign[row] = self._assignment(row, sequence)
        return row

    def _assignment(self, row: int, sequence: S) -> RowAssignment:
        return RowAssignment(row, tuple(sequence.token_ids), tuple(sequence.block_table))

    def preempt(self, group: G) -> bool:
        """Takes a running group out of the batch. Returns whether it was swapped; otherwise it is computed again."""
        is_swapped = len(group.unfinished) >= self._swaps_from and self._swap_out(group)
        if not is_swapped:
            self.requeue(group)
        group.preemptions += 1
        return is_swapped

    def requeue(self, group: G) -> None:
        """Recompute: a running group waits again. Its prompt and output so far are then computed as its prompt."""
        self._running.remove(group.key)
        self.release_rows(group.unfinished)
        self.blocks.free(*group.unfinished)
        group.restart()
        self._waiting.add(group)

    def _swap_out(self, group: G) -> bool:
        """Moves a running group's blocks to host memory. Returns whether it could. The newest token is computed again.

        Sequences that are prefilled together do not move, since they read blocks that one of them has yet to compute;
        nor do several sequences if one has no output, since it may find fewer cached blocks than the others later.
        """
        computing = group.computing
        for sequence in computing:
            assert sequence.row is not None
            sequence.num_swapped_tokens = min(int(self.rows.num_computed[sequence.row]), sequence.num_tokens - 1)
        may_move = len(computing) == 1 or all(
            sequence.num_output_tokens and sequence.num_swapped_tokens == sequence.num_tokens - 1
            for sequence in computing
        )
        if not may_move or computing[0].num_swapped_tokens <= 0 or not self.blocks.can_swap_out(computing):
            return False
        self._running.remove(group.key)
        self.release_rows(group.unfinished)
        self.blocks.free(*(sequence for sequence in group.unfinished if sequence not in computing))
        self.blocks.swap_out(computing)
        group.restart()
        for sequence in computing:
            sequence.status = SequenceStatus.SWAPPED
        self._swapped.add(group)
        return True

    def fork(self, parent: S, child: S) -> int:
        """The child, which has a row, shares all blocks of the parent and continues its tokens. Returns its row."""
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
        """Free blocks that all decoding rows take: new ones, and copies of writers of a block but its last holder."""
        rows = self.rows.decoding()
        writers = Counter(self._tail(row)[1] for row in rows[self.rows.shares_tail[rows]].tolist())
        num_copies = sum(min(count, self.blocks.pool.ref_count(block) - 1) for block, count in writers.items())
        return (len(self.rows.without_slot(rows)) + num_copies) * self._num_groups

    def _tail(self, row: int) -> tuple[int, BlockId]:
        """The first entry of the table, and its block, that the row's next token is written to."""
        index = int(self.rows.num_computed[row]) // self._block_size * self._num_groups
        return index, self.sequence(row).block_table[index]

    def add_decodes(self) -> None:
        """Adds every decoding row to the step, with a slot for its next token, whose block must be free."""
        if len(rows := self._give_slots()):
            self.draft.decode(rows, self.rows.num_computed[rows])

    def _give_slots(self) -> Array:
        """Gives every decoding row a slot of its own for its next token. Returns these rows."""
        if not len(rows := self.rows.decoding()):
            return rows
        self._append_blocks(self.rows.without_slot(rows))
        for row in rows[self.rows.shares_tail[rows]].tolist():
            self._copy_on_write(row)
        return rows

    def _append_blocks(self, rows: Array) -> None:
        """Adds blocks of `block_size` tokens to the table of each of these rows, which may repeat; all in one call."""
        entries = rows.repeat(self._num_groups) if self._num_groups > 1 else rows
        for row, block in zip(entries.tolist(), self.blocks.take(len(entries)), strict=True):
            table = self.sequence(row).block_table
            self.draft.blocks[row, len(table)] = block
            table.append(block)
        np.add.at(self.rows.num_slots, rows, self._block_size)

    def _copy_on_write(self, row: int) -> None:
        """Gives a row that is about to write to shared blocks its own copies; the last holder writes in place."""
        first, _ = self._tail(row)
        for index in range(first, first + self._num_groups):
            if (pair := self.blocks.make_writable(self.sequence(row), index)) is not None:
                self.draft.copies.append(pair)
                self.draft.blocks[row, index] = pair[1]
        self.rows.shares_tail[row] = False

    def add_chunk(self, row: int, group: G, size: int | None = None) -> None:
        """Adds the row's uncomputed tokens to the step, up to the budget, or `size` of them. With the last chunk, each
        sequence of the group that waits for it shares its blocks and samples from its logits (the paper's figure 8)."""
        remaining = self.rows.num_uncomputed(row)
        chunk = min(remaining, self.draft.budget) if size is None else size
        self.draft.add_chunk(row, chunk, int(self.rows.num_computed[row]))
        if chunk < remaining:
            return
        self.draft.chunk_samples.append((row, row))
        parent = self.sequence(row)
        for child in () if parent.num_output_tokens else group.unfinished:
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
