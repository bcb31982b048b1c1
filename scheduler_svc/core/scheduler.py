"""The scheduler: continuous batching over paged blocks (the paper's sections 4.2 to 4.5).

`submit` queues a request, `schedule` plans the next step, `apply` applies the result of the oldest step in flight.
Several steps may be in flight: planning counts tokens that are still to come, and a sequence that turns out to have
ended costs one wasted row-step. Only rows whose next token the scheduler itself chooses (beam search) wait for their
result.

`policy` says which group is next, `admission` whether there is room for it and how prompts share a step, `placement`
moves it into the batch and out of it, `batch` keeps rows and builds the step, `kv_cache` keeps blocks, `results`
applies step results, `pace` says when beam searches wait for each other, `preparation` knows which constraints are
compiled and which adapters are loaded, and `fault_isolation` finds requests that make steps fail.
"""

import itertools
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import replace

import numpy as np

from scheduler_svc.core.admission import Obstacle, Room, Stop, TokenShares
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.block_pool import BlockHash, BlockId
from scheduler_svc.core.cache_log import CacheLog
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.drafts import DraftCounts
from scheduler_svc.core.fault_isolation import Trials
from scheduler_svc.core.host_memory import HostMemory
from scheduler_svc.core.kv_cache import BlockManager, SwapSpace
from scheduler_svc.core.moves import Arriving, KvSource, Lease, Leases, MoveCounts, Tier
from scheduler_svc.core.pace import Pace
from scheduler_svc.core.pins import PIN_CLIENT, Pin, Pins
from scheduler_svc.core.placement import Placement
from scheduler_svc.core.policy import GroupQueue, check_queue, make_policy
from scheduler_svc.core.preparation import Preparation, Preparations
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
from scheduler_svc.core.results import Results, check_result
from scheduler_svc.core.sequence import Milestone, Sequence, SequenceGroup, SequenceStatus
from scheduler_svc.core.step import ClientEvents, RequestFailure, StepInFlight, StepPlan, StepResult

_MAX_ADMISSIONS = 128
"""Maximum number of groups that one step admits, to bound planning time; the next step continues. Only short or cached
prompts reach it."""

_MAX_BLOCKS_LOOKED_UP = 4096
"""Number of looked-up blocks after which a step looks at no further group: cached blocks of admitted groups, and blocks
that held groups may share. Each may cost a hash."""

_COMPARED_PER_LOOKED_UP = 4
"""Number of blocks whose tokens are compared in the time that one lookup takes."""

_MAX_DISPLACED = 128
"""Maximum number of groups that one step displaces. The group that they make room for is admitted before all others."""

_MAX_EXPIRED, _MAX_EXPIRED_BLOCKS = 1024, 4096
"""Maximum number of expired pins that one call ends, and of their blocks: all pins may expire at the same time."""


class Scheduler:
    """All requests of one replica, from arrival to end.

    Live groups are in exactly one of three queues: `running` groups have rows and GPU blocks, `swapped` groups have
    host blocks, `waiting` groups have neither. Steps and preemptions are counted since the start; `last_step_id` is the
    newest planned step since the worker was attached, 0 before the first; `num_swap_outs` of the preemptions moved
    blocks to host memory. `stopped` is why the last step admitted no further group, None if no group was left.
    `promises` holds the room for offers, `promised` has the offers that got room in the last planned step, and `coming`
    the requests whose offers had room and that wait for their blocks.
    `num_prompt_tokens` counts the prompt tokens of all requests that ran, `num_cached_tokens` the cached part of them.
    """

    def __init__(
        self, config: SchedulerConfig, make_blocks: Callable[[SchedulerConfig], BlockManager] = BlockManager.of
    ) -> None:
        """`make_blocks` makes an empty pool, at the start and after each loss of a worker."""
        self.config = config
        self._make_blocks = make_blocks
        self.policy = make_policy(config.policy)
        self.waiting = GroupQueue(self.policy.new_first)
        self.swapped = GroupQueue(self.policy.new_first)
        self.running = GroupQueue()
        self.in_flight: deque[StepInFlight] = deque()
        self.pins = Pins(config)
        self.trials = Trials()
        self.num_steps = 0
        self.num_preemptions = 0
        self.num_swap_outs = 0
        self.stopped: Stop | None = None
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self.draft_counts = DraftCounts()
        self.move_counts = MoveCounts()
        self._new_wait_until: float | None = None
        self._num_arrivals = 0
        self._cache_log: CacheLog | None = None
        self._make_pools()
        # The step that is being planned: a counter, and the group that `advance_queue` found.
        self._num_blocks_looked_up = 0
        self._front: SequenceGroup | None = None

    def _make_pools(self) -> None:
        """Makes the pools of a worker that has computed nothing."""
        config = self.config
        self.batch = Batch(config, self._make_blocks(config))
        self.batch.blocks.host = HostMemory(config.num_host_blocks, self.move_counts, caches=config.caches_on_host)
        self.leases = Leases[Lease]()
        self.promises = Leases[RequestKey]()
        self.promised = list[RequestKey]()
        self.coming = set[RequestKey]()
        self.tier = Tier()
        self.preparations = Preparations(
            self.batch.adapters, self.trials, self._make_room, compiles=config.prepares_constraints
        )
        if self._cache_log is not None:
            self._cache_log.cleared()
            self._set_cache_log(self._cache_log)
        self.swap_space = SwapSpace(self.batch.blocks)
        self._room = Room(
            self.batch,
            self.swap_space,
            self.running,
            self.swapped,
            self.waiting,
            self.promises,
            self.coming,
            self._give_way,
            self.preparations,
        )
        self._shares = TokenShares(self.batch, self.running, self.waiting, config.max_prefill_share)
        self._placement = Placement(
            self.batch,
            self.swap_space,
            self._shares,
            self.waiting,
            self.running,
            self.swapped,
            config,
        )
        self._pace = Pace()
        # The pool's number of releases, and the requests for whose blocks there has been no room since.
        self._no_room: tuple[int, set[RequestKey]] = 0, set()
        self.last_step_id = 0

    def groups(self) -> Iterator[SequenceGroup]:
        """All live requests: running ones, then swapped ones, then waiting ones."""
        return itertools.chain(self.running, self.swapped, self.waiting)

    def group(self, key: RequestKey) -> SequenceGroup | None:
        """A live request; None if it is not known (any more)."""
        queue = self._queue_of(key)
        return None if queue is None else queue.get(key)

    @property
    def num_live(self) -> int:
        """Number of requests that have not ended."""
        return len(self.running) + len(self.swapped) + len(self.waiting)

    @property
    def num_arriving(self) -> int:
        """Blocks that workers fetch."""
        return self.preparations.num_arriving

    def num_computed_tokens(self, sequence: Sequence) -> int:
        """Tokens whose keys and values are in a pool once all steps in flight are done, for any outcome of drafts."""
        match sequence.status:
            case SequenceStatus.RUNNING:
                assert sequence.row is not None
                return int(self.batch.rows.num_computed[sequence.row] - self.batch.rows.num_unsure[sequence.row])
            case SequenceStatus.SWAPPED:
                return sequence.num_swapped_tokens
            case _:
                return 0

    def log_cache(self) -> CacheLog:
        """Starts to record changes of the prefix cache."""
        log = CacheLog()
        self._set_cache_log(log)
        return log

    def stop_cache_log(self) -> None:
        """Stops recording changes of the prefix cache."""
        self._set_cache_log(None)

    def _set_cache_log(self, log: CacheLog | None) -> None:
        blocks = self.batch.blocks
        self._cache_log = blocks.pool.log = blocks.host.log = self.tier.log = log
        if log is not None:
            log.tier, log.host = self.tier, blocks.host

    # Requests

    def submit(self, request: Request, now: float) -> None:
        """Puts a request into the queue. On failure raises a RefusedError and changes nothing.

        A request that was accepted before is exempt from the queue's bounds.
        """
        if self._queue_of(request.key) is not None:
            raise DuplicateKeyError(f"handle {request.key.handle} is in use by a live request")
        check_request(request, self.config)
        check_queue(request, self.waiting, self.config)
        group = self._arrive(request, now)
        self.batch.blocks.warm_hashes(group.computing[0])
        if not self.trials.are_on:
            self.preparations.arrived(request, len(self.waiting))

    def abort(self, key: RequestKey) -> bool:
        """Ends a request at once and frees its blocks. Returns whether there was one."""
        self.trials.ended(key)
        return self._end_group(key) is not None

    def abort_sequence(self, key: RequestKey, index: int) -> bool:
        """Ends one sequence of a request, and the request with its last one. Returns whether the request was live.

        If sequences are selected at the end, no reader knows a sequence earlier, and nothing happens.
        """
        group = self.group(key)
        if group is None:
            return False
        ending = [sequence for sequence in group.unfinished if sequence.index == index and not group.request.selects]
        if len(ending) == len(group.unfinished):
            return self.abort(key)
        if any(sequence.row is not None and self.batch.rows.is_prefilling(sequence.row) for sequence in ending):
            # The others may depend on blocks that it has yet to compute: a common start, or all of a prompt.
            self._placement.requeue(group)
        self._end(ending)
        return True

    def _arrive(self, request: Request, now: float) -> SequenceGroup:
        replaces = None if request.replaces is None else RequestKey(request.key.client, request.replaces)
        if replaces is not None and replaces in self.promises and not request.is_offer:
            self.coming.add(request.key)
        offer = None if replaces is None else self._end_group(replaces)
        order = self.policy.order(request, self._num_arrivals) if offer is None else offer.order
        self._num_arrivals += offer is None
        group = SequenceGroup.of(request, order, self.config.block_size, now)
        self._enqueue(group)
        return group

    def _enqueue(self, group: SequenceGroup) -> None:
        self.policy.arriving(group.request.tenant, self.waiting, self.swapped)
        self.waiting.add(group)

    def _queue_of(self, key: RequestKey) -> GroupQueue | None:
        for queue in (self.running, self.waiting, self.swapped):
            if key in queue:
                return queue
        return None

    def _is_live(self, key: RequestKey) -> bool:
        return self._queue_of(key) is not None

    def _end(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences, and frees everything that they hold."""
        others: list[Sequence] = []
        for sequence in sequences:
            if sequence.status is SequenceStatus.SWAPPED:
                self.swap_space.free(sequence)
                sequence.status = SequenceStatus.FINISHED
            else:
                others.append(sequence)
        self.batch.end(others)

    def _end_group(self, key: RequestKey) -> SequenceGroup | None:
        """Ends all sequences of a live request and forgets it; None if there is none."""
        queue = self._queue_of(key)
        if queue is None:
            return None
        group = queue.remove(key)
        self.preparations.ended(group.request)
        self.coming.discard(key)
        self.promises.end(key, self.batch.blocks.pool)
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
        num_before, pool = len(self.pins), self.batch.blocks.pool
        pin = self.pins.add(tenant, adapter, token_ids, now + time_to_live, time_to_live, pool)
        if not pin.is_held and self.group(pin.key) is None and not self.pins.hold(pin, pool):
            try:
                # A renewed pin has its quota already, and must not lose it.
                accepted_before |= len(self.pins) == num_before
                self.submit(replace(pin.request(), accepted_before=accepted_before), now)
            except RefusedError:
                self.pins.remove(pin, pool)
                raise
        return pin

    def unpin(self, tenant: str, pin_id: str) -> bool:
        """Removes a pin. Returns whether the tenant had it."""
        pin = self.pins.of_tenant(tenant, pin_id)
        if pin is None:
            return False
        self._unpin(pin)
        return True

    def expire_pins(self, now: float) -> None:
        """Removes expired pins, and parts of decaying ones, the oldest first: at least one pin, and no more than a
        short call can."""
        num_pins = num_blocks = 0
        while num_pins < _MAX_EXPIRED and num_blocks < _MAX_EXPIRED_BLOCKS:
            pin = self.pins.next_due(now)
            if pin is None:
                return
            num_pins, num_blocks = num_pins + 1, num_blocks + len(pin.blocks)
            if pin.expires_at <= now:
                self._unpin(pin)
            else:
                self.pins.decay(pin, now, self.batch.blocks.pool)

    def forget_cached(self) -> int:
        """Forgets the content of cached blocks that have no holder; returns their number. Blocks of sequences and pins
        keep their names. Blocks of the tier are not fetched until workers are attached again."""
        self.tier.clear()
        self.batch.blocks.host.forget_cached()
        pool = self.batch.blocks.pool
        num_before = pool.num_cached
        pool.free(pool.allocate(pool.num_free))
        return num_before - pool.num_cached

    def _unpin(self, pin: Pin) -> None:
        self.pins.remove(pin, self.batch.blocks.pool)
        self.abort(pin.key)

    def _complete_pin(self, group: SequenceGroup) -> None:
        """A group ended. If it computed a pin, its blocks are still cached, unless it failed."""
        pin = self.pins.of_key(group.request.key)
        if pin is not None and not self.pins.hold(pin, self.batch.blocks.pool):
            self.pins.remove(pin, self.batch.blocks.pool)

    # Requests move between replicas, and blocks between the pool and the tier

    def hand_over(
        self, key: RequestKey, lease: Lease, now: float, lease_s: float
    ) -> list[tuple[BlockId, BlockHash]] | None:
        """Ends a request here that continues at another replica after its emitted tokens. Returns its sealed blocks,
        which are kept under a lease for `lease_s` seconds so that the other replica can fetch them.

        Returns None and changes nothing if the request is unknown or delivers nothing before its end, or if requests
        are on trial.
        """
        group = self.group(key)
        if group is None or group.request.selects or self.trials.are_on:
            return None
        sealed = dict[BlockId, BlockHash]()
        rows, blocks = self.batch.rows, self.batch.blocks
        for sequence in group.computing:
            num_sealed = len(blocks.cached_start(sequence).blocks) if sequence.row is None else 0
            if sequence.row is not None and rows.active[sequence.row]:
                num_sealed = int(rows.num_sealed[sequence.row])
            hashes = sequence.prefix_hashes.first(num_sealed, sequence.token_ids)
            sealed.update(zip(blocks.pool.hits(hashes), hashes, strict=False))
        for step in self.in_flight:
            for block in step.from_host.tolist():
                # Its content has not arrived yet.
                sealed.pop(block, None)
        if sealed:
            blocks.pool.touch(sealed)
            self.leases.add(lease, list(sealed), now + lease_s)
        self.abort(key)
        self.move_counts.requests_out += 1
        return list(sealed.items())

    def renew_lease(self, lease: Lease, now: float, lease_s: float) -> None:
        """Blocks of a lease were fetched: extends it to `lease_s` seconds from now, or ends it with 0."""
        if lease_s:
            self.leases.renew(lease, now + lease_s)
        else:
            self.leases.end(lease, self.batch.blocks.pool)

    def hold_new(self, now: float, seconds: float) -> None:
        """Keeps requests that never ran from starting for `seconds`: another replica may take them."""
        self._new_wait_until = now + seconds

    def is_held_as_new(self, group: SequenceGroup) -> bool:
        """Whether a waiting request may not start yet because it never ran."""
        request = group.request
        is_new = group.cached_tokens is None and not (request.emitted or request.is_offer)
        return self._new_wait_until is not None and is_new and request.key.client != PIN_CLIENT

    def _begin_new(self, now: float) -> None:
        """Releases requests that were held as new, if their time is over."""
        if self._new_wait_until is not None and self._new_wait_until <= now:
            held = list(filter(self.is_held_as_new, self.waiting.held_few(len(self.waiting))))
            self._new_wait_until = None
            for key in (group.request.key for group in held):
                if not (self.batch.underway.is_known(key) or self.preparations.needed_by(key)):
                    self.waiting.release(key)

    def tier_changed(self, slots: SequenceOf[int], hashes: SequenceOf[BlockHash]) -> None:
        """Updates the workers' tier: the first of these slots hold these blocks now, and the other slots are empty."""
        self.tier.change(slots, hashes)

    def _make_room(self, key: RequestKey) -> Arriving | MovedBlocks | None:
        """Takes pool blocks for the blocks of a waiting request that another replica has and that are not cached here.
        They are fetched once. If all are cached, the result has no blocks, and the call for it ends the lease. If no
        other replica has the request, its blocks in the tier are fetched once it fits, so that no other request takes
        the room again. Returns the need of another request that fetches the blocks already, if there is one, and None
        if there is nothing to fetch or no room."""
        group, blocks = self.waiting.get(key) if key in self.waiting else None, self.batch.blocks
        if group is None or self.trials.are_on or key in self._without_room():
            # Each step tries the next request again, and has no time to look at all of its blocks.
            return None
        if group.source is None:
            # Groups that pass may take the room and evict fetched blocks: waits for them once, then computes the rest.
            return self._make_room_from_tier(group) if len(self.tier) and not group.has_been_passed else None
        cached, hashes = blocks.missing_hashes(group.computing)
        num_free = len(hashes) + blocks.pool.num_free_of(cached)
        source = group.source
        if hashes and not blocks.has_room(num_free, reserve=self._room.to_grow(), alone=self._room.is_empty):
            self._without_room().add(key)
            return None
        group.source = None
        return self._arriving(source, cached if hashes else [], hashes)

    def _make_room_from_tier(self, group: SequenceGroup) -> Arriving | MovedBlocks | None:
        blocks = self.batch.blocks
        cached, hashes = blocks.missing_hashes(group.computing, self.tier)
        if not hashes:
            return None
        if (others := self.preparations.fetching(hashes[0])) is not None:
            return others
        while not self._room.has_room(group, self._room.to_grow()):
            # Blocks kept for others do not give way for blocks that can be computed.
            if not (self._room.is_empty and blocks.reclaim()):
                self._without_room().add(group.request.key)
                return None
        return self._arriving(None, cached, hashes)

    def _without_room(self) -> set[RequestKey]:
        """The requests for whose blocks there has been no room since the last release of blocks."""
        num_releases = self.batch.blocks.pool.num_releases
        if self._no_room[0] != num_releases:
            self._no_room = num_releases, set()
        return self._no_room[1]

    def _arriving(self, source: KvSource | None, cached: list[BlockId], hashes: list[BlockHash]) -> Arriving:
        """Takes blocks for these hashes, and adds references to the cached ones."""
        taken = self.batch.blocks.allocate_beside(cached, len(hashes))
        return Arriving(source, tuple(taken), tuple(hashes), tuple(cached))

    def _give_way(self) -> bool:
        """Frees blocks that are kept for other purposes than running requests, the least important first. Returns
        whether there were any."""
        pool = self.batch.blocks.pool
        return self.leases.give_way(pool) or self._break_promise() or self.pins.give_way(pool)

    def _break_promise(self) -> bool:
        """Takes back the newest promise: that request, which would come from another replica, waits again."""
        if (key := self.promises.newest) is None:
            return False
        self.promises.end(key, self.batch.blocks.pool)
        self.waiting.release(key)
        return True

    # Planning a step

    def schedule(self, now: float) -> StepPlan | None:
        """Plans the next step. Returns None if there is nothing to compute until a result or a request comes. If
        nothing is in flight, a step without rows reports the blocks that were sealed last.

        Every row computes until it has caught up with its tokens: decodes first, one token each, then chunks of the
        tokens that rows entered with, up to the token budget. Groups enter in the order of the policy, swapped ones
        before the decodes and waiting ones after the chunks. No group enters in a step that preempts to free blocks.
        """
        batch = self.batch
        if batch.blocks.has_retired:
            batch.blocks.reclaim()
        self.expire_pins(now)
        self.leases.expire(now, batch.blocks.pool)
        self._begin_new(now)
        self.promised.clear()
        if self.trials.are_on:
            if self.in_flight:
                # One step at a time, so that a suspect that loses a step loses the same one again.
                return None
            self._requeue_passed(now)
        if self.preparations.has_suspect_underway:
            return None
        if self.preparations.suspect_is_next and (self.in_flight or self.preparations.begin_suspect()):
            return None
        self._num_blocks_looked_up = 0
        self.preparations.planning()
        self._pace.planning(now)
        self.advance_queue()
        if self.in_flight and self._pace.joins_beams(batch.rows) and not self._can_admit():
            return None
        self._displace(now)
        has_preempted = self._preempt_for_decodes(now)
        if not has_preempted:
            self._swap_in(now)
        may_grow = self.config.max_drafts > 0 or self.config.max_passes > 1
        batch.add_decodes(with_drafts=may_grow and not self.trials.are_on)
        self._shares.add_prefills()
        self.stopped = Stop(Obstacle.PREEMPTION) if has_preempted else self._admit(now)
        self._shares.add_set_aside()
        # Blocks are swapped out before others may take their place.
        if not batch.draft.is_empty or batch.blocks.host.has_copies:
            return self._commit(now)
        if self.in_flight:
            return None
        # This delays no call, and no call may come for long.
        while batch.blocks.reclaim():
            pass
        # A step that only seals: the next step with rows may come late, or never.
        return self._commit(now) if batch.has_seals else None

    @property
    def is_sealing(self) -> bool:
        """Whether steps are in flight, or a step that only seals blocks is due."""
        return bool(self.in_flight) or self.batch.has_seals

    def _displace(self, now: float) -> None:
        """Preempts groups for the next one, if the policy allows it and if that makes enough room."""
        if self.trials.are_on or not len(self.running) or (group := self.peek()) is None or group.request.is_offer:
            return
        lacks_rows = self._room.lacks_rows(group)
        candidates = self.policy.displaced_by(group, self.running, self.batch, lacks_rows=lacks_rows)
        if not candidates:
            return
        to_grow = self._room.to_grow()
        if not self._room.fits(group, to_grow):
            for victim in self._room.victims(group, candidates, to_grow)[:_MAX_DISPLACED]:
                self._preempt(victim, now)

    def _preempt_for_decodes(self, now: float) -> bool:
        """Preempts until every decoding row can have a slot for its next token. Returns whether it preempted."""
        blocks = self.batch.blocks
        if self.batch.blocks_for_decodes() <= blocks.pool.num_free:
            return False
        victims = self.policy.victims(self.running)
        has_preempted = False
        while self.batch.blocks_for_decodes() > blocks.pool.num_free:
            # A group that runs by itself fits without the pins, as was checked when it arrived.
            if blocks.reclaim() or self.leases.give_way(blocks.pool) or self._break_promise():
                continue
            if len(self.running) == 1 and self.pins.give_way(blocks.pool):
                continue
            self._preempt(next(victims), now)
            has_preempted = True
        return has_preempted

    def _swap_in(self, now: float) -> None:
        """Brings swapped groups back until a waiting one is next. They compute with the decodes of this step."""
        while self.swapped.has_next:
            group = self.advance_queue()
            if group is None or group.request.key not in self.swapped:
                return
            if not self._room.make_way(group, self._room.to_grow()):
                return
            self._placement.swap_in(group, now)

    def _admit(self, now: float) -> Stop | None:
        """Admits waiting groups while rows, blocks and the token budget last, and until a swapped group is next, which
        comes back before the next step. Returns what stopped it."""
        to_grow: int | None = None
        for _ in range(_MAX_ADMISSIONS):
            if self.batch.draft.budget <= 0:
                return Stop(Obstacle.TOKENS)
            group = self.advance_queue()
            if group is None:
                return self._stop_without_next()
            key = group.request.key
            if key not in self.waiting:
                return Stop(Obstacle.SWAPPED_FIRST, key)
            if to_grow is None:
                to_grow = self._room.to_grow()
            is_offer = group.request.is_offer
            if not self._room.make_way(group, self._room.to_grow_for_long() if is_offer else to_grow):
                return Stop(Obstacle.ROWS if self._room.lacks_rows(group) else Obstacle.BLOCKS, key)
            if is_offer:
                self._room.promise(group)
                self.promised.append(key)
                self.waiting.hold(key)
                continue
            growth = self._room.growth_of(group)
            self._start(group, now)
            # The blocks that one sequence needs are known; several sequences may share blocks.
            to_grow = to_grow + growth if len(group.unfinished) == 1 else None
        return Stop(Obstacle.NEXT_STEP)

    def _start(self, group: SequenceGroup, now: float) -> None:
        group.source, group.has_been_passed = None, False
        self.coming.discard(group.request.key)
        is_new = group.cached_tokens is None
        self._num_blocks_looked_up += self._placement.start(group, now)
        if is_new:
            self.num_prompt_tokens += len(group.request.prompt)
            self.num_cached_tokens += group.cached_tokens or 0

    def _can_admit(self) -> bool:
        """Whether there is a group that would enter the batch now."""
        group = self.peek()
        return group is not None and self._room.fits(group, self._room.to_grow())

    def _stop_without_next(self) -> Stop | None:
        if self.trials.are_on:
            return Stop(Obstacle.SUSPECTS)
        return Stop(Obstacle.NEXT_STEP) if self.waiting.has_next else None

    def peek(self) -> SequenceGroup | None:
        """The group that the last `advance_queue` found. Changes nothing."""
        return self._front

    def advance_queue(self) -> SequenceGroup | None:
        """Releases groups whose wait is over, holds groups that have to wait and begins to fetch their blocks, until
        one is next that may enter the batch. Returns it; None if none may. A group that does not fit blocks all groups
        behind it, so that it does not starve under a stream of smaller ones."""
        self._front = self._find_next()
        return self._front

    def _find_next(self) -> SequenceGroup | None:
        for key in self.batch.underway.take_released():
            self.waiting.release(key)
        if self.trials.are_on:
            if self.swapped.has_next:
                group = self.swapped.first()
            else:
                group = None if self.in_flight else self.trials.next_of(self.waiting, self.running)
            # Does not wait for its constraint: if compiling it kills the worker, the step of this request shows that.
            return None if group is None or self.preparations.hold(group.request, may_compile=True) else group
        while self.waiting.has_next or self.swapped.has_next:
            if self._num_blocks_looked_up >= _MAX_BLOCKS_LOOKED_UP:
                return None
            group = self.policy.next_of(self.waiting, self.swapped)
            queue = self.swapped if group.request.key in self.swapped else self.waiting
            if (queue is self.waiting and self.is_held_as_new(group)) or self.preparations.hold(group.request):
                queue.hold(group.request.key)
                group.has_been_passed |= isinstance(self.preparations.needed_by(group.request.key), MovedBlocks)
            elif queue is self.swapped or not self._hold(group):
                return group
        return None

    def take_preparations(self) -> list[Preparation]:
        """The constraints that the workers are to compile now, and the adapters that they are to load. The caller must
        send all of them."""
        return list(self.preparations.take(is_idle=not self.in_flight))

    def prepared(
        self, number: int, failure: str | None = None, failed: frozenset[int] = frozenset()
    ) -> dict[ClientId, ClientEvents]:
        """The workers have done the preparation with this number. If they could not load an adapter, `failure` says
        why, and the failures of the requests that waited for it are returned. Fetched blocks with the indices `failed`
        did not come, and are computed. Raises ValueError for an unknown number or index."""
        arriving = self.preparations.arriving(number)
        num_arriving = 0 if arriving is None else len(arriving.blocks)
        if failed and not 0 <= min(failed) <= max(failed) < num_arriving:
            raise ValueError(f"preparation {number} fetches {num_arriving} blocks, and number {max(failed)} failed")
        if arriving is not None:
            blocks = self.batch.blocks
            blocks.seal_moved(arriving.came(failed))
            blocks.pool.free(arriving.blocks, arriving.kept)
            self._forget_failed(arriving, failed)
            self.move_counts.fetched(arriving, len(failed))
        keys = self.preparations.done(number, failure)
        if failure is not None and arriving is None:
            detail = f"the adapter of this request cannot be loaded: {failure}"
            return self._fail_all(keys, detail, reason="ADAPTER_NOT_LOADED")
        self._release(keys)
        return {}

    def _forget_failed(self, arriving: Arriving, failed: Collection[int]) -> None:
        """Blocks with these indices did not come. Blocks of the tier are not fetched again, since it may be slow."""
        if arriving.source is None:
            for index, content in enumerate(arriving.hashes):
                if index in failed:
                    self.tier.forget(content)

    def _release(self, keys: Iterable[RequestKey]) -> None:
        """Ends the waiting of these requests."""
        for key, queue in itertools.product(keys, (self.waiting, self.swapped)):
            queue.release(key)

    def give_up_preparation(self, number: int, seconds: float) -> dict[ClientId, ClientEvents]:
        """The workers take too long, `seconds` by now, for a preparation. Returns the failures of the requests that
        waited for it; other requests with the same need have it prepared again when they are next."""
        if (arriving := self.preparations.arriving(number)) is not None:
            self._forget_failed(arriving, range(len(arriving.hashes)))
            self.batch.blocks.pool.free(arriving.kept)
        need, keys = self.preparations.give_up(number)
        if isinstance(need, MovedBlocks):
            self._release(keys)
            return {}
        if isinstance(need, Constraint):
            detail = f"the workers have not compiled the constraint of this request for {seconds:.1f} s"
            return self._fail_all(keys, detail, reason="CONSTRAINT_TIMEOUT")
        detail = f"the workers have not loaded the adapter of this request for {seconds:.1f} s"
        return self._fail_all(keys, detail, reason="ADAPTER_NOT_LOADED")

    def _fail_all(self, keys: Iterable[RequestKey], message: str, *, reason: str) -> dict[ClientId, ClientEvents]:
        events: dict[ClientId, ClientEvents] = {}
        for group in filter(None, map(self.group, keys)):
            for client, failure in self._fail(group, message, reason=reason).items():
                events.setdefault(client, ClientEvents()).failed += failure.failed
        return events

    def _hold(self, group: SequenceGroup) -> bool:
        """Holds a waiting group if rows are computing enough of its next blocks. Returns whether it did. Groups behind
        it pass meanwhile. It never waits for a group behind it."""
        batch = self.batch
        if not batch.underway.has_any:
            return False
        batch.name_underway()
        sequence, num_looked_up = group.computing[0], batch.blocks.num_looked_up
        num_cached, hashes = batch.blocks.next_hashes(sequence, batch.underway.min_run)
        row = batch.underway.row_of(hashes)
        if row is None or batch.rows.order[row] > group.order:
            return False
        num_known = num_cached + len(hashes)
        num_blocks = batch.num_in_common(row, sequence, num_known)
        num_looked_up = batch.blocks.num_looked_up - num_looked_up + len(hashes)
        self._num_blocks_looked_up += num_looked_up + (num_blocks - num_known) // _COMPARED_PER_LOOKED_UP
        batch.underway.hold(group.request.key, row, num_blocks)
        self.waiting.hold(group.request.key)
        return True

    def _commit(self, now: float) -> StepPlan:
        """Finishes the step that was built. It is in flight from now on."""
        self.last_step_id += 1
        self.num_steps += 1
        rows = self.batch.rows
        prefills, has_chunks = rows.prefills.copy(), self.batch.draft.has_chunks
        plan = self.batch.commit(self.last_step_id)
        self.policy.charge(plan, prefills, rows.tenant)
        sampling, chunks = plan.samples[:, 0], plan.rows[rows.prefills[plan.rows]]
        step = StepInFlight(
            plan.step_id,
            sampling,
            rows.incarnation[sampling],
            plan.max_drafts,
            chunks,
            rows.incarnation[chunks],
            rows.num_computed[chunks],
            now,
            has_chunks,
            plan.swap_in[:, 1],
        )
        self.in_flight.append(step)
        return plan

    def _preempt(self, group: SequenceGroup, now: float) -> None:
        self.num_swap_outs += self._placement.preempt(group, now)
        self.num_preemptions += 1

    def _requeue_passed(self, now: float) -> None:
        for group in self.trials.take_passed(self.running, self._is_live):
            group.timeline.note(Milestone.RECOMPUTED, now)
            self._placement.requeue(group)

    # Results

    def apply(self, result: StepResult, now: float) -> dict[ClientId, ClientEvents]:
        """Applies the result of the oldest step in flight. Returns the events by client.

        Raises ValueError and changes nothing if the result belongs to another step or is invalid. The caller must drop
        the worker then: see `lose_in_flight`.
        """
        if not self.in_flight or self.in_flight[0].step_id != result.step_id:
            expected = self.in_flight[0].step_id if self.in_flight else "none"
            raise ValueError(f"got the result of step {result.step_id}; the oldest step in flight is {expected}")
        step = self.in_flight[0]
        check_result(step, result, self.batch.rows)
        self.in_flight.popleft()
        self._pace.answered(step, now)
        if result.num_tokens is not None and result.num_drafts is not None and result.num_drafts.any():
            num_right = np.maximum(result.num_tokens - result.num_passes, 0)
            self.draft_counts.add(num_right, result.num_drafts, result.num_passes)
        self.preparations.refused(result.refused)
        sequences = self.batch.rows.sequences_in(step.rows) if self.trials.are_on else []
        self.trials.answered(each.request.key for each in sequences if each is not None)
        results = Results(self.batch, self.running, now)
        results.apply(step, result)
        if results.further is not None:
            further_rows, counts = results.further
            self.policy.charge_drafts(self.batch.rows.tenant[further_rows], counts)
        for group in results.ended:
            self.trials.ended(group.request.key)
            if group.request.key.client == PIN_CLIENT:
                self._complete_pin(group)
        return results.events.by_client

    # Losing the worker

    def refuse_in_flight(self, detail: str) -> dict[ClientId, ClientEvents]:
        """The worker refused the oldest step in flight, for the reason `detail`. `void_in_flight` must follow.

        Returns the failure of the request at fault, once that is known (see `fault_isolation`).
        """
        group = self.trials.refused(self.running)
        if group is None:
            return {}
        return self._fail(group, f"the worker refused a step of only this request: {detail}", reason="STEP_REFUSED")

    def lose_in_flight(self, detail: str | None = None) -> None:
        """The worker was lost for an unknown reason, or was dropped for the reason `detail`. `void_in_flight` must
        follow, and `judge_loss` once a worker is attached again."""
        needs = self.preparations.underway
        if self.in_flight or needs:
            self.trials.lost(self.running if self.in_flight else (), needs, self.batch.rows, detail)

    def judge_loss(self, *, was_alive: bool) -> dict[ClientId, ClientEvents]:
        """A worker was attached. The caller calls this before anything runs, with `was_alive` if it is the worker that
        was lost, and it neither hung nor sent invalid answers.

        Returns the failures of the request that causes the losses, or of the requests whose common need causes them,
        once that is known.
        """
        fault = self.trials.attached(self._is_live, was_alive=was_alive)
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
        if isinstance(at_fault, Constraint | Adapter):
            keys = [group.request.key for group in self.groups() if at_fault in group.request.needs]
        else:
            keys = [at_fault]
        return self._fail_all(keys, message, reason="WORKER_LOST")

    def _fail(self, group: SequenceGroup, message: str, *, reason: str) -> dict[ClientId, ClientEvents]:
        """Ends a live request that is at fault."""
        self.abort(group.request.key)
        self._complete_pin(group)
        key = group.request.key
        return {key.client: ClientEvents(failed=[RequestFailure(key, reason, message)])}

    def void_in_flight(self, now: float) -> None:
        """The worker was lost: forgets all steps in flight, all computed tokens and all blocks.

        Every group waits again in its place, and every pin that held blocks is computed again.
        """
        self.in_flight.clear()
        self.waiting.release_all()
        for group in self.waiting.all():
            group.has_been_passed = False
        for queue in (self.running, self.swapped):
            for group in queue.take_all():
                group.timeline.note(Milestone.WORKER_LOST, now)
                for sequence in group.unfinished:
                    sequence.block_table, sequence.row = [], None
                group.restart()
                self.waiting.add(group)
        self._make_pools()
        for pin in self.pins.lose_blocks():
            self._arrive(pin.request(), now)

    def restore_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        """Puts blocks into the prefix cache that a worker reported as final under an earlier scheduler, or before its
        stream broke. Called before anything runs. Blocks that this pool does not have are ignored."""
        for block, content in sealed:
            if block < self.config.num_blocks:
                self.batch.blocks.pool.restore(block, content)

    def refit(self, config: SchedulerConfig, now: float) -> list[RequestFailure]:
        """Workers were attached that have another pool or other limits. Called while nothing is in flight and no block
        is held, as after `void_in_flight`. Requests and pins stay. Returns the requests that do not fit any more; pins
        that do not fit are removed."""
        assert not self.in_flight, "the worker was lost, and its steps with it"
        pins = list(self.pins)
        for pin in pins:
            self._unpin(pin)
        self.config, self.pins = config, self.pins.of_other_pool(config)
        self._make_pools()
        failures: list[RequestFailure] = []
        for group in self.waiting:
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
