"""Planning of steps, and their results: continuous batching (the paper's sections 4.3 to 4.5)."""

from collections.abc import Iterator

import numpy as np

from scheduler_svc.core.admission import Obstacle, Stop
from scheduler_svc.core.arrivals import Arrivals
from scheduler_svc.core.paging import scheduler
from scheduler_svc.core.pins import PIN_CLIENT
from scheduler_svc.core.request import ClientId, MovedBlocks
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.results import Results, check_result
from scheduler_svc.core.sequence import Milestone, Sequence, SequenceGroup
from scheduler_svc.core.state import State
from scheduler_svc.core.step import ClientEvents, StepInFlight, StepPlan, StepResult

_MAX_ADMISSIONS = 128
"""Maximum number of groups that one step admits, to bound planning time; the next step continues. Only short or cached
prompts reach it."""

_MAX_BLOCKS_LOOKED_UP = 4096
"""A step looks at no further group after it has looked up this number of blocks: cached blocks of admitted groups, and
blocks that waiting groups may share with running rows. Each lookup may cost a hash."""

_COMPARED_PER_LOOKED_UP = 4
"""To compare the tokens of this number of blocks takes as long as one lookup."""

_MAX_DISPLACED = 128
"""Maximum number of groups that one step displaces: preempts to make room for the next group. That group is admitted
before all others."""


class Planner(scheduler.Planner[Sequence, SequenceGroup]):
    """Decides which groups enter and leave the batch, and builds the next step. Methods are in the order of a step. The
    ones that override the paper's planner fill its `_plan`."""

    def __init__(self, state: State, arrivals: Arrivals) -> None:
        super().__init__(state, state.queues)
        self._state: State = state
        self._arrivals = arrivals
        self._num_blocks_looked_up = 0

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step. Returns None if there is nothing to compute until a result or a request comes. If
        nothing is in flight, the step may have no rows and only tell the workers which blocks were sealed last.

        `_plan` adds swapped groups that return, decodes and chunks of prompts, then `_admit` adds waiting groups. No
        group enters in a step that preempts to free blocks.
        """
        state = self._state
        batch = state.batch
        self._maintain(now)
        if not self._may_plan():
            return None
        self._num_blocks_looked_up = 0
        batch.adapters.entering(None)
        state.pace.planning(now)
        self.advance_queue()
        if state.in_flight and state.pace.beams_should_wait(batch.rows) and not self._can_admit():
            return None
        self._displace(now)
        has_preempted = self._plan(now)
        state.stopped = Stop(Obstacle.PREEMPTION) if has_preempted else self._admit(now)
        state.shares.add_set_aside()
        # Blocks are swapped out before others may take their place.
        if not batch.draft.is_empty or batch.blocks.host.has_copies:
            return self._commit(now)
        if state.in_flight:
            return None
        # Frees all blocks of ended requests: no step waits for that now, and the next call may come late.
        while batch.blocks.reclaim():
            pass
        # A step that only seals: the next step with rows may come late, or never.
        return self._commit(now) if batch.has_seals else None

    def _maintain(self, now: float) -> None:
        """Cleans up before a step is planned: frees blocks of ended requests, ends expired pins and leases, releases
        requests that were held because they never ran, and ends trials that were passed."""
        state = self._state
        blocks = state.batch.blocks
        blocks.reclaim()
        state.batch.free_before_windows()
        self._arrivals.expire_pins(now)
        state.reservations.expire_leases(now)
        self._begin_new(now)
        state.promised.clear()
        if state.in_flight:
            return
        if state.trials.are_on:
            self._requeue_passed(now)
        if state.preparations.suspect_is_next:
            state.preparations.begin_suspect()

    def _begin_new(self, now: float) -> None:
        """Releases requests that are held because they never ran, once the time of `Scheduler.hold_new` is over."""
        state = self._state
        if state.new_wait_until is not None and state.new_wait_until <= now:
            held = list(filter(state.is_held_as_new, state.waiting.held_few(len(state.waiting))))
            state.new_wait_until = None
            for key in (group.request.key for group in held):
                if not (state.batch.underway.is_known(key) or state.preparations.needed_by(key)):
                    state.waiting.release(key)

    def _requeue_passed(self, now: float) -> None:
        """Groups that passed their trial wait until all other suspects were tried."""
        state = self._state
        for group in state.trials.take_passed(state.running, state.queues.is_live):
            group.timeline.record(Milestone.RECOMPUTED, now)
            state.batch.requeue(group)

    def _may_plan(self) -> bool:
        """Whether a step may be planned now, whatever it has to compute."""
        state = self._state
        if state.in_flight and (state.trials.are_on or state.preparations.suspect_is_next):
            # One step at a time on trial: a worker that dies of a step of the suspect dies of the same step again. And
            # a suspect constraint or adapter is prepared only while no step is in flight.
            return False
        return not state.preparations.has_suspect_underway

    def _can_admit(self) -> bool:
        """Whether there is a group that would enter the batch now."""
        group = self.next_group
        return group is not None and self._state.room.fits(group, self._state.room.to_grow())

    def _commit(self, now: float) -> StepPlan:
        """Finishes the step that was built. It is in flight from now on."""
        state = self._state
        state.num_attached_steps += 1
        state.num_steps += 1
        rows = state.batch.rows
        prefills, has_chunks = rows.prefills.copy(), state.batch.draft.has_chunks
        plan = state.batch.commit(step_id=state.num_attached_steps)
        state.policy.charge(plan, prefills, rows.tenant)
        sampling, chunks = plan.samples[:, 0], plan.rows[rows.prefills[plan.rows]]
        step = StepInFlight(
            step_id=plan.step_id,
            rows=sampling,
            incarnations=rows.incarnation[sampling],
            max_drafts=plan.max_drafts,
            chunk_rows=chunks,
            chunk_incarnations=rows.incarnation[chunks],
            chunk_num_computed=rows.num_computed[chunks],
            planned=now,
            has_chunks=has_chunks,
            from_host=plan.swap_in[:, 1],
        )
        state.in_flight.append(step)
        return plan

    # The next group

    def _find_next(self) -> SequenceGroup | None:
        """The next group that may enter the batch; None if there is none. On the way it releases groups whose wait is
        over, holds groups that have to wait, and begins to fetch their blocks."""
        state = self._state
        for key in state.batch.underway.take_released():
            state.waiting.release(key)
        if state.trials.are_on:
            return self._find_suspect()
        while state.waiting.has_next or state.swapped.has_next:
            if self._num_blocks_looked_up >= _MAX_BLOCKS_LOOKED_UP:
                return None
            group = state.policy.next_of(state.waiting, state.swapped)
            key = group.request.key
            queue = state.swapped if key in state.swapped else state.waiting
            if (queue is state.waiting and state.is_held_as_new(group)) or state.preparations.hold(group.request):
                queue.hold(key)
                group.others_went_first |= isinstance(state.preparations.needed_by(key), MovedBlocks)
            elif queue is state.swapped or not self._hold(group):
                return group
        return None

    def _find_suspect(self) -> SequenceGroup | None:
        state = self._state
        if state.swapped.has_next:
            group = state.swapped.first()
        else:
            group = None if state.in_flight else state.trials.next_of(state.waiting, state.running)
        # Does not wait for its constraint: if compiling it kills the worker, the step of this request shows that.
        return None if group is None or state.preparations.hold(group.request, may_compile=True) else group

    def _hold(self, group: SequenceGroup) -> bool:
        """Holds a waiting group if a row is computing enough of the blocks that it needs next, so that it can share
        them. Returns whether it did. Groups behind it pass meanwhile. It never waits for a group behind it."""
        batch = self._state.batch
        if not batch.underway.has_any:
            return False
        batch.name_underway()
        sequence, num_looked_up = group.computing[0], batch.blocks.num_looked_up
        num_cached, hashes = batch.blocks.next_hashes(sequence, batch.underway.min_run)
        row, num_alike = batch.underway.row_of(hashes)
        if row is None or batch.rows.order[row] > group.order:
            return False
        num_known = num_cached + num_alike
        num_blocks = batch.num_in_common(row, sequence, num_known)
        num_looked_up = batch.blocks.num_looked_up - num_looked_up + len(hashes)
        self._num_blocks_looked_up += num_looked_up + (num_blocks - num_known) // _COMPARED_PER_LOOKED_UP
        if batch.underway.is_worth_it(num_blocks - num_cached):
            num_blocks = batch.num_left_behind(row, num_blocks)
        if not batch.underway.is_worth_it(num_blocks - num_cached):
            return False
        batch.underway.hold(group.request.key, row, num_blocks)
        self._state.waiting.hold(group.request.key)
        return True

    # Room for it

    def _displace(self, now: float) -> None:
        """Preempts groups for the next one, if the policy allows it and if that makes enough room."""
        state, group = self._state, self.next_group
        if group is None or group.request.is_offer or state.trials.are_on or not len(state.running):
            return
        lacks_rows = state.room.lacks_rows(group)
        candidates = state.policy.displaced_by(group, state.running, state.batch, lacks_rows=lacks_rows)
        if candidates and not state.room.fits(group, to_grow := state.room.to_grow()):
            for victim in state.room.victims(group, candidates, to_grow)[:_MAX_DISPLACED]:
                self.preempt(victim, now)
            self.advance_queue()

    def _victims(self) -> Iterator[SequenceGroup]:
        return self._state.policy.victims(self._state.running)

    def preempt(self, group: SequenceGroup, now: float) -> None:
        is_swapped = self._state.batch.preempt(group)
        group.timeline.record(Milestone.SWAPPED_OUT if is_swapped else Milestone.RECOMPUTED, now)
        self._state.num_swap_outs += is_swapped
        self._state.num_preemptions += 1

    def _resume(self, group: SequenceGroup, now: float) -> None:
        group.timeline.run(now)
        super()._resume(group, now)

    def _give_way(self) -> bool:
        # Pins end only for a group that runs by itself: it was accepted because it fits once no pin is left.
        state = self._state
        return state.batch.blocks.reclaim() or state.room.give_way(may_end_pins=len(state.running) == 1)

    def _make_way(self, group: SequenceGroup) -> bool:
        return self._state.room.make_way(group, self._state.room.to_grow())

    # The tokens of a step

    def _add_decodes(self) -> None:
        state = self._state
        may_grow = state.config.max_drafts > 0 or state.config.max_passes > 1
        state.batch.add_decodes(with_drafts=may_grow and not state.trials.are_on)
        self._bound_prefills()

    def _bound_prefills(self) -> None:
        """Leaves few tokens of the step to prompts, for which the streams of the step wait, unless more requests wait
        for their prompts than streams run."""
        state = self._state
        draft, rows, limit = state.batch.draft, state.batch.rows, state.config.max_mixed_prefill_tokens
        if limit is None or not draft.num_decodes or draft.budget <= limit:
            return
        if draft.num_decodes >= len(state.waiting) + int((rows.active & rows.prefills).sum()):
            draft.budget = limit

    def _add_prefills(self) -> None:
        self._state.shares.add_prefills()

    def _admit(self, now: float) -> Stop | None:
        """Admits waiting groups until rows, blocks or the token budget run out, or until a swapped group is next: that
        one comes back when the next step is planned. Offers run at another replica, and get a promise of room instead.
        Returns what stopped the admission; None if no group is left."""
        state = self._state
        to_grow: int | None = None
        for num_admitted in range(_MAX_ADMISSIONS):
            if state.batch.draft.budget <= 0:
                return Stop(Obstacle.TOKENS)
            if num_admitted:
                self.advance_queue()
            group = self.next_group
            if group is None and state.trials.are_on:
                return Stop(Obstacle.SUSPECTS)
            if group is None:
                return Stop(Obstacle.NEXT_STEP) if state.waiting.has_next else None
            key = group.request.key
            if key not in state.waiting:
                return Stop(Obstacle.SWAPPED_FIRST, key)
            if to_grow is None:
                to_grow = state.room.to_grow()
            is_offer = group.request.is_offer
            if not state.room.make_way(group, state.room.to_grow_for_long() if is_offer else to_grow):
                return Stop(Obstacle.ROWS if state.room.lacks_rows(group) else Obstacle.BLOCKS, key)
            if is_offer:
                state.room.promise(group)
                state.promised.append(key)
                state.waiting.hold(key)
                continue
            growth = state.room.growth_of(group)
            self._start(group, now)
            # The growth of one sequence is known. Several sequences may share blocks: then all growth is counted again.
            to_grow = to_grow + growth if len(group.unfinished) == 1 else None
        return Stop(Obstacle.NEXT_STEP)

    def _start(self, group: SequenceGroup, now: float) -> None:
        state = self._state
        group.source, group.others_went_first = None, False
        state.reservations.end(Kind.COMING, group.request.key)
        group.timeline.run(now)
        entered = state.batch.start(group)
        self._num_blocks_looked_up += sum(num_cached // state.config.block_size for _, num_cached in entered)
        if group.cached_tokens is None:
            # Output that an earlier scheduler produced may be cached, too.
            group.cached_tokens = min(entered[0][1], len(group.request.prompt))
            state.num_prompt_tokens += len(group.request.prompt)
            state.num_cached_tokens += group.cached_tokens
        for row, _ in entered:
            if state.batch.draft.budget:
                state.shares.add_chunk(row)

    # Results

    def apply(self, result: StepResult, now: float) -> dict[ClientId, ClientEvents]:
        """Applies the result of the oldest step in flight. Returns the events by client.

        Raises ValueError and changes nothing if the result belongs to another step or is invalid. The caller must drop
        the worker then: see `lose_in_flight`.
        """
        state = self._state
        if not state.in_flight or state.in_flight[0].step_id != result.step_id:
            expected = state.in_flight[0].step_id if state.in_flight else "none"
            raise ValueError(f"got the result of step {result.step_id}; the oldest step in flight is {expected}")
        step = state.in_flight[0]
        check_result(step, result, state.batch.rows)
        state.in_flight.popleft()
        state.pace.answered(step, now)
        if result.num_tokens is not None and result.num_drafts is not None and result.num_drafts.any():
            num_right = np.maximum(result.num_tokens - result.num_passes, 0)
            state.draft_counts.add(num_right, result.num_drafts, result.num_passes)
        state.preparations.refused(result.refused)
        sampled = [state.batch.rows.sequences[int(row)] for row in step.rows] if state.trials.are_on else []
        state.trials.answered(each.request.key for each in sampled if each is not None)
        results = Results(state.batch, state.running, now)
        results.apply(step, result)
        if results.further is not None:
            further_rows, counts = results.further
            state.policy.charge_drafts(state.batch.rows.tenant[further_rows], counts)
        for group in results.ended_groups:
            state.trials.forget(group.request.key)
            if group.request.key.client == PIN_CLIENT:
                self._arrivals.complete_pin(group)
        return results.events
