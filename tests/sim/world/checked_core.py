"""The core of a scheduler that checks itself: its invariants hold after every operation, and it keeps what its
policies, pins, leases and trials promise."""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from quire.clock import CLOCK, monotonic
from quire.prefix_hashes import BlockHash
from scheduler_svc.core import admission, invariants, preparation
from scheduler_svc.core import scheduler as scheduler_core
from scheduler_svc.core.admission import Obstacle
from scheduler_svc.core.block_pool import BlockId, BlockPool
from scheduler_svc.core.cache_log import CacheChanges, CacheLog
from scheduler_svc.core.config import PolicyKind, SchedulerConfig
from scheduler_svc.core.fault_isolation import LOSSES_ON_TRIAL, Progress
from scheduler_svc.core.moves import Arriving, Lease, Leases
from scheduler_svc.core.pins import PIN_CLIENT, Pin
from scheduler_svc.core.policy import PREFILL_WEIGHT, SAMPLE_WEIGHT, TURN, FairPolicy
from scheduler_svc.core.preparation import Preparation
from scheduler_svc.core.request import Adapter, ClientId, Constraint, QueueFullError, RequestKey
from scheduler_svc.core.request import Request as CoreRequest
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import Array, ClientEvents, RequestEnd, RequestFailure, StepPlan, StepResult
from scheduler_svc.recording import recorder
from scheduler_svc.recording.recorder import Recorder
from tests.sim.world.fairness import Shares
from tests.sim.world.http_calls import salt_of
from tests.sim.world.leaving import AdapterUse, out_of_order
from tests.sim.world.traffic import Generate
from tests.sim.world.watch import Names, NamingBlocks
from tests.sim.world.world import Node

F = TypeVar("F", bound=Callable[..., Any])

_TOLERANCE_S = 1e-6
STEP_TIMEOUT_S = 5.0
"""How long a step may take."""
_POOLS_LOOKED_AT = 8
"""In which order blocks are free is looked at after so many operations."""


class CheckedScheduler(Scheduler):
    """The core, whose invariants hold after every operation that changes it from outside, and which is as fair as its
    policy promises."""

    asked: Mapping[str, Generate] = {}
    """What clients asked for, by the id."""
    _names: Names
    _fairness: Shares | None = None
    _entering: SequenceGroup | None = None
    """Whom others made room for last."""
    _makes_slots = False
    """Whether groups are preempted for the next tokens of others."""

    def __init__(self, config: SchedulerConfig, names: Names | None = None) -> None:
        known = self._names if names is None else names
        self._names = known
        super().__init__(config, lambda config: NamingBlocks(config, known))
        self._place_of: dict[RequestKey, tuple[int, int]] = {}
        self._compiled: list[Constraint] = []
        self._arrivals = itertools.count()
        self._own_losses: dict[RequestKey, tuple[Progress, int, int]] = {}
        self._answered_at = 0.0
        self._times_of: dict[RequestKey, list[float]] = {}
        self._num_checks = 0
        self.forgotten = set[BlockHash]()
        """What it no longer wants from the disks, until they say that they have it again."""
        self._watch_pins()
        if config.policy is PolicyKind.FAIR:
            self._fairness = fairness = Shares(config.max_num_seqs)
            charge = self.policy.charge

            def count(plan: StepPlan, prefills: Array, tenants: Array) -> None:
                computed, sampled = Counter[str](), Counter[str](tenants[plan.samples[:, 0]].tolist())
                for row, num_new in zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True):
                    computed[str(tenants[row])] += num_new if prefills[row] else 0
                before = {tenant: self._counter(tenant) for tenant in {*computed, *sampled}}
                fairness.serve(computed, sampled)
                charge(plan, prefills, tenants)
                for tenant, counter in before.items():
                    cost = PREFILL_WEIGHT * computed[tenant] + SAMPLE_WEIGHT * sampled[tenant]
                    if self._counter(tenant) != counter + cost:
                        self._report(AssertionError(f"{tenant} is not charged for what a step computes"))

            self.policy.charge = count

    def _watch_pins(self) -> None:
        """No pin ends while others give way."""
        pins_give_way = self.pins.give_way

        def give_way(pool: BlockPool) -> bool:
            if len(self.leases) or len(self.promises):
                self._report(AssertionError("a pin ends before leases and promises do"))
            return pins_give_way(pool)

        self.pins.give_way = give_way

    def _make_pools(self) -> None:
        super()._make_pools()
        requeue, victims, take_slot = self._placement.requeue, self._room.victims, self.batch.adapters.take
        grow, self._adapter_use = self.batch._growth_of, AdapterUse(self.batch.adapters)
        self._placement.start = self._with_room(self._placement.start, comes_back=False)
        self._placement.swap_in = self._with_room(self._placement.swap_in, comes_back=True)

        def leave(group: SequenceGroup) -> None:
            if self._fairness is not None:
                self._fairness.leaves(group)
            requeue(group)

        def note(group: SequenceGroup, candidates: Sequence[SequenceGroup], to_grow: int) -> list[SequenceGroup]:
            self._entering = group
            chosen = victims(group, candidates, to_grow)
            all_leave = len(chosen) == len(self.running)
            if not all_leave and self._make_room_by(chosen or candidates, group, to_grow) != bool(chosen):
                self._report(AssertionError(f"{len(chosen)} of {len(candidates)} are to make room"))
            if self.config.policy is PolicyKind.FAIR and (alike := self._that_hold_little(group, candidates)):
                self._report(AssertionError(f"{group.request.tenant} displaces {alike}, who hold no more"))
            return chosen

        def take(adapter: Adapter, kept: set[Adapter]) -> int | None:
            before, owed = self.batch.adapters.num_rows(), {*self.preparations._owed.values()}
            drained = self._adapter_use.drained()
            slot = take_slot(adapter, kept)
            if (wrong := self._adapter_use.wrong_choice(before, drained, kept)) is not None and adapter not in before:
                self._report(AssertionError(wrong))
            if owed & before.keys() - self.batch.adapters.num_rows().keys() - {adapter}:
                self._report(
                    AssertionError("an adapter leaves its slot before the request that it was loaded for runs")
                )
            return slot

        def grow_beside(rows: Array) -> tuple[Array | None, int]:
            num_free = self.batch.blocks.pool.num_free
            growth = grow(rows)
            if self.batch.blocks.pool.num_free < min(num_free, self.batch.blocks._watermark_blocks):
                self._report(AssertionError("drafts take blocks that are kept for next tokens"))
            return growth

        self._placement.requeue, self._room.victims, self.batch.adapters.take = leave, note, take
        self.batch._growth_of = grow_beside

    def _with_room(self, enter: F, *, comes_back: bool) -> F:
        """Who enters beside others leaves room for their next tokens, and for those of the step that it comes back in,
        and rows for those that are to come from elsewhere. Nobody enters with an adapter that is to leave its slot."""

        def call(group: SequenceGroup, now: float) -> Any:
            batch, alone = self.batch, self._room.is_empty
            reserve = self._growth() + (-batch.blocks_for_decodes() if comes_back else self._first_growth(group))
            if group.request.adapter is not None and not batch.adapters.is_ready(group.request.adapter):
                self._report(AssertionError(f"{group.request.request_id} enters with an adapter that makes way"))
            done = enter(group, now)
            coming = {*self.promises, *self.coming} - {group.request.key}
            if batch.rows.num_free < sum(len(self.waiting.get(key).unfinished) for key in coming):
                self._report(AssertionError(f"{group.request.request_id} takes a row that is kept for another one"))
            left = batch.blocks.pool.num_free - (batch.blocks_for_decodes() if comes_back else 0)
            if left < (0 if alone else max(reserve, batch.blocks._watermark_blocks)):
                self._report(AssertionError(f"{group.request.request_id} leaves {left} blocks, others need {reserve}"))
            return done

        return cast(F, call)

    def _growth(self) -> int:
        """Blocks that those that run take for the token after their next one, counted one by one."""
        table, blocks, count = self.batch.rows, self.batch.blocks, 0
        for each in (each for group in self.running for each in group.unfinished):
            if each.row is not None and table.active[each.row]:
                slots = min(int(table.num_tokens[each.row]) + 1, each.request.max_len - 1)
                count += max(blocks.blocks_for(slots) - len(each.block_table), 0)
        return count

    def _first_growth(self, group: SequenceGroup) -> int:
        """Blocks that a group that waits takes for the first token of each of its sequences, beyond those it has."""
        blocks = self.batch.blocks
        slots = ((each, min(each.num_tokens + 1, each.request.max_len - 1)) for each in group.unfinished)
        return sum(max(blocks.blocks_for(end) - blocks.blocks_for(each.num_tokens), 0) for each, end in slots)

    def _that_hold_little(self, entering: SequenceGroup, candidates: Sequence[SequenceGroup]) -> set[str]:
        """Tenants of candidates that hold less than twice what the one that enters holds then: rows where it lacks
        these, or else blocks."""
        blocks = self.batch.blocks

        def held_by(tenant: str) -> int:
            own = [each for group in self.running if group.request.tenant == tenant for each in group.unfinished]
            return len(own) if self._room.lacks_rows(entering) else sum(len(each.block_table) for each in own)

        wanted = held_by(entering.request.tenant) + (
            len(entering.unfinished)
            if self._room.lacks_rows(entering)
            else sum(blocks.blocks_for(each.num_tokens) for each in entering.computing)
        )
        return {tenant for tenant in {each.request.tenant for each in candidates} if held_by(tenant) < 2 * wanted}

    def _make_room_by(self, leaving: Sequence[SequenceGroup], group: SequenceGroup, to_grow: int) -> bool:
        """Whether the group may enter beside others when these have left."""
        blocks, pool = self.batch.blocks, self.batch.blocks.pool
        sequences = [each for other in leaving for each in other.unfinished]
        others = {*self.promises, *self._room._coming} - {group.request.key}
        kept = sum(len(self.waiting.get(key).unfinished) for key in others)
        if len(group.unfinished) + kept > self.batch.rows.num_free + len(sequences):
            return False
        taken = {block for each in group.computing for block in blocks.cached_start(each).blocks}
        holders = Counter(block for each in sequences for block in each.block_table)
        num_freed = sum(count == pool.ref_count(block) for block, count in holders.items() if block not in taken)
        needed, reserve = self._room._blocks_needed(group, to_grow)
        return blocks.missing(needed, reserve=reserve) <= num_freed

    def _counter(self, tenant: str) -> int:
        """What the policy `fair` says that a tenant got."""
        assert isinstance(self.policy, FairPolicy)
        return self.policy._counter(tenant)

    def _tenants_with_next(self) -> set[str]:
        return self.waiting.tenants_with_next() | self.swapped.tenants_with_next()

    def schedule(self, now: float) -> StepPlan | None:
        self._observe_fairness()
        are_trials, num_before = self.trials.are_on, self.num_preemptions
        first = next(iter(self.waiting.next_few(1)), None) if len(self.waiting) <= admission._NUM_LOOKED_AT else None
        plan = super().schedule(now)
        self._observe_fairness()
        self._check()
        self._check_stop()
        if plan is not None and self.num_preemptions == num_before and not (are_trials or self.trials.are_on):
            self._check_shares(plan, first)
        # With drafts it is not known how much of a step was kept for them.
        is_full = plan is None or plan.max_drafts is not None or plan.num_tokens >= self.config.max_num_batched_tokens
        if not is_full and len(rows := self.batch.rows.prefilling()):
            name = self.batch.sequence(int(rows[0])).request.request_id
            self._report(AssertionError(f"a step has room for {name}, which has more to compute"))
        if plan is not None and self.config.prepares_constraints and not (are_trials or self.trials.are_on):
            needs = {need for each in plan.assign for need in self.batch.sequence(each.row).request.needs}
            if not {each for each in needs if isinstance(each, Constraint)} <= {
                *self._compiled[-preparation.NUM_KEPT :]
            }:
                self._report(AssertionError("a row has a constraint that its worker may have forgotten"))
        return plan

    def _check_stop(self) -> None:
        """Who is next and does not enter finds no room."""
        if (stopped := self.stopped) is None or stopped.why not in (Obstacle.ROWS, Obstacle.BLOCKS):
            return
        group = None if stopped.key is None else self.group(stopped.key)
        if group is None or group.request.is_offer or group.request.key not in self.waiting:
            return
        if self._make_room_by((), group, self._room.to_grow()):
            self._report(AssertionError(f"{group.request.request_id} finds room, and does not enter"))

    def _check_shares(self, plan: StepPlan, first: SequenceGroup | None) -> None:
        """In a step that is full, a prompt gets no more than its share where a shorter one behind it gets a part, or
        waits. `first` waited first, where it was looked at."""
        rows, chunks = self.batch.rows, dict(zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True))
        if self.stopped is None or self.stopped.why is not Obstacle.TOKENS:
            return
        entered = {each.row for each in plan.assign}
        short = [
            (int(rows.order[row]), rows.num_uncomputed(row) + chunks.get(row, 0))
            for row in rows.prefilling().tolist()
            if row not in entered
        ]
        if first is not None and not entered and first in self.waiting.next_few(1):
            short.append((first.order, first.num_tokens_to_compute))
        most = max(1, int(self.config.max_num_batched_tokens * self.config.max_prefill_share))
        for row, count in chunks.items():
            length, order = count + (rows.num_uncomputed(row) if rows.is_prefilling(row) else 0), int(rows.order[row])
            is_long = count > most and row not in entered
            if is_long and any(behind > order and shorter < length for behind, shorter in short):
                name = self.batch.sequence(row).request.request_id
                self._report(AssertionError(f"{name} takes {count} tokens of a step, and a shorter prompt waits"))

    @property
    def kept_for_requests(self) -> list[str]:
        """What there is no more when there are no requests."""
        waits, trials = self.preparations, self.trials
        kept = {
            "needs of requests": (*waits._need_of, *waits._held),
            "adapters that requests are owed": waits._owed,
            "losses of requests": trials._losses,
            "room for requests": (*self.promises, *self.coming),
            "blocks that requests wait for": (*self.batch.underway.items(), *self.batch.underway.awaited()),
        }
        return [what for what, each in kept.items() if each]

    @property
    def is_late(self) -> bool:
        """Whether the oldest step in flight takes longer than it may."""
        since = max(self.in_flight[0].planned, self._answered_at) if self.in_flight else monotonic()
        return monotonic() - since > STEP_TIMEOUT_S

    def _start(self, group: SequenceGroup, now: float) -> None:
        """Who waits or is swapped, and is not held, enters in the order of arrival, by the policy `priority` after
        higher ones, and by the policy `fair` after those of tenants that got less."""
        if not self.trials.are_on:
            queues = (self.waiting, self.swapped)
            waiting = [each.request for queue in queues for each in queue if not queue.is_held(each.request.key)]
            if self.config.policy is PolicyKind.FAIR:
                least = min(map(self._counter, self._tenants_with_next()))
                if self._counter(group.request.tenant) > least:
                    self._report(AssertionError(f"{group.request.tenant} goes before a tenant that got less"))
                waiting = [each for each in waiting if each.tenant == group.request.tenant]
            first = min(waiting, key=lambda request: self._place_of[request.key])
            if self._place_of[first.key] < self._place_of[group.request.key]:
                self._report(AssertionError(f"{group.request.request_id} goes before {first.request_id}"))
        num_cached = group.cached_tokens
        super()._start(group, now)
        if num_cached not in (None, group.cached_tokens):
            self._report(AssertionError(f"{group.request.request_id} counts its own blocks as cached"))

    def _observe_fairness(self) -> None:
        if self._fairness is not None:
            self._fairness.observe(frozenset(self._tenants_with_next()))

    def log_cache(self) -> CacheLog:
        """Whoever is told of changes knows what is cached, and what that is."""
        log = super().log_cache()
        told, take, pool = set(self.batch.blocks.pool.sealed_hashes()), log.take, self.batch.blocks.pool

        def take_checked() -> CacheChanges | None:
            nonlocal pool
            if (changes := take()) is None:
                return None
            # What was there before the log is asked for apart.
            if self.batch.blocks.pool is not pool:
                told.clear()
                pool = self.batch.blocks.pool
            told.difference_update(changes.removed)
            told.update(changes.stored)
            if told != set(self.batch.blocks.pool.sealed_hashes()):
                self._report(AssertionError("watchers are told of other blocks than are cached"))
            if any(each not in (None, self._names[content][3]) for content, each in changes.stored.items()):
                self._report(AssertionError("watchers are told of other tokens than blocks hold"))
            return changes

        log.take = take_checked
        return log

    def _break_promise(self) -> bool:
        before = list(self.promises)
        done = super()._break_promise()
        if list(self.promises) != before[:-1]:
            self._report(AssertionError("an offer loses its room before one that came later"))
        return done

    def submit(self, request: CoreRequest, now: float) -> None:
        if (asked := self.asked.get(request.request_id)) is not None:
            adapter = None if request.adapter is None else request.adapter.name
            come = request.tenant, adapter, request.cache_salt, tuple(request.prompt[: len(asked.prompt)])
            if come != (asked.tenant, asked.adapter, salt_of(asked), asked.prompt):
                self._report(AssertionError(f"{request.request_id} comes with another tenant, adapter, salt or prompt"))
            if asked.front is None and request.priority != asked.priority:
                self._report(AssertionError(f"{request.request_id} comes with priority {request.priority}"))
        try:
            super().submit(request, now)
        except QueueFullError:
            self._check_refusal(request)
            raise
        self._times_of[request.key] = [now]
        self._check()

    def _check_refusal(self, request: CoreRequest) -> None:
        """A full queue refuses only what it has no room for, and no tenant that has nothing in it before it is full by
        the share that is kept for such ones."""
        tokens, own = [each.num_tokens_to_compute for each in self.waiting], self.waiting.num_of(request.tenant)
        added = len(request.prompt) + sum(len(each.token_ids) for each in request.emitted if not each.has_ended)
        extra = 1 if own else 1 + self.config.tenant_overflow * (len(self.waiting.tenants()) > 0)
        is_full = len(tokens) + 1 > int(extra * self.config.max_waiting_requests)
        if request.accepted_before or not (
            is_full or sum(tokens) + added > int(extra * self.config.max_waiting_tokens)
        ):
            self._report(AssertionError(f"{request.request_id} is refused by a queue that has room"))

    def abort(self, key: RequestKey) -> bool:
        done = super().abort(key)
        self._check()
        return done

    def hand_over(
        self, key: RequestKey, lease: Lease, now: float, lease_s: float
    ) -> list[tuple[BlockId, BlockHash]] | None:
        group = self.group(key)
        sequences = group.sequences if group is not None and group.request.selects else ()
        is_lost = any(each.num_output_tokens for each in sequences)
        sealed = super().hand_over(key, lease, now, lease_s)
        if sealed is not None and is_lost:
            self._report(AssertionError(f"{key} moves, and what it has generated is lost"))
        self._check()
        return sealed

    def renew_lease(self, lease: Lease, now: float, lease_s: float) -> None:
        super().renew_lease(lease, now, lease_s)
        leased = self.leases._leases.get(lease)
        if leased is not None and (not lease_s or leased.expires_at != now + lease_s):
            self._report(AssertionError("a lease whose blocks are fetched ends as before"))

    def abort_sequence(self, key: RequestKey, index: int) -> bool:
        done = super().abort_sequence(key, index)
        self._check()
        return done

    def apply(self, result: StepResult, now: float) -> dict[ClientId, ClientEvents]:
        charged = self._charged_drafts()
        events = super().apply(result, now)
        for client, batch in events.items():
            for handle in batch.handles:
                # When it came, and when its first token did.
                if len(times := self._times_of.get(RequestKey(client, handle), [0.0, 0.0])) == 1:
                    times.append(now)
            for end in batch.completed:
                self._check_times(RequestKey(client, end.handle), end, now)
        self._answered_at = now
        charged()
        self._check()
        return events

    def _check_times(self, key: RequestKey, end: RequestEnd, now: float) -> None:
        """The times of a request add up to what it took, and those before its first token to when that came."""
        usage, times = end.usage, self._times_of.pop(key, None)
        if times is None:
            # That of a pin which is computed again.
            return
        came, first = times[0], times[-1]
        before = usage.queue_s + usage.prefill_s
        is_right = abs(came + before + usage.decode_s - now) < _TOLERANCE_S and came + before < now + _TOLERANCE_S
        if not is_right or (first > came and came + before > first + _TOLERANCE_S):
            self._report(AssertionError(f"{usage} of a request that came at {came}, began at {first}, ended at {now}"))

    def _charged_drafts(self) -> Callable[[], None]:
        """What it returns, called when the oldest step was applied, demands that tenants were charged for each token
        that they got in it, but for the first of each row: these were charged with the plan."""
        if not isinstance(self.policy, FairPolicy) or not self.in_flight or self.in_flight[0].max_drafts is None:
            return lambda: None
        step, table = self.in_flight[0], self.batch.rows
        rows = step.rows[(table.incarnation[step.rows] == step.incarnations) & ~table.dependent[step.rows]]
        grow = [(each, each.num_tokens) for each in table.sequences_in(rows) if each is not None]
        before = {each.request.tenant: self._counter(each.request.tenant) for each, _ in grow}

        def check() -> None:
            further = Counter[str]()
            for each, count in grow:
                further[each.request.tenant] += max(each.num_tokens - count - 1, 0)
            if self._fairness is not None:
                self._fairness.serve(Counter(), further)
            for tenant, counter in before.items():
                if self._counter(tenant) != counter + SAMPLE_WEIGHT * further[tenant]:
                    self._report(AssertionError(f"{tenant} is not charged for {further[tenant]} further tokens"))

        return check

    def take_preparations(self) -> list[Preparation]:
        told = super().take_preparations()
        self._check()
        return told

    def prepared(
        self, number: int, failure: str | None = None, failed: frozenset[int] = frozenset()
    ) -> dict[ClientId, ClientEvents]:
        need = (self.preparations._underway | self.preparations._given_up)[number].need
        if isinstance(need, Constraint):
            self._compiled = [each for each in self._compiled if each != need] + [need]
        events = super().prepared(number, failure, failed)
        self._check()
        return events

    def judge_loss(self, *, was_alive: bool) -> dict[ClientId, ClientEvents]:
        """A link that broke counts against nobody where steps were answered over it, and nobody is at fault before it
        was tried alone."""
        loss, has_answered, before = self.trials._loss, self.trials._has_answered, dict(self.trials._losses)
        events = super().judge_loss(was_alive=was_alive)
        if was_alive and has_answered and self.trials._losses != before:
            self._report(AssertionError("a link that broke counts against a request"))
        for key, progress in ({} if loss is None else loss.progress).items():
            last, num, num_there = self._own_losses.get(key, (progress, 0, 0))
            num = num + 1 if last.num_tokens == progress.num_tokens else 1
            self._own_losses[key] = progress, num, num_there = progress, num, num_there + 1 if last == progress else 1
            counted = self.trials._losses.get(key)
            if counted is not None and (counted.num > num or counted.num_alone > num_there):
                self._report(AssertionError(f"losses of {key} count on, though it came further between them"))
        for failure in (failure for batch in events.values() for failure in batch.failed):
            if int(failure.message.partition(", the last ")[2].partition(" ")[0]) < LOSSES_ON_TRIAL:
                self._report(AssertionError(f"it is at fault without a trial: {failure.message}"))
        return events

    def refuse_in_flight(self, detail: str) -> dict[ClientId, ClientEvents]:
        # It would be planned again, and perhaps not refused then.
        self._report(AssertionError(f"a worker refuses a step: {detail}"))
        return super().refuse_in_flight(detail)

    def void_in_flight(self, now: float) -> None:
        if self._fairness is not None:
            for group in (*self.running, *self.swapped):
                self._fairness.leaves(group)
        super().void_in_flight(now)
        self._compiled.clear()
        self._check()

    def _enqueue(self, group: SequenceGroup) -> None:
        if self._fairness is not None:
            self._fairness.arrives(group.request)
        by_priority, tenant = self.config.policy is PolicyKind.PRIORITY, group.request.tenant
        place = -group.request.priority if by_priority else 0, next(self._arrivals)
        if (replaced := group.request.replaces) is not None:
            place = self._place_of.get(RequestKey(group.request.key.client, replaced), place)
        self._place_of[group.request.key] = place
        waiting, before = self.waiting.tenants() | self.swapped.tenants(), 0
        if comes_back := self.config.policy is PolicyKind.FAIR and bool(waiting) and tenant not in waiting:
            before = self._counter(tenant)
        super()._enqueue(group)
        if comes_back and self._counter(tenant) != max(before, min(map(self._counter, waiting))):
            self._report(AssertionError(f"{tenant} comes back ahead of all that wait, or behind"))

    def _preempt_for_decodes(self, now: float) -> bool:
        self._makes_slots = True
        try:
            return super()._preempt_for_decodes(now)
        finally:
            self._makes_slots = False

    def _needed_now(self) -> int:
        """Blocks that decoding rows take for their next tokens, counted one by one: new ones, and copies of shared ones
        for all that write to them but their last holder."""
        table, pool, needed, writers = self.batch.rows, self.batch.blocks.pool, 0, Counter[BlockId]()
        for row in table.decoding().tolist():
            sequence, index = self.batch.sequence(row), int(table.num_computed[row]) // self.config.block_size
            needed += index >= len(sequence.block_table)
            writers.update(sequence.block_table[index : index + 1])
        return needed + sum(min(count, pool.ref_count(block) - 1) for block, count in writers.items())

    def _preempt(self, group: SequenceGroup, now: float) -> None:
        if self._makes_slots and self.batch.blocks.has_retired:
            self._report(AssertionError(f"{group.request.request_id} makes room beside blocks of finished requests"))
        if self._makes_slots and self._needed_now() <= self.batch.blocks.pool.num_free:
            self._report(AssertionError(f"{group.request.request_id} makes room, and there is some"))
        if self.config.policy is not PolicyKind.FAIR:
            if group is not self.running.last():
                self._report(AssertionError(f"{group.request.request_id} makes room before those behind it"))
        elif self._makes_slots:
            tenant = group.request.tenant
            most = max(map(self._counter, self.running.tenants()))
            if self._counter(tenant) < most or group is not self.running.last_of(tenant):
                self._report(AssertionError(f"{group.request.request_id} makes room; {tenant} got less than others"))
        super()._preempt(group, now)
        if self._fairness is not None and group.request.key in self.swapped:
            # What is in flight is drawn again.
            self._fairness.leaves(group)

    def pin(
        self, tenant: str, token_ids: list[int], now: float, time_to_live: float, adapter: Adapter | None = None
    ) -> Pin:
        made = super().pin(tenant, token_ids, now, time_to_live, adapter)
        pinned = {name for each in self.pins if each.tenant == tenant for name in each.hashes}
        if len(pinned) > self.config.pin_quota * self.config.num_blocks:
            self._report(AssertionError(f"{tenant} pins {len(pinned)} blocks of {self.config.num_blocks}"))
        if (
            count := len({name for each in self.pins for name in each.hashes})
        ) > self.config.max_pinned * self.config.num_blocks:
            self._report(AssertionError(f"all pin {count} blocks of {self.config.num_blocks}"))
        return made

    def expire_pins(self, now: float) -> None:
        before = list(self.pins)
        super().expire_pins(now)
        if early := [pin.pin_id for pin in before if self.pins.of_key(pin.key) is None and pin.expires_at > now]:
            self._report(AssertionError(f"pins {early} end before their time"))

    def refit(self, config: SchedulerConfig, now: float) -> list[RequestFailure]:
        before = [group.request.key for group in self.waiting if group.request.key.client != PIN_CLIENT]
        ends = [pin.expires_at for pin in self.pins]
        failures = super().refit(config, now)
        self._watch_pins()
        # Blocks of another size give other ids.
        if longer := [pin.pin_id for pin in self.pins if pin.expires_at > max(ends) + 1e-6]:
            self._report(AssertionError(f"pins {longer} last longer than they were to"))
        failed = {failure.key for failure in failures}
        if lost := [key for key in before if key not in failed and self.group(key) is None]:
            self._report(AssertionError(f"{lost} are dropped without a word"))
        return failures

    def _forget_failed(self, arriving: Arriving, failed: Collection[int]) -> None:
        self.forgotten.update(arriving.hashes)
        super()._forget_failed(arriving, failed)

    def forget_cached(self) -> int:
        self.forgotten.update(self.tier._slots)
        return super().forget_cached()

    def restore_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        super().restore_sealed(sealed)
        self._check()

    def _displace(self, now: float) -> None:
        """Who displaces others goes before each of them, and finds room then."""
        before = {} if self.config.policy is PolicyKind.FCFS else dict.fromkeys(self.running)
        if self.config.policy is PolicyKind.FAIR:
            before = {group: self.batch.num_new_tokens(group) for group in before}
        super()._displace(now)
        displaced = [group for group in before if group.request.key not in self.running]
        if not displaced:
            return
        entering = self._entering
        assert entering is not None
        if self.config.policy is PolicyKind.FAIR:
            counter = self._counter(entering.request.tenant)
            if any((before[each] or 0) < TURN or self._counter(each.request.tenant) <= counter for each in displaced):
                self._report(AssertionError("a request displaces one whose turn is not over"))
        elif entering.request.priority <= max(group.request.priority for group in displaced):
            self._report(AssertionError("a request displaces one that does not come after it"))
        is_all = len(displaced) < scheduler_core._MAX_DISPLACED and len(self.running)
        if is_all and not self._room.fits(entering, self._room.to_grow()):
            self._report(AssertionError(f"{entering.request.request_id} displaces others in vain"))

    def _check(self) -> None:
        self._num_checks += 1
        self._adapter_use.observe()
        for pool in (self.batch.blocks.pool, self.batch.blocks.host.pool):
            if self._num_checks % _POOLS_LOOKED_AT == 0 and (wrong := out_of_order(pool)) is not None:
                self._report(AssertionError(wrong))
        if lost := [pin.pin_id for pin in self.pins if not pin.is_held and self.group(pin.key) is None]:
            self._report(AssertionError(f"pins {lost} hold nothing, and nobody computes them"))
        try:
            invariants.check(self)
        except Exception as error:
            # The service may catch it.
            self._report(error)
            raise

    @staticmethod
    def _report(error: Exception) -> None:
        node = CLOCK.get()
        assert isinstance(node, Node)
        node.fail(error)


def expire_checked(leases: Leases, now: float, pool: BlockPool) -> None:
    """Leases last as long as they were promised to, unless they give way."""
    before = {lease: leased.expires_at for lease, leased in leases._leases.items()}
    _expire(leases, now, pool)
    if any(ends_at > now for lease, ends_at in before.items() if lease not in leases._leases):
        CheckedScheduler._report(AssertionError("a lease ends early"))


_expire = Leases.expire


class RecordedScheduler(recorder._RecordedScheduler, CheckedScheduler):
    """The same, recorded."""

    def __init__(self, config: SchedulerConfig, names: Names, recording: Recorder) -> None:
        self._names = names
        super().__init__(config, recording.put, recording._hider)
