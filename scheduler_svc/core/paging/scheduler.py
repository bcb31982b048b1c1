"""Continuous batching: plans steps, applies their results, and preempts by swap or recompute (the paper's section 4.5).

Several steps may be in flight: planning counts tokens that are still to come. `Planner` makes each decision in a method
of its own, so that a subclass may decide otherwise.
"""

import sys
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Generic, Protocol

from scheduler_svc.core.paging.batch import Batch, StepDraft, StepPlan
from scheduler_svc.core.paging.block_tables import BlockTables, SwapSpace
from scheduler_svc.core.paging.rows import Array, RowTable
from scheduler_svc.core.paging.sequence import G, GroupQueue, S, Sequence, SequenceGroup, SequenceStatus

NEVER = sys.maxsize
"""More sequences than any group has."""
Queues = tuple[GroupQueue[G], GroupQueue[G], GroupQueue[G]]


class Placement(Generic[S, G]):
    """Moves groups between the three queues, with the rows and blocks that they need."""

    def __init__(self, batch: Batch[S], swap_space: SwapSpace[S], queues: Queues[G], swaps_from: int) -> None:
        """`queues` has the waiting, the swapped and the running groups. Groups of at least `swaps_from` unfinished
        sequences are preempted by swap, which keeps what these share; others are computed again, which costs little."""
        self.swap_space = swap_space
        self._batch, self._swaps_from = batch, swaps_from
        self._waiting, self._swapped, self._running = queues

    def start(self, group: G, now: float) -> list[int]:
        """Gives a waiting group blocks and rows, and adds its first chunks to the step. There must be room for it.
        Returns the number of cached tokens of each sequence that computes."""
        self._running.add(self._waiting.remove(group.key))
        batch, computing = self._batch, group.computing
        num_cached = batch.blocks.allocate_slots(computing)
        rows = [
            self._enter(sequence, group, count, count // batch.blocks.block_size)
            for sequence, count in zip(computing, num_cached, strict=True)
        ]
        self._park_others(group)
        for row in rows:
            if batch.draft.budget:
                self._add_chunk(row, group)
        return num_cached

    def _enter(self, sequence: S, group: G, num_computed: int, num_cached_blocks: int) -> int:
        return self._batch.enter(sequence, group.order, num_computed)

    def _add_chunk(self, row: int, group: G) -> None:
        self._batch.add_chunk(row, group)

    def swap_in(self, group: G, now: float) -> None:
        """Gives a swapped group GPU blocks and rows. There must be room for it."""
        self._running.add(self._swapped.remove(group.key))
        batch, computing = self._batch, group.computing
        swapped_in = self.swap_space.swap_in(computing)
        for sequence, (num_computed, num_cached_blocks) in zip(computing, swapped_in, strict=True):
            row = self._enter(sequence, group, num_computed, num_cached_blocks)
            batch.rows.shares_tail[row] = len(computing) > 1
            # A sequence that lacks only its newest token, and forks no others, continues as a decode.
            is_decode = sequence.num_output_tokens > 0 and num_computed == sequence.num_tokens - 1
            batch.rows.prefills[row] = not is_decode
        self._park_others(group)

    def preempt(self, group: G, now: float) -> bool:
        """Takes all sequences of a running group out of the batch. Returns whether it was swapped; otherwise it is
        computed again."""
        is_swapped = len(group.unfinished) >= self._swaps_from and self._swap_out(group)
        if not is_swapped:
            self.requeue(group)
        group.preemptions += 1
        return is_swapped

    def requeue(self, group: G) -> None:
        """Recompute: a running group waits again. Its prompt and output so far are then computed as its prompt."""
        self._running.remove(group.key)
        self._batch.release_rows(group.unfinished)
        self._batch.blocks.free(*group.unfinished)
        group.restart()
        self._waiting.add(group)

    def _swap_out(self, group: G) -> bool:
        """Moves a running group's blocks to host memory. Returns whether it could. The newest token is computed again.

        Sequences that are prefilled together do not move, since they read blocks that one of them has yet to compute;
        nor do several sequences if one has no output, since it may find fewer cached blocks than the others later.
        """
        batch, computing = self._batch, group.computing
        for sequence in computing:
            assert sequence.row is not None
            sequence.num_swapped_tokens = min(int(batch.rows.num_computed[sequence.row]), sequence.num_tokens - 1)
        may_move = len(computing) == 1 or all(
            sequence.num_output_tokens and sequence.num_swapped_tokens == sequence.num_tokens - 1
            for sequence in computing
        )
        if not may_move or computing[0].num_swapped_tokens <= 0 or not self.swap_space.can_swap_out(computing):
            return False
        self._running.remove(group.key)
        batch.release_rows(group.unfinished)
        batch.blocks.free(*(sequence for sequence in group.unfinished if sequence not in computing))
        self.swap_space.swap_out(computing)
        group.restart()
        for sequence in computing:
            sequence.status = SequenceStatus.SWAPPED
        self._swapped.add(group)
        return True

    def _park_others(self, group: G) -> None:
        """Gives rows to sequences that fork from the first one later."""
        for sequence in group.unfinished:
            if sequence.row is None:
                self._batch.rows.occupy(sequence, group.order)


class PagedState(Protocol[S, G]):
    """The batch of a planner, which is exchanged when a worker is lost."""

    @property
    def batch(self) -> Batch[S]: ...
    @property
    def placement(self) -> Placement[S, G]: ...


class Planner(Generic[S, G]):
    """Decides which groups enter and leave the batch: first come, first served; the newest is preempted first."""

    def __init__(self, state: PagedState[S, G], queues: Queues[G]) -> None:
        self._state = state
        self._waiting, self._swapped, self._running = queues
        self._front: G | None = None

    def peek(self) -> G | None:
        """The group that enters the batch next, as `advance_queue` found it; None if none may. Changes nothing. A group
        that does not fit blocks all groups behind it, so that it does not starve under a stream of smaller ones."""
        return self._front

    def advance_queue(self) -> None:
        """Finds the group that enters the batch next. Called when a plan begins, and when it has moved groups."""
        self._front = self._find_next()

    def _find_next(self) -> G | None:
        # While anything is swapped, nothing new is admitted.
        queue = self._swapped if self._swapped.has_next else self._waiting
        return queue.first() if queue.has_next else None

    def _plan(self, now: float) -> bool:
        """Builds the next step in the batch's draft. Returns whether it preempted groups to free blocks: then no group
        enters. Every row computes until it has caught up with its tokens: decodes first, one token each, then chunks of
        the tokens that rows entered with, up to the token budget."""
        has_preempted = self._preempt_for_decodes(now)
        if not has_preempted:
            self._swap_in(now)
        self._add_decodes()
        self._add_prefills()
        return has_preempted

    def _preempt_for_decodes(self, now: float) -> bool:
        """Preempts until every decoding row can have a slot for its next token. Returns whether it preempted."""
        batch = self._state.batch
        if batch.blocks_for_decodes() <= batch.blocks.pool.num_free:
            return False
        victims = self._victims()
        has_preempted = False
        while batch.blocks_for_decodes() > batch.blocks.pool.num_free:
            if not self._give_way():
                self.preempt(next(victims), now)
                has_preempted = True
        if not has_preempted:
            # There is more room than before.
            self.advance_queue()
        return has_preempted

    def _victims(self) -> Iterator[G]:
        """The groups to preempt. Each must leave the queue before the next is requested."""
        while self._running.has_next:
            yield self._running.last()

    def _give_way(self) -> bool:
        """Frees blocks that no running group holds, before a group is preempted. Returns whether there were any."""
        return False

    def preempt(self, group: G, now: float) -> None:
        """Takes a running group out of the batch."""
        self._state.placement.preempt(group, now)

    def _swap_in(self, now: float) -> None:
        """Brings swapped groups back until a waiting one is next. They compute with the decodes of this step."""
        while (group := self.peek()) is not None and group.key in self._swapped and self._make_way(group):
            self._state.placement.swap_in(group, now)
            self.advance_queue()

    def _make_way(self, group: G) -> bool:
        """Whether there is room for a group that is next, now that blocks which may give way are free."""
        batch = self._state.batch
        if group.key in self._swapped:
            needed = self._state.placement.swap_space.blocks_needed(group.computing) + batch.blocks_for_decodes()
        else:
            needed = batch.blocks.blocks_to_allocate(group.computing)
        has_rows = len(group.unfinished) <= batch.rows.num_free
        return has_rows and batch.blocks.has_room(needed, reserve=0, alone=not self._running.has_next)

    def _add_decodes(self) -> None:
        self._state.batch.add_decodes()

    def _add_prefills(self) -> None:
        batch = self._state.batch
        for row in batch.rows.prefilling().tolist():
            if batch.draft.budget:
                batch.add_chunk(row, self._running.get(batch.sequence(row).key))


def append_tokens(table: RowTable[S], rows: Array, token_ids: Array, is_due: Array) -> list[S]:
    """Appends one token to the sequence of each row. Returns the sequences that `is_due` names (bool[n]) or that got a
    stop token."""
    due: list[S] = []
    for sequence, token_id, each_is_due in zip(
        table.sequences_in(rows), token_ids.tolist(), is_due.tolist(), strict=True
    ):
        assert sequence is not None
        sequence.token_ids.append(token_id)
        if each_is_due or token_id in sequence.stop_token_ids:
            due.append(sequence)
    return due


def end_sequences(batch: Batch[S], running: GroupQueue[G], ending: SequenceOf[S]) -> list[G]:
    """Ends sequences of running groups, all together, since all rows may end in one step. Returns the groups whose
    sequences have all ended."""
    groups = {each.key: running.get(each.key) for each in ending}
    batch.end(ending)
    return [each for each in groups.values() if len(each.sequences) == 1 or not each.unfinished]


Group = SequenceGroup[Sequence]


class Scheduler(Planner[Sequence, Group]):
    """A whole scheduler, with nothing but this package: parallel samples, and beams whose tokens the caller chooses.

    `swaps_from`: see `Placement`. A group in the queue `waiting` must fit into the pool by itself.
    """

    def __init__(self, blocks: BlockTables[Sequence], max_num_seqs: int, token_budget: int, swaps_from: int) -> None:
        self.batch = Batch(blocks, RowTable[Sequence](max_num_seqs), StepDraft(token_budget))
        queues = GroupQueue[Group](), GroupQueue[Group](), GroupQueue[Group]()
        self.waiting = queues[0]
        self.placement = Placement(self.batch, SwapSpace(blocks), queues, swaps_from)
        self.in_flight = deque[tuple[StepPlan, Array]]()  # with the incarnations of the rows that sample
        self._num_steps = 0
        super().__init__(self, queues)

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Plans the next step; None if there is nothing to compute until a result or a request comes."""
        self.advance_queue()
        if not self._plan(now):
            self._admit(now)
        if self.batch.draft.is_empty and not self.batch.blocks.host.has_copies:
            return None
        self._num_steps += 1
        plan = self.batch.commit(self._num_steps)
        self.in_flight.append((plan, self.batch.rows.incarnation[plan.samples[:, 0]]))
        return plan

    def _admit(self, now: float) -> None:
        while (group := self.peek()) is not None and group.key in self.waiting:
            if self.batch.draft.budget <= 0 or not self._make_way(group):
                return
            self.placement.start(group, now)
            self.advance_queue()

    def apply(self, step_id: int, token_ids: Array) -> list[Group]:
        """Applies the oldest step's result: int64[samples], in the order of `StepPlan.samples`. Tokens of `dependent`
        rows mean nothing. Returns the groups that ended."""
        plan, incarnations = self.in_flight.popleft()
        assert plan.step_id == step_id, "results come in the order of the steps"
        table, rows = self.batch.rows, plan.samples[:, 0]
        # A row that was released since has another sequence, or none.
        drawn = (table.incarnation[rows] == incarnations) & ~table.dependent[rows]
        rows = rows[drawn]
        table.num_known[rows] += 1
        due = append_tokens(table, rows, token_ids[drawn], table.num_known[rows] >= table.max_len[rows])
        ended = end_sequences(self.batch, self._running, due)
        for group in ended:
            self._running.remove(group.key)
        return ended
