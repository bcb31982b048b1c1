"""The scheduler: continuous batching over paged blocks (the paper's sections 4.2, 4.3 and 4.5).

`schedule` plans the next step, `apply` takes in the result of the oldest step in flight. Several steps may be in
flight: planning counts on tokens that are still to come, and a sequence that turns out to have ended costs one wasted
row-step.
"""

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np

from scheduler_svc.core.block import BlockHash, BlockId
from scheduler_svc.core.block_manager import BlockManager, CanAllocate
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import DuplicateKeyError, RefusedError
from scheduler_svc.core.events import EventLog
from scheduler_svc.core.queues import GroupQueue
from scheduler_svc.core.request import ClientId, Request, RequestKey
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.sequence import FinishReason, Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step_draft import StepDraft
from scheduler_svc.core.step_plan import (
    ClientEvents,
    RequestFailure,
    RowAssignment,
    StepInFlight,
    StepPlan,
    StepResult,
)
from scheduler_svc.core.submission import check_queue, check_request


class Scheduler:
    """All requests of one replica, from arrival to end.

    `num_steps` and `num_preemptions` count since the start.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.blocks = BlockManager(config.num_blocks, config.block_size, config.watermark)
        self.rows = RowTable(config.max_num_seqs)
        self.waiting = GroupQueue()
        self.running = GroupQueue()
        self.in_flight: deque[StepInFlight] = deque()
        self.num_steps = 0
        self.num_preemptions = 0
        self._last_step_id = 0
        self._released_rows: list[int] = []
        self._newly_sealed: list[tuple[BlockId, BlockHash]] = []
        self._num_arrivals = 0

    @property
    def max_len(self) -> int:
        """The most tokens that a sequence can have."""
        return self.config.max_len

    @property
    def last_step_id(self) -> int:
        """The newest planned step since the worker was attached; 0 before the first."""
        return self._last_step_id

    @property
    def num_free_blocks(self) -> int:
        return self.blocks.pool.num_free

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Tokens whose keys and values are in the pool once all steps in flight are done."""
        is_running = sequence.status is SequenceStatus.RUNNING and sequence.row is not None
        return int(self.rows.num_computed[sequence.row]) if is_running else 0

    def submit(self, request: Request, now: float) -> None:
        """Puts a request into the queue. Raises a RefusedError (see `errors`) and changes nothing.

        A request with emitted tokens was accepted before, so the queue's bounds do not hold for it.
        """
        if request.key in self.waiting or request.key in self.running:
            raise DuplicateKeyError(f"handle {request.key.handle} already stands for a live request")
        check_request(request, self.config)
        check_queue(request, self.waiting, self.config)
        group = SequenceGroup.of(request, self._num_arrivals, self.config.block_size, now)
        self._num_arrivals += 1
        self.waiting.append(group)

    def abort_sequence(self, key: RequestKey, index: int) -> bool:
        """Ends one sequence of a request, and the request with its last one. Returns whether the request was live."""
        queue = self.waiting if key in self.waiting else self.running
        if key not in queue:
            return False
        group = queue.get(key)
        ending = [sequence for sequence in group.unfinished if sequence.index == index]
        if len(ending) == len(group.unfinished):
            return self.abort(key)
        for sequence in ending:
            self._release(sequence)
            sequence.status = SequenceStatus.FINISHED
        return True

    def abort(self, key: RequestKey) -> bool:
        """Ends a request at once and frees its blocks. Returns whether there was one."""
        if key in self.waiting:
            self.waiting.remove(key)
            return True
        if key in self.running:
            self._stop_running(self.running.remove(key))
            return True
        return False

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step, or returns None when there is nothing to compute until a result or a request comes."""
        draft = StepDraft(self.config.max_num_batched_tokens)
        preempted = self._make_room_for_decodes(draft)
        self._plan_decodes(draft)
        self._plan_prefills(draft)
        if not preempted:
            self._admit(draft, now)
        return None if draft.is_empty else self._commit(draft)

    def apply(self, result: StepResult, now: float) -> dict[ClientId, ClientEvents]:
        """Takes in the result of the oldest step in flight and returns what happened, by client.

        Raises ValueError when the result is not that step's.
        """
        step = self._take_in_flight(result)
        events = EventLog()
        current = self.rows.incarnation[step.rows] == step.incarnations
        self._seal(step, current, result)
        pairs = zip(step.rows[current].tolist(), result.token_ids[current].tolist(), strict=True)
        for row, token_id in pairs:
            sequence = self.rows.sequences[row]
            # Released rows were sorted out above; a group may only end here by a failure of this very step.
            if sequence is None:
                continue
            if row in result.failures:
                self._fail(sequence, result.failures[row], events)
                continue
            sequence.token_ids.append(token_id)
            events.token(sequence, token_id, result.logprobs.get(row))
            reason = sequence.end_reason()
            if reason is not None or sequence.num_output_tokens == 1:
                self._on_milestone(sequence, reason, events, now)
        return events.by_client

    def void_in_flight(self) -> None:
        """Forgets all steps in flight, all computed tokens and all cached blocks, as when a worker was lost.

        Every running group waits again, in order of arrival, before those that waited already.
        """
        self.in_flight.clear()
        while len(self.running):
            self._requeue(self.running.newest())
        self._last_step_id = 0
        self._released_rows.clear()
        self._newly_sealed.clear()
        self.blocks = BlockManager(self.config.num_blocks, self.config.block_size, self.config.watermark)

    def adopt_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        """Takes over the blocks that a worker found final under an earlier scheduler, or before its stream broke. To be
        called before anything runs. Blocks that this pool does not have are passed over."""
        for block, content in sealed:
            if block < self.config.num_blocks:
                self.blocks.pool.adopt(block, content)

    def adopt(self, old: "Scheduler") -> list[RequestFailure]:
        """Takes over the requests of a scheduler whose pool is gone, in order of arrival; nothing of `old` may be in
        flight. Returns those that do not fit any more."""
        failures = []
        self._num_arrivals = old._num_arrivals
        for group in old.waiting:
            try:
                check_request(group.request, self.config)
            except RefusedError as error:
                message = f"the worker came back smaller: {error}"
                failures.append(RequestFailure(group.request.key, "POOL_SHRANK", message))
            else:
                self.waiting.append(group)
        return failures

    def groups(self) -> Iterable[SequenceGroup]:
        """All live requests, running first, each queue in order of arrival."""
        yield from self.running
        yield from self.waiting

    # Planning

    def _make_room_for_decodes(self, draft: StepDraft) -> bool:
        """Gives every decoding row the slot that its next token needs, preempting the newest groups where blocks run
        out. Returns whether it preempted."""
        preempted = False
        while len(growing := self.rows.without_slot(self.rows.decoding())) + self._num_copies() > self.num_free_blocks:
            self._preempt(self.running.newest())
            preempted = True
        for row in growing.tolist():
            sequence = self._sequence(row)
            block = self.blocks.append(sequence)
            draft.block_table_deltas.append((row, len(sequence.block_table) - 1, block))
        self.rows.num_slots[growing] += self.config.block_size
        self._copy_shared_tails(draft)
        return preempted

    def _num_copies(self) -> int:
        """Blocks that the decoding rows copy before they write: all writers of a shared block but its last holder."""
        writers = Counter(self._tail(row)[1] for row in self.rows.sharing_tail().tolist())
        return sum(min(count, self.blocks.pool.ref_count(block) - 1) for block, count in writers.items())

    def _copy_shared_tails(self, draft: StepDraft) -> None:
        """Copy-on-write: who is about to write to a shared block gets a copy; the last holder writes in place."""
        for row in self.rows.sharing_tail().tolist():
            index, _ = self._tail(row)
            pair = self.blocks.make_writable(self._sequence(row), index)
            if pair is not None:
                draft.copies.append(pair)
                draft.block_table_deltas.append((row, index, pair[1]))
            self.rows.shares_tail[row] = False

    def _tail(self, row: int) -> tuple[int, BlockId]:
        """Logical index and block of the slot that the row's next token is written to."""
        index = int(self.rows.num_computed[row]) // self.config.block_size
        return index, self._sequence(row).block_table[index]

    def _plan_decodes(self, draft: StepDraft) -> None:
        rows = self.rows.decoding()
        if len(rows):
            ones = np.ones(len(rows), dtype=np.int64)
            draft.add(rows, ones, self.rows.num_computed[rows], sampling=ones.astype(bool))

    def _plan_prefills(self, draft: StepDraft) -> None:
        for row in self.rows.prefilling().tolist():
            if draft.budget == 0:
                return
            self._plan_chunk(draft, row)

    def _plan_chunk(self, draft: StepDraft, row: int) -> None:
        """As much of the row's uncomputed tokens as the budget has room for. The last chunk samples, for all sequences
        of the group where they start from one prompt."""
        remaining = int(self.rows.num_tokens[row] - self.rows.num_computed[row])
        chunk = min(remaining, draft.budget)
        draft.add(
            np.array([row]),
            np.array([chunk]),
            np.array([self.rows.num_computed[row]]),
            sampling=np.array([chunk == remaining]),
        )
        if chunk == remaining:
            self._fork_samples(draft, row)

    def _fork_samples(self, draft: StepDraft, parent_row: int) -> None:
        """The prompt is computed: every sequence that waits for it shares its blocks and samples from its logits (the
        paper's figure 8)."""
        parent = self._sequence(parent_row)
        for child in self.running.get(parent.request.key).unfinished:
            if child is parent or child.status is not SequenceStatus.WAITING:
                continue
            assert child.row is not None
            self.blocks.fork(parent, child)
            self.rows.fork(parent_row, child.row, self.config.block_size)
            child.status = SequenceStatus.RUNNING
            draft.fork(parent_row, child.row, child.request.sampling_of(child.index).seed)

    def _admit(self, draft: StepDraft, now: float) -> None:
        while len(self.waiting) and draft.budget > 0:
            group = self.waiting.oldest()
            first = group.unfinished[:1] if group.is_one_prompt else group.unfinished
            if len(group.unfinished) > self.rows.num_free:
                return
            if self.blocks.can_allocate(first) is not CanAllocate.OK:
                return
            self.waiting.remove(group.request.key)
            self.running.append(group)
            if group.timeline.started is None:
                group.timeline.started = now
            self._start(group, first, draft)

    def _start(self, group: SequenceGroup, sequences: SequenceOf[Sequence], draft: StepDraft) -> None:
        """Lets these sequences compute. The others of the group keep a row until they fork from the first."""
        for sequence, num_cached in zip(sequences, self.blocks.allocate(sequences), strict=True):
            if group.cached_tokens is None:
                group.cached_tokens = num_cached
            sequence.status = SequenceStatus.RUNNING
            self.rows.assign(sequence, group.arrival, self.config.block_size, num_cached)
            draft.assign.append(row_assignment(sequence))
        for sequence in group.unfinished:
            if sequence.row is None:
                self.rows.park(sequence, group.arrival)
        for sequence in sequences:
            if draft.budget:
                assert sequence.row is not None
                self._plan_chunk(draft, sequence.row)

    def _commit(self, draft: StepDraft) -> StepPlan:
        """Counts the step as done, which it is once its result comes."""
        self._last_step_id += 1
        self.num_steps += 1
        plan = draft.finish(self._last_step_id, self._released_rows, self._newly_sealed)
        self._released_rows, self._newly_sealed = [], []
        self.rows.num_computed[plan.rows] += plan.num_new_tokens
        sampling = plan.samples[:, 0]
        self.rows.num_tokens[sampling] += 1
        self.rows.prefills[sampling] = False
        incarnations, num_computed = self.rows.incarnation[sampling], self.rows.num_computed[sampling]
        self.in_flight.append(StepInFlight(plan.step_id, sampling, incarnations, num_computed))
        return plan

    # Results

    def _take_in_flight(self, result: StepResult) -> StepInFlight:
        if not self.in_flight or self.in_flight[0].step_id != result.step_id:
            expected = self.in_flight[0].step_id if self.in_flight else "none"
            raise ValueError(f"result of step {result.step_id} came, the oldest step in flight is {expected}")
        if len(result.token_ids) != len(self.in_flight[0].rows):
            raise ValueError(
                f"step {result.step_id} sampled {len(self.in_flight[0].rows)} rows, "
                f"its result has {len(result.token_ids)} tokens"
            )
        return self.in_flight.popleft()

    def _seal(self, step: StepInFlight, current: np.ndarray, result: StepResult) -> None:
        """Blocks that are full now can be shared from now on. A row that samples a token has finite keys and values, so
        nothing poisoned is ever sealed."""
        num_full = step.num_computed // self.config.block_size
        for index in np.flatnonzero(current & (num_full > self.rows.num_sealed[step.rows])).tolist():
            row, end = int(step.rows[index]), int(num_full[index])
            sequence = self.rows.sequences[row]
            if sequence is None or row in result.failures:
                continue
            self._newly_sealed += self.blocks.seal(sequence, int(self.rows.num_sealed[row]), end)
            self.rows.num_sealed[row] = end

    def _on_milestone(self, sequence: Sequence, reason: FinishReason | None, events: EventLog, now: float) -> None:
        """The first token of a sequence, or its end."""
        group = self.running.get(sequence.request.key)
        if group.timeline.first_token is None:
            group.timeline.first_token = now
        if reason is None:
            return
        self._release(sequence)
        sequence.status = SequenceStatus.FINISHED
        sequence.finish_reason = reason
        events.sequence_end(sequence, reason)
        if group.finished:
            group.timeline.last_token = now
            self.running.remove(group.request.key)
            events.request_end(group)

    def _fail(self, sequence: Sequence, detail: str, events: EventLog) -> None:
        group = self.running.remove(sequence.request.key)
        self._stop_running(group)
        events.request_failure(group, "NON_FINITE_LOGITS", detail)

    # Leaving the batch

    def _preempt(self, group: SequenceGroup) -> None:
        """Recompute (the paper's section 4.5): prompt and output so far become one prompt."""
        self._requeue(group)
        group.preemptions += 1
        self.num_preemptions += 1

    def _requeue(self, group: SequenceGroup) -> None:
        self.running.remove(group.request.key)
        for sequence in group.unfinished:
            self._release(sequence)
            sequence.status = SequenceStatus.WAITING
        self.waiting.append_first(group)

    def _stop_running(self, group: SequenceGroup) -> None:
        for sequence in group.unfinished:
            self._release(sequence)
            sequence.status = SequenceStatus.FINISHED

    def _release(self, sequence: Sequence) -> None:
        """Frees row and blocks. Steps in flight may still write to them, but every later step runs after those."""
        if sequence.row is not None:
            self._released_rows.append(sequence.row)
            self.rows.release(sequence.row)
        self.blocks.free(sequence)

    def _sequence(self, row: int) -> Sequence:
        sequence = self.rows.sequences[row]
        assert sequence is not None, f"row {row} holds no sequence"
        return sequence


def row_assignment(sequence: Sequence) -> RowAssignment:
    """The sequence as the worker gets it when it enters its row."""
    assert sequence.row is not None
    return RowAssignment(
        sequence.row,
        tuple(sequence.token_ids),
        tuple(sequence.block_table),
        sequence.request.sampling_of(sequence.index),
        len(sequence.request.prompt),
    )
