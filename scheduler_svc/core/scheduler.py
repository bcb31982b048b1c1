"""The scheduler: continuous batching over paged blocks (the paper's sections 4.2 to 4.5).

`schedule` plans the next step, `apply` takes in the result of the oldest step in flight. Several steps may be in
flight: planning counts on tokens that are still to come, and a sequence that turns out to have ended costs one wasted
row-step. Only rows whose next token the scheduler chooses itself (beam search) wait for their result.

Who enters the batch is in `admission`, who leaves it under pressure in `preemption`, what it computes in `planning`,
what comes of it in `results`, and what follows when a worker refuses it, or is lost, in `trials`; they work on one
`state`.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress

from scheduler_svc.core.admission import Admission
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.block import BlockHash, BlockId
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.errors import DuplicateKeyError, RefusedError
from scheduler_svc.core.events import EventLog
from scheduler_svc.core.pins import PIN_CLIENT, Pin, Pins
from scheduler_svc.core.planning import plan_decodes, plan_prefills, plan_shares
from scheduler_svc.core.policy import Policy
from scheduler_svc.core.preemption import Preemption
from scheduler_svc.core.queues import GroupQueue
from scheduler_svc.core.request import ClientId, Request, RequestKey
from scheduler_svc.core.results import Results, check_result
from scheduler_svc.core.rows import RowTable
from scheduler_svc.core.sequence import Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.state import SchedulerState
from scheduler_svc.core.step_plan import ClientEvents, RequestFailure, StepInFlight, StepPlan, StepResult
from scheduler_svc.core.submission import check_queue, check_request
from scheduler_svc.core.swap import SwapSpace
from scheduler_svc.core.trials import Trials
from scheduler_svc.core.underway import BlocksUnderway


class Scheduler:
    """All requests of one replica, from arrival to end. `num_steps` counts since the start."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.num_steps = 0
        self._state = SchedulerState(config)
        self._preemption = Preemption(self._state)
        self._trials = Trials(self._state)
        self._admission = Admission(self._state, self._preemption, self._trials)
        self._last_step_id = 0
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
    def num_preemptions(self) -> int:
        return self._preemption.num_preemptions

    @property
    def num_swap_outs(self) -> int:
        """How many of the preemptions moved blocks to host memory."""
        return self._preemption.num_swap_outs

    @property
    def blocks(self) -> BlockManager:
        return self._state.batch.blocks

    @property
    def underway(self) -> BlocksUnderway:
        return self._state.batch.underway

    @property
    def rows(self) -> RowTable:
        return self._state.batch.rows

    @property
    def swap_space(self) -> SwapSpace:
        return self._state.swap_space

    @property
    def policy(self) -> Policy:
        return self._state.policy

    @property
    def pins(self) -> Pins:
        return self._state.pins

    @property
    def trials(self) -> Trials:
        return self._trials

    @property
    def waiting(self) -> GroupQueue:
        return self._state.waiting

    @property
    def swapped(self) -> GroupQueue:
        return self._state.swapped

    @property
    def running(self) -> GroupQueue:
        return self._state.running

    @property
    def in_flight(self) -> deque[StepInFlight]:
        return self._state.in_flight

    def groups(self) -> Iterator[SequenceGroup]:
        """All live requests: those that run, then swapped ones, then those that wait."""
        return self._state.groups()

    def group(self, key: RequestKey) -> SequenceGroup | None:
        """A live request; None where it is not known (any more)."""
        queue = self._state.queue_of(key)
        return None if queue is None else queue.get(key)

    @property
    def num_live(self) -> int:
        """Requests that are not over."""
        return len(self.running) + len(self.swapped) + len(self.waiting)

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Tokens whose keys and values are in a pool once all steps in flight are done."""
        match sequence.status:
            case SequenceStatus.RUNNING:
                assert sequence.row is not None
                return int(self.rows.num_computed[sequence.row])
            case SequenceStatus.SWAPPED:
                return sequence.num_swapped_tokens
            case _:
                return 0

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Puts a request into the queue. Raises a RefusedError (see `errors`) and changes nothing.

        The queue's bounds do not hold for a request that was accepted before.
        """
        if self._state.queue_of(request.key) is not None:
            raise DuplicateKeyError(f"handle {request.key.handle} already stands for a live request")
        check_request(request, self.config)
        check_queue(request, self.waiting, self.config)
        rank = self._state.policy.rank(request, self._num_arrivals)
        self._num_arrivals += 1
        group = SequenceGroup.of(request, rank, self.config.block_size, now)
        self.blocks.num_cached(group.unfinished[0])
        self._wait(group)

    def abort_sequence(self, key: RequestKey, index: int) -> bool:
        """Ends one sequence of a request, and the request with its last one. Returns whether the request was live.

        Where sequences are selected at the end, none is anybody's before, and nothing happens.
        """
        queue = self._state.queue_of(key)
        if queue is None:
            return False
        group = queue.get(key)
        ending = [sequence for sequence in group.unfinished if sequence.index == index and not group.request.selects]
        if len(ending) == len(group.unfinished):
            return self.abort(key)
        if any(sequence.row is not None and self.rows.is_prefilling(sequence.row) for sequence in ending):
            # The others may count on blocks that it has yet to compute: their start, or all of a prompt.
            self._state.requeue(group)
        self._state.end(ending)
        return True

    def abort(self, key: RequestKey) -> bool:
        """Ends a request at once and frees its blocks. Returns whether there was one."""
        self._trials.ended(key)
        return self._state.end_group(key) is not None

    def preempt(self, key: RequestKey, now: float) -> bool:
        """Takes a running request out of the batch; it comes back by itself. Returns whether it ran."""
        if key not in self.running:
            return False
        self._preemption.preempt(self.running.get(key), now)
        return True

    # Pins

    def pin(self, tenant: str, token_ids: list[int], now: float, time_to_live: float) -> Pin:
        """Keeps the whole blocks of a prefix from being evicted until the time (seconds) is over.

        The pin holds its blocks at once where all are cached. Otherwise a request of PIN_CLIENT computes them, whose
        end or failure is told by the events of that client. Pinning a prefix again starts its time anew. Raises a
        RefusedError and changes nothing.
        """
        pins = self._state.pins
        known = len(pins)
        pin = pins.add(tenant, token_ids, now + time_to_live)
        if len(pins) > known and not pins.hold(pin, self.blocks.pool):
            try:
                self.submit(pin.request(), now)
            except RefusedError:
                pins.remove(pin, self.blocks.pool)
                raise
        return pin

    def unpin(self, tenant: str, pin_id: str) -> bool:
        """Lets go of a pin. Returns whether the tenant had it."""
        pin = self._state.pins.of_tenant(tenant, pin_id)
        if pin is None:
            return False
        self._remove(pin)
        return True

    def expire_pins(self, now: float) -> None:
        """Lets go of the pins whose time is over."""
        for pin in self._state.pins.expired(now):
            self._remove(pin)

    def _remove(self, pin: Pin) -> None:
        self._state.pins.remove(pin, self.blocks.pool)
        self.abort(pin.key)

    # Steps

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step, or returns None when there is nothing to compute until a result or a request comes."""
        self.expire_pins(now)
        if self._trials.are_on:
            if self.in_flight:
                # One step at a time, so that a suspect whose step is lost is lost at the same one again.
                return None
            self._trials.settle(now)
        batch = self._state.batch
        self.blocks.reclaim()
        self._state.num_uncached.clear()
        self._admission.begin_step()
        self._admission.displace(now)
        preempted = self._preemption.make_room_for_decodes(now)
        if not preempted:
            self._admission.swap_in(now)
        plan_decodes(batch)
        plan_prefills(self._state)
        if not preempted:
            self._admission.admit(now)
        plan_shares(self._state)
        if not batch.draft.is_empty:
            return self._commit(batch)
        if not self.in_flight:
            # Nobody waits, and no further call may come for long.
            while self.blocks.reclaim():
                pass
        return None

    def apply(self, result: StepResult, now: float) -> dict[ClientId, ClientEvents]:
        """Takes in the result of the oldest step in flight and returns what happened, by client.

        Raises ValueError and changes nothing where the result is not that step's, or makes no sense. The worker is to
        be given up then: see `lose_in_flight`.
        """
        step = self._oldest_in_flight(result.step_id)
        check_result(step, result, self.rows)
        self.in_flight.popleft()
        self._trials.answered(step)
        results = Results(self._state, now)
        results.take(step, result)
        for group in results.ended:
            self._trials.ended(group.request.key)
            if group.request.key.client == PIN_CLIENT:
                self._settle_pin(group)
        return results.events.by_client

    def _commit(self, batch: Batch) -> StepPlan:
        self._last_step_id += 1
        self.num_steps += 1
        prefills = batch.rows.prefills.copy()
        plan = batch.commit(self._last_step_id)
        self._state.policy.planned(plan, prefills[plan.rows].tolist(), batch.sequence)
        rows, sampling = batch.rows, plan.samples[:, 0]
        chunks = plan.rows[rows.prefills[plan.rows]]
        self.in_flight.append(
            StepInFlight(
                plan.step_id,
                sampling,
                rows.incarnation[sampling],
                rows.num_computed[sampling],
                chunks,
                rows.incarnation[chunks],
                rows.num_computed[chunks],
            )
        )
        return plan

    def _oldest_in_flight(self, step_id: int) -> StepInFlight:
        if not self.in_flight or self.in_flight[0].step_id != step_id:
            expected = self.in_flight[0].step_id if self.in_flight else "none"
            raise ValueError(f"result of step {step_id} came, the oldest step in flight is {expected}")
        return self.in_flight[0]

    def _settle_pin(self, group: SequenceGroup) -> None:
        """Where the group computed a pin, its blocks were freed this very moment and are all there."""
        pin = self._state.pins.of_key(group.request.key)
        if pin is not None and not self._state.pins.hold(pin, self.blocks.pool):
            self._state.pins.remove(pin, self.blocks.pool)

    def _wait(self, group: SequenceGroup) -> None:
        self._state.policy.arriving(group.request.tenant, self.waiting, self.swapped)
        self.waiting.add(group)

    # Losing the worker

    def refuse_in_flight(self, detail: str) -> dict[ClientId, ClientEvents]:
        """The worker refused the oldest step in flight, and said why. `void_in_flight` is to follow.

        Returns the failure of the request at fault, once it is known which one that is (see `trials`).
        """
        group = self._trials.refused()
        if group is None:
            return {}
        return self._fail(group, f"the worker refused a step of this request alone: {detail}", reason="STEP_REFUSED")

    def lose_in_flight(self, detail: str | None = None) -> None:
        """The worker was lost and did not say why, or was given up, for the reason `detail`. `void_in_flight` is to
        follow, and `judge_loss` once a worker is attached again."""
        self._trials.lost(detail)

    def judge_loss(self, *, was_alive: bool) -> dict[ClientId, ClientEvents]:
        """A worker was attached. To be called before anything runs; `was_alive` where it is the one that was lost, and
        neither hung nor answered nonsense.

        Returns the failure of the request that it is lost for, once it is known which one that is (see `trials`).
        """
        fault = self._trials.attached(was_alive=was_alive)
        if fault is None:
            return {}
        losses = fault.losses
        message = (
            f"the worker was lost {losses.num} times in a row while this request ran, "
            f"the last {losses.num_alone} times at one step of it alone"
        )
        if fault.detail is not None:
            message += f": {fault.detail}"
        return self._fail(fault.group, message, reason="WORKER_LOST")

    def _fail(self, group: SequenceGroup, message: str, *, reason: str) -> dict[ClientId, ClientEvents]:
        """Ends a live request that is at fault."""
        self._state.end_group(group.request.key)
        self._trials.ended(group.request.key)
        self._settle_pin(group)
        events = EventLog()
        events.request_failure(group, reason, message)
        return events.by_client

    def void_in_flight(self, now: float) -> None:
        """Forgets all steps in flight, all computed tokens and all blocks, as when a worker was lost.

        Every group waits again, and every pin that held blocks is computed again.
        """
        state = self._state
        state.forget_worker(now)
        self._last_step_id = 0
        for pin in state.pins.lose_blocks():
            request = pin.request()
            rank = state.policy.rank(request, self._num_arrivals)
            self._num_arrivals += 1
            self._wait(SequenceGroup.of(request, rank, self.config.block_size, now))

    def adopt_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        """Takes over the blocks that a worker found final under an earlier scheduler, or before its stream broke. To be
        called before anything runs. Blocks that this pool does not have are passed over."""
        for block, content in sealed:
            if block < self.config.num_blocks:
                self.blocks.pool.adopt(block, content)

    def adopt(self, old: "Scheduler", now: float) -> list[RequestFailure]:
        """Takes over the requests and pins of a scheduler whose pool is gone; nothing of `old` may be in flight.
        Returns the requests that do not fit any more; a pin that does not is let go of."""
        failures = []
        self.num_steps = old.num_steps
        self._num_arrivals = old._num_arrivals
        self._preemption.take_over(old._preemption)
        self._trials.take_over(old._trials)
        for group in old.waiting:
            if group.request.key.client == PIN_CLIENT:
                continue
            try:
                check_request(group.request, self.config)
            except RefusedError as error:
                self._trials.ended(group.request.key)
                message = f"the worker came back smaller: {error}"
                failures.append(RequestFailure(group.request.key, "POOL_SHRANK", message))
            else:
                group.move_to_blocks_of(self.config.block_size)
                self._wait(group)
        for pin in old.pins:
            with suppress(RefusedError):
                self.pin(pin.tenant, pin.token_ids, now, pin.expires_at - now)
        return failures
