"""Requests and pins that come and go between plans, needs that the workers have prepared, and losses of the worker."""

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.kv_cache import num_cached, sealed_start
from scheduler_svc.core.moves import Lease
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.pins import Pin, Pins
from scheduler_svc.core.policy import check_queue
from scheduler_svc.core.preparation import Preparation
from scheduler_svc.core.request import (
    Adapter,
    ClientId,
    Constraint,
    DuplicateKeyError,
    MovedBlocks,
    RefusedError,
    Request,
    RequestKey,
    check_request,
)
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.sequence import Milestone, Sequence, SequenceGroup
from scheduler_svc.core.state import State
from scheduler_svc.core.step import ClientEvents, RequestFailure

_MAX_EXPIRED, _MAX_EXPIRED_BLOCKS = 1024, 4096
"""Maximum number of expired pins that one call ends, and of their blocks: all pins may expire at the same time."""


class Arrivals:
    """Puts requests into the queues and ends them, with all that they hold. After a loss of the worker, forgets what it
    computed, and ends requests that cause losses (see `fault_isolation`)."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.observe: Callable[[SequenceGroup], None] | None = None
        """Called with each new group before its blocks are looked up."""

    def submit(self, request: Request, now: float) -> None:
        """Puts a request into the queue. On failure raises a RefusedError and changes nothing.

        A request that was accepted before is exempt from the queue's bounds.
        """
        state = self._state
        if state.queues.queue_of(request.key) is not None:
            raise DuplicateKeyError(f"handle {request.key.handle} is in use by a live request")
        check_request(request, state.config)
        check_queue(request, state.waiting, state.config)
        group = self.arrive(request, now)
        # Hashes its blocks now, so that the step that admits it need not.
        num_cached(state.batch.blocks, group.computing[0])
        if not state.trials.are_on:
            state.preparations.arrived(request, len(state.waiting))

    def abort(self, key: RequestKey) -> bool:
        """Ends a request at once and frees its blocks. Returns whether there was one."""
        self._state.trials.forget(key)
        return self._end_group(key) is not None

    def abort_sequence(self, key: RequestKey, index: int) -> bool:
        """Ends one sequence of a request, and the request with its last one. Returns whether the request was live.

        If sequences are selected at the end, no reader knows a sequence earlier, and nothing happens.
        """
        group = self._state.group(key)
        if group is None:
            return False
        ending = [sequence for sequence in group.unfinished if sequence.index == index and not group.request.selects]
        if len(ending) == len(group.unfinished):
            return self.abort(key)
        rows = self._state.batch.rows
        if any(each.row is not None and rows.active[each.row] and rows.prefills[each.row] for each in ending):
            # The others may depend on blocks that it has yet to compute: a common start, or all of a prompt.
            self._state.batch.requeue(group)
        self._end(ending)
        return True

    def arrive(self, request: Request, now: float) -> SequenceGroup:
        """Queues a request that was checked."""
        state = self._state
        replaces = None if request.replaces is None else RequestKey(request.key.client, request.replaces)
        if replaces is not None and replaces in state.reservations[Kind.PROMISE] and not request.is_offer:
            state.reservations.add(Kind.COMING, request.key, [])
        offer = None if replaces is None else self._end_group(replaces)
        order = state.policy.order(request, state.num_arrivals) if offer is None else offer.order
        state.num_arrivals += offer is None
        group = SequenceGroup.of(request, order, state.config.block_size, now)
        if self.observe is not None:
            self.observe(group)
        self._enqueue(group)
        return group

    def _enqueue(self, group: SequenceGroup) -> None:
        state = self._state
        state.policy.arriving(group.request.tenant, state.waiting, state.swapped)
        state.waiting.add(group)

    def _end(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences, and frees everything that they hold."""
        others: list[Sequence] = []
        for sequence in sequences:
            if sequence.status is SequenceStatus.SWAPPED:
                self._state.batch.blocks.free_swapped(sequence)
                sequence.status = SequenceStatus.FINISHED
            else:
                others.append(sequence)
        self._state.batch.end(others)

    def _end_group(self, key: RequestKey) -> SequenceGroup | None:
        """Ends all sequences of a live request and forgets it; None if there is none."""
        state = self._state
        queue = state.queues.queue_of(key)
        if queue is None:
            return None
        group = queue.remove(key)
        state.preparations.stop_waiting(group.request)
        state.reservations.end(Kind.COMING, key)
        state.reservations.end(Kind.PROMISE, key)
        self._end(group.unfinished)
        return group

    # Pins

    def pin(
        self,
        tenant: str,
        token_ids: list[int],
        now: float,
        time_to_live: float,
        adapter: Adapter | None = None,
        *,
        accepted_before: bool = False,
    ) -> Pin:
        """Protects the whole blocks of a prefix from eviction: all of them for half of the time (seconds), and then
        fewer and fewer.

        The pin holds its blocks at once if all are cached. Otherwise a request of PIN_CLIENT computes them; the events
        of that client report its end or failure. A pin that was accepted before is exempt from the queue's bounds.
        Pinning a prefix again restarts its time. On failure raises a RefusedError and changes nothing.
        """
        state = self._state
        num_before = len(state.pins)
        pin = state.pins.add(tenant, adapter, token_ids, now + time_to_live, time_to_live)
        if not pin.is_held and state.group(pin.key) is None and not state.pins.hold(pin):
            try:
                # A renewed pin has its quota already, and must not lose it.
                accepted_before |= len(state.pins) == num_before
                self.submit(replace(pin.request(), accepted_before=accepted_before), now)
            except RefusedError:
                state.pins.remove(pin)
                raise
        return pin

    def unpin(self, tenant: str, pin_id: str) -> bool:
        """Removes a pin. Returns whether the tenant had it."""
        if (pin := self._state.pins.of_tenant(tenant, pin_id)) is not None:
            self._unpin(pin)
        return pin is not None

    def expire_pins(self, now: float) -> None:
        """Removes expired pins, and parts of decaying ones, the oldest first: at least one pin, and no more than a
        short call can."""
        num_pins = num_blocks = 0
        while num_pins < _MAX_EXPIRED and num_blocks < _MAX_EXPIRED_BLOCKS:
            pin = self._state.pins.next_due(now)
            if pin is None:
                return
            num_pins, num_blocks = num_pins + 1, num_blocks + len(pin.blocks)
            if pin.expires_at <= now:
                self._unpin(pin)
            else:
                self._state.pins.decay(pin, now)

    def _unpin(self, pin: Pin) -> None:
        self._state.pins.remove(pin)
        self.abort(pin.key)

    def complete_pin(self, group: SequenceGroup) -> None:
        """A group ended. If it computed a pin, its blocks are still cached, unless it failed."""
        pins = self._state.pins
        if (pin := pins.of_key(group.request.key)) is not None and not pins.hold(pin):
            pins.remove(pin)

    # Moves and needs

    def move_away(
        self, key: RequestKey, lease: Lease, now: float, lease_s: float
    ) -> list[tuple[BlockId, BlockHash]] | None:
        """Ends a request here that continues at another replica after its emitted tokens. Returns its sealed blocks,
        which are kept under a lease for `lease_s` seconds so that the other replica can fetch them.

        Returns None and changes nothing if the request is unknown or delivers nothing before its end, or if requests
        are on trial.
        """
        state = self._state
        group = state.group(key)
        if group is None or group.request.selects or state.trials.are_on:
            return None
        sealed = dict[BlockId, BlockHash]()
        rows, blocks = state.batch.rows, state.batch.blocks
        for sequence in group.computing:
            num_sealed = 0
            if sequence.row is None:
                num_sealed = len(blocks.cached_start(sequence).blocks) // blocks.num_groups
            elif rows.active[sequence.row]:
                num_sealed = int(rows.num_sealed[sequence.row])
            sealed.update(sealed_start(blocks, sequence, num_sealed))
        for step in state.in_flight:
            for block in step.from_host.tolist():
                # Its content has not arrived yet.
                sealed.pop(block, None)
        if sealed:
            blocks.pool.touch(sealed)
            state.reservations.add(Kind.LEASE, lease, list(sealed), now + lease_s)
        self.abort(key)
        state.move_counts.requests_out += 1
        return list(sealed.items())

    def take_preparations(self) -> list[Preparation]:
        """The constraints that the workers are to compile now, the adapters that they are to load, and the blocks that
        they are to fetch. The caller must send all of them."""
        return list(self._state.preparations.take(is_idle=not self._state.in_flight))

    def prepared(
        self, number: int, failure: str | None = None, failed: frozenset[int] = frozenset()
    ) -> dict[ClientId, ClientEvents]:
        """The workers have done the preparation with this number. If they could not load an adapter, `failure` says
        why, and the failures of the requests that waited for it are returned. Fetched blocks with the indices `failed`
        did not come, and are computed. Raises ValueError for an unknown number or index."""
        state = self._state
        arriving = state.preparations.arriving(number)
        num_arriving = 0 if arriving is None else len(arriving.blocks)
        if failed and not 0 <= min(failed) <= max(failed) < num_arriving:
            raise ValueError(f"preparation {number} fetches {num_arriving} blocks, and number {max(failed)} failed")
        if arriving is not None:
            state.batch.blocks.pool.seal_moved(arriving.came(failed))
            state.reservations.end(Kind.FETCH, number)
            state.reservations.end(Kind.FETCH_START, number)
            state.fetches.forget_failed(arriving, failed)
            state.move_counts.fetched(arriving, len(failed))
        keys = state.preparations.done(number, failure)
        if failure is not None and arriving is None:
            detail = f"the adapter of this request cannot be loaded: {failure}"
            return self.fail(keys, detail, reason="ADAPTER_NOT_LOADED")
        state.queues.release(keys)
        return {}

    def end_late_preparation(self, number: int, seconds: float) -> dict[ClientId, ClientEvents]:
        """The workers take too long, `seconds` by now, for a preparation. Returns the failures of the requests that
        waited for it; other requests with the same need have it prepared again when they are next."""
        state = self._state
        if (arriving := state.preparations.arriving(number)) is not None:
            state.fetches.forget_failed(arriving, range(len(arriving.hashes)))
            state.reservations.end(Kind.FETCH_START, number)
        need, keys = state.preparations.mark_late(number)
        if isinstance(need, MovedBlocks):
            state.queues.release(keys)
            return {}
        if isinstance(need, Constraint):
            detail = f"the workers have not compiled the constraint of this request for {seconds:.1f} s"
            return self.fail(keys, detail, reason="CONSTRAINT_TIMEOUT")
        detail = f"the workers have not loaded the adapter of this request for {seconds:.1f} s"
        return self.fail(keys, detail, reason="ADAPTER_TIMEOUT")

    def fail(self, keys: Iterable[RequestKey], message: str, *, reason: str) -> dict[ClientId, ClientEvents]:
        """Ends live requests that are at fault. Returns their failures."""
        events: dict[ClientId, ClientEvents] = {}
        for group in filter(None, map(self._state.group, keys)):
            key = group.request.key
            self.abort(key)
            self.complete_pin(group)
            events.setdefault(key.client, ClientEvents()).failed.append(RequestFailure(key, reason, message))
        return events

    # Loss of the worker, and workers that are attached after it

    def refuse_in_flight(self, detail: str) -> dict[ClientId, ClientEvents]:
        """The worker refused the oldest step in flight, for the reason `detail`. `void_in_flight` must follow.

        Returns the failure of the request at fault, once that is known (see `fault_isolation`).
        """
        group = self._state.trials.refused(self._state.running)
        if group is None:
            return {}
        message = f"the worker refused a step of only this request: {detail}"
        return self.fail([group.request.key], message, reason="STEP_REFUSED")

    def lose_in_flight(self, detail: str | None = None) -> None:
        """The worker was lost for an unknown reason, or was dropped for the reason `detail`. `void_in_flight` must
        follow, and `judge_loss` once a worker is attached again."""
        state = self._state
        needs = state.preparations.underway
        if state.in_flight or needs:
            state.trials.lost(state.running if state.in_flight else (), needs, state.batch.rows, detail)

    def judge_loss(self, *, was_alive: bool) -> dict[ClientId, ClientEvents]:
        """A worker was attached. The caller calls this before anything runs, with `was_alive` if it is the worker that
        was lost, and it neither hung nor sent invalid answers.

        Returns the failures of the request that causes the losses, or of the requests whose common need causes them,
        once that is known.
        """
        fault = self._state.trials.attached(self._state.queues.is_live, was_alive=was_alive)
        if fault is None:
            return {}
        at_fault, losses = fault.suspect, fault.losses
        match at_fault:
            case Constraint():
                what, condition = "the constraint of this request was compiled", "while nothing else was done"
            case Adapter():
                what = f"the adapter of this request, {at_fault.name} from {at_fault.directory}, was loaded"
                condition = "while nothing else was done"
            case _:
                what, condition = "this request ran", "at the same step, in which only it ran"
        last = f"the last {losses.num_alone} times {condition}"
        message = f"the worker was lost {losses.num} times in a row while {what}, {last}"
        if fault.detail is not None:
            message += f": {fault.detail}"
        assert not isinstance(at_fault, MovedBlocks), "they are fetched once, whatever is lost meanwhile"
        groups = self._state.groups()
        is_request = isinstance(at_fault, RequestKey)
        keys = [at_fault] if is_request else [each.request.key for each in groups if at_fault in each.request.needs]
        return self.fail(keys, message, reason="WORKER_LOST")

    def void_in_flight(self, now: float) -> None:
        """The worker was lost: forgets all steps in flight, all computed tokens and all blocks.

        Every group waits again in its place, and every pin that held blocks is computed again.
        """
        state = self._state
        state.fetches.restore_untold()
        state.in_flight.clear()
        state.waiting.release_all()
        for group in state.waiting.all():
            group.others_went_first = False
            for sequence in group.unfinished:
                sequence.lose_blocks()
        for queue in (state.running, state.swapped):
            for group in queue.take_all():
                group.timeline.record(Milestone.WORKER_LOST, now)
                for sequence in group.unfinished:
                    sequence.lose_blocks()
                group.restart()
                state.waiting.add(group)
        pinned = [pin for pin in state.pins if pin.is_held]
        state.make_pools()
        for pin in pinned:
            self.arrive(pin.request(), now)

    def refit(self, config: SchedulerConfig, now: float) -> list[RequestFailure]:
        """Workers were attached that have another pool or other limits. Called while nothing is in flight and the
        blocks of no request are computed, as after `void_in_flight`. Requests and pins stay. Returns the requests that
        do not fit any more; pins that do not fit are removed."""
        state = self._state
        assert not state.in_flight, "the worker was lost, and its steps with it"
        state.fetches.restore_untold()
        pins = list(state.pins)
        for pin in pins:
            self._unpin(pin)
        state.config, state.pins = config, Pins(config, state.pins.num_made)
        state.make_pools()
        failures: list[RequestFailure] = []
        for group in state.waiting:
            group.move_to_blocks_of(config.block_size)
            try:
                check_request(group.request, config)
            except RefusedError as error:
                message = f"the worker came back smaller: {error}"
                failures.append(RequestFailure(group.request.key, "POOL_SHRANK", message))
        for failure in failures:
            self.abort(failure.key)
        for pin in pins:
            with suppress(RefusedError):
                time_left = pin.expires_at - now
                self.pin(pin.tenant, pin.token_ids, now, time_left, pin.adapter, accepted_before=True)
        return failures
