"""Continuous batching: plans steps, applies their results, and preempts by swap or recompute (the paper's section 4.5).

Several steps may be in flight: planning counts tokens that are still to come. `Planner` makes each decision in a method
of its own, so that a subclass may decide otherwise."""

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from typing import Generic, Protocol

from scheduler_svc.core.paging.batch import Array, Batch, RowTable, StepDraft, StepPlan
from scheduler_svc.core.paging.block_tables import BlockTables
from scheduler_svc.core.paging.sequence import G, GroupQueue, Queues, S, Sequence, SequenceGroup


class BatchOwner(Protocol[S, G]):
    """Has the batch of a planner. It is exchanged when a worker is lost."""

    @property
    def batch(self) -> Batch[S, G]: ...


class Planner(Generic[S, G]):
    """Decides which groups enter and leave the batch: first come, first served; the newest is preempted first."""

    def __init__(self, state: BatchOwner[S, G], queues: Queues[G]) -> None:
        self._state = state
        self.waiting, self.swapped, self.running = queues
        self.next_group: G | None = None
        """The group that enters the batch next, None if none may. If it does not fit, the groups behind it wait."""

    def advance_queue(self) -> None:
        """Finds `next_group`. Called when a plan begins, and when it has moved groups."""
        self.next_group = self._find_next()

    def _find_next(self) -> G | None:
        # While anything is swapped, nothing new is admitted.
        queue = self.swapped if self.swapped.has_next else self.waiting
        return queue.first() if queue.has_next else None

    def _plan(self, now: float) -> bool:
        """Builds the next step: decodes, one token each, then chunks of the tokens that rows entered with, up to the
        token budget. Returns whether it preempted groups to free blocks: then no group enters."""
        if not (has_preempted := self._preempt_for_decodes(now)):
            self._resume_swapped(now)
        self._add_decodes()
        self._add_prefills()
        return has_preempted

    def _preempt_for_decodes(self, now: float) -> bool:
        """Preempts until every decoding row can have a slot for its next token. Returns whether it preempted."""
        batch = self._state.batch
        if batch.blocks_for_decodes() <= batch.blocks.pool.num_free:
            return False
        victims, has_preempted = self._victims(), False
        while batch.blocks_for_decodes() > batch.blocks.pool.num_free:
            if not self._give_way():
                self.preempt(next(victims), now)
                has_preempted = True
        if not has_preempted:
            self.advance_queue()  # there is more room than before
        return has_preempted

    def _victims(self) -> Iterator[G]:
        """The groups to preempt. Each must leave the queue before the next is requested."""
        while self.running.has_next:
            yield self.running.last()

    def _give_way(self) -> bool:
        """Frees blocks that no running group holds, before a group is preempted. Returns whether there were any."""
        return False

    def preempt(self, group: G, now: float) -> None:
        """Takes a running group out of the batch."""
        self._state.batch.preempt(group)

    def _resume_swapped(self, now: float) -> None:
        """Brings swapped groups back until a waiting one is next. They compute with the decodes of this step."""
        while (group := self.next_group) is not None and group.key in self.swapped and self._make_way(group):
            self._resume(group, now)
            self.advance_queue()

    def _resume(self, group: G, now: float) -> None:
        self._state.batch.swap_in(group)

    def _make_way(self, group: G) -> bool:
        """Whether there is room for a group that is next, now that blocks which may give way are free."""
        batch, blocks = self._state.batch, self._state.batch.blocks
        if group.key in self.swapped:
            needed = blocks.blocks_to_swap_in(group.computing) + batch.blocks_for_decodes()
        else:
            needed = blocks.blocks_to_allocate(group.computing)
        has_rows = len(group.unfinished) <= batch.rows.num_free
        return has_rows and blocks.has_room(needed, reserve=0, others_run=self.running.has_next)

    def _add_decodes(self) -> None:
        self._state.batch.add_decodes()

    def _add_prefills(self) -> None:
        batch = self._state.batch
        for row in batch.rows.prefilling().tolist():
            if batch.draft.budget:
                batch.add_chunk(row, self.running.get(batch.sequence(row).key))


def append_tokens(table: RowTable[S], rows: Array, token_ids: Array, is_due: Array) -> list[S]:
    """Appends one token to the sequence of each row. Returns sequences that are due, bool[n], or got a stop token."""
    due: list[S] = []
    sequences: list[S | None] = [table.sequences[row] for row in rows.tolist()]
    for sequence, token_id, each_is_due in zip(sequences, token_ids.tolist(), is_due.tolist(), strict=True):
        assert sequence is not None
        sequence.token_ids.append(token_id)
        if each_is_due or token_id in sequence.stop_token_ids:
            due.append(sequence)
    return due


def end_sequences(batch: Batch[S, G], running: GroupQueue[G], ending: SequenceOf[S]) -> list[G]:
    """Ends sequences of running groups together. Returns the groups whose sequences have all ended."""
    groups = {each.key: running.get(each.key) for each in ending}
    batch.end(ending)
    return [each for each in groups.values() if len(each.sequences) == 1 or not each.unfinished]


Group = SequenceGroup[Sequence]


class Scheduler(Planner[Sequence, Group]):
    """A whole scheduler, with nothing but this package: parallel samples, and beams whose tokens the caller chooses.

    `swaps_from`: see `Batch`. A group in the queue `waiting` must fit into the pool by itself.
    """

    def __init__(self, blocks: BlockTables[Sequence], max_num_seqs: int, token_budget: int, swaps_from: int) -> None:
        queues = GroupQueue[Group](), GroupQueue[Group](), GroupQueue[Group]()
        self.batch = Batch(blocks, RowTable[Sequence](max_num_seqs), StepDraft(token_budget), queues, swaps_from)
        self.in_flight = deque[tuple[StepPlan, Array]]()  # with the incarnations of the rows that sample
        self._num_steps = 0
        super().__init__(self, queues)

    def schedule(self, now: float = 0.0) -> StepPlan | None:
        """Plans the next step; None if there is nothing to compute until a result or a request comes."""
        self.advance_queue()
        if not self._plan(now):
            self._admit()
        if self.batch.draft.is_empty and not self.batch.blocks.host.has_copies:
            return None
        self._num_steps += 1
        plan = self.batch.commit(self._num_steps)
        self.in_flight.append((plan, self.batch.rows.incarnation[plan.samples[:, 0]]))
        return plan

    def _admit(self) -> None:
        while (group := self.next_group) is not None and group.key in self.waiting:
            if self.batch.draft.budget <= 0 or not self._make_way(group):
                return
            for row, _ in self.batch.start(group):
                if self.batch.draft.budget:
                    self.batch.add_chunk(row, group)
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
        ended = end_sequences(self.batch, self.running, due)
        for group in ended:
            self.running.remove(group.key)
        return ended
