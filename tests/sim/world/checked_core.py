"""The core of a scheduler that checks itself: its invariants hold after every operation, and it keeps what its
policies, pins, leases and trials promise."""

import itertools
import math
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeVar, cast

import numpy as np

from quire.messages.prefix_hashes import BlockHash, PrefixHash, in_group
from quire.runtime.clock import monotonic
from scheduler_svc.core import admission, arrivals, invariants, planner, preparation
from scheduler_svc.core.admission import Obstacle
from scheduler_svc.core.arrivals import Arrivals
from scheduler_svc.core.cache_log import CacheLog
from scheduler_svc.core.config import PolicyKind, SchedulerConfig
from scheduler_svc.core.fault_isolation import LOSSES_ON_TRIAL, Progress
from scheduler_svc.core.kv_cache import num_cached
from scheduler_svc.core.moves import Arriving, Lease
from scheduler_svc.core.paging.batch import Array
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.pins import PIN_CLIENT, Pin
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.policy import PREFILL_WEIGHT, SAMPLE_WEIGHT, TURN, FairPolicy, GroupQueue
from scheduler_svc.core.prefix_index import PrefixHashes
from scheduler_svc.core.preparation import Preparation
from scheduler_svc.core.request import (
    Adapter,
    ClientId,
    Constraint,
    MovedBlocks,
    PinQuotaError,
    QueueFullError,
    RequestKey,
    cache_root,
    max_blocks_apart,
)
from scheduler_svc.core.request import Request as CoreRequest
from scheduler_svc.core.reservations import Kind, Owner, Reservations
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence as CoreSequence
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import ClientEvents, RequestEnd, RequestFailure, StepPlan, StepResult
from tests.sim.world.durations import Times, misread_pin
from tests.sim.world.fairness import Bills, Shares
from tests.sim.world.http_calls import salt_of
from tests.sim.world.leaving import AdapterUse, out_of_order
from tests.sim.world.onlooker import Onlooker
from tests.sim.world.tallies import Tally
from tests.sim.world.told import watched_log
from tests.sim.world.traffic import Generate
from tests.sim.world.traffic import Pin as PinRequest
from tests.sim.world.turns import Turns
from tests.sim.world.watch import Names, NamingBlocks, report

F = TypeVar("F", bound=Callable[..., Any])

_TOLERANCE_S = 1e-6
STEP_TIMEOUT_S = 5.0
"""How long a step may take."""
_STEPS_TO_PASS = 3
"""Answered steps after which a suspect passes."""
_MIN_TOKENS, _MIN_SHARE = 256, 8
"""Blocks of others are waited for where they have so many tokens, or this part of a step's."""
_LIKELY = 0.9
"""How probable a draft is at most."""
_UNDERWAY = 2
"""Constraints, and adapters, that are prepared at once."""
_NUM_PARTS = 8
"""In so many parts pins give their blocks back in the second half of their time."""
_LOOKED_AT = 8
"""In which order blocks are free, and what queues count, is looked at after so many operations."""


_CHECKED = {
    "arrivals": (
        *("submit", "abort", "abort_sequence", "pin", "expire_pins", "move_away", "refit", "take_preparations"),
        *("prepared", "_enqueue", "lose_in_flight", "judge_loss", "refuse_in_flight", "void_in_flight"),
    ),
    "planner": (
        *("schedule", "apply", "preempt", "_start", "_requeue_passed", "_hold", "_preempt_for_decodes", "_displace"),
    ),
}
"""The calls of each part of the core that go through a check of the same name."""


class CheckedScheduler(Scheduler):
    """The core, whose invariants hold after every operation that changes it from outside, and which is as fair as its
    policy promises."""

    asked: Mapping[str, Generate] = {}
    """What clients asked for, by the id."""
    told_s: Mapping[str, set[Times]] = defaultdict(set)
    """The times of requests that usage tells."""
    pinned: Collection[PinRequest] = ()
    """The prefixes that clients pin."""
    num_ranks = 1
    """The number of its workers."""
    _names: Names
    _fairness: Shares | None = None
    _entering: SequenceGroup | None = None
    """Whom others made room for last."""
    _makes_slots = False
    """Whether groups are preempted for the next tokens of others."""
    _is_refitting = False
    """Whether workers with another pool are being attached."""
    _has_preempted = False
    """Whether groups were, for those of the step that was planned last."""

    def __init__(self, config: SchedulerConfig, names: Names | None = None) -> None:
        known = self._names if names is None else names
        self._names = known
        super().__init__(config, lambda config: NamingBlocks(config, known))
        for part, calls in _CHECKED.items():
            for call in calls:
                # The parts call each other through the checks, too.
                setattr(getattr(self, part), call, MethodType(getattr(type(self), call), self))
                vars(self).pop(call, None)
        self._place_of: dict[RequestKey, tuple[int, int]] = {}
        self._compiled: list[Constraint] = []
        self._arrivals = itertools.count()
        self._own_losses: dict[RequestKey, tuple[Progress, int, int]] = {}
        self._answered_at = 0.0
        self._times_of: dict[RequestKey, list[float]] = {}
        self._fetched = set[RequestKey]()
        """Requests whose blocks were asked for."""
        self._entered: dict[RequestKey, dict[int, int]] = {}
        """Tokens that sequences had when their groups entered the batch last."""
        self._started_at: dict[RequestKey, float] = {}
        self._num_preempted = Counter[RequestKey]()
        self._searched_at: dict[RequestKey, float] = {}
        """When beam searches got their first tokens."""
        self._has_answered = self._had_answered = False
        """Whether a step was answered since the worker was attached, and was so when it was lost."""
        self._pinned_until: dict[str, tuple[float, float]] = {}
        self._num_answered = Counter[RequestKey]()
        self._turns, self._onlooker, self.tally, self.bills = Turns(), Onlooker(), Tally(), Bills()
        self._last_turn: str | None = None
        self._num_checks = 0
        self.forgotten = set[BlockHash]()
        """What it no longer wants from the disks, until they say that they have it again."""
        if config.policy is PolicyKind.FAIR:
            self._fairness = fairness = Shares(config.max_num_seqs)
            charge = self.policy.charge

            def count(plan: StepPlan, prefills: Array, tenants: Array) -> None:
                computed, sampled = Counter[str](), Counter[str](tenants[plan.samples[:, 0]].tolist())
                # Not by `prefills`, which is what is looked at.
                table, ends = self.batch.rows, plan.num_computed_tokens + plan.num_new_tokens
                goes_on = (self._goes_on[plan.rows] == table.incarnation[plan.rows]) & (
                    ends == table.num_entered[plan.rows]
                )
                is_chunk = (ends <= table.num_entered[plan.rows]) & ~goes_on
                chunks = plan.rows[is_chunk].tolist(), plan.num_new_tokens[is_chunk].tolist()
                for row, num_new in zip(*chunks, strict=True):
                    computed[str(tenants[row])] += num_new
                before = {tenant: self._counter(tenant) for tenant in {*computed, *sampled}}
                fairness.serve(computed, sampled)
                charge(plan, prefills, tenants)
                for tenant, counter in before.items():
                    cost = PREFILL_WEIGHT * computed[tenant] + SAMPLE_WEIGHT * sampled[tenant]
                    self.bills.charged[tenant] += self._counter(tenant) - counter
                    if self._counter(tenant) != counter + cost:
                        self._report(AssertionError(f"{tenant} is not charged for what a step computes"))

            self.policy.charge = count
            next_of = self.policy.next_of

            def note(*queues: GroupQueue) -> SequenceGroup:
                group = next_of(*queues)
                self._last_turn = group.request.tenant
                return group

            self.policy.next_of = note

    def make_pools(self) -> None:
        super().make_pools()
        requeue, victims, take_slot = self.batch.requeue, self.room.victims, self.batch.adapters.take
        fits = self.room.fits
        grow, self._adapter_use = self.batch._growth_of, AdapterUse(self.batch.adapters)
        self._had_drafts: dict[tuple[int, int], bool] = {}
        self._decode_s, self._num_sealed = 0.0, np.zeros(self.config.max_num_seqs, np.int64)
        self._goes_on = np.full(self.config.max_num_seqs, -1)
        """The incarnation of each row whose sequence came back with all computed but its newest token."""
        self.batch.start = self._with_room(self.batch.start, comes_back=False)
        self.batch.swap_in = self._with_room(self.batch.swap_in, comes_back=True)

        def leave(group: SequenceGroup) -> None:
            if self._fairness is not None:
                self._fairness.leaves(group)
            requeue(group)

        def note(group: SequenceGroup, candidates: Sequence[SequenceGroup], to_grow: int) -> list[SequenceGroup]:
            self._entering = group
            if not self._are_in_order(candidates):
                self._report(AssertionError("others are to leave before the newest ones of those who got the most"))
            if group.request.is_offer:
                self._report(
                    AssertionError(f"others are to leave for {group.request.request_id}, which runs elsewhere")
                )
            chosen = victims(group, candidates, to_grow)
            all_leave = len(chosen) == len(self.running)
            if not all_leave and self._make_room_by(chosen or candidates, group) != bool(chosen):
                self._report(AssertionError(f"{len(chosen)} of {len(candidates)} are to make room"))
            if self.config.policy is PolicyKind.FAIR and (alike := self._that_hold_little(group, candidates)):
                self._report(AssertionError(f"{group.request.tenant} displaces {alike}, who hold no more"))
            return chosen

        def fits_beside(group: SequenceGroup, to_grow: int) -> bool:
            does_fit = fits(group, to_grow)
            # Looked at here, since room may come while no step is planned. An offer needs more than it takes to enter.
            if not (does_fit or group.request.is_offer) and self._make_room_by((), group):
                self._report(AssertionError(f"{group.request.request_id} finds room, and does not enter"))
            return does_fit

        def take(adapter: Adapter) -> int | None:
            kept = self.batch.adapters.kept
            before, owed = self.batch.adapters.num_rows(), {*self.batch.adapters.owed.values()}
            drained = self._adapter_use.drained()
            slot = take_slot(adapter)
            if (wrong := self._adapter_use.wrong_choice(before, drained, kept)) is not None and adapter not in before:
                self._report(AssertionError(wrong))
            if owed & before.keys() - self.batch.adapters.num_rows().keys() - {adapter}:
                self._report(
                    AssertionError("an adapter leaves its slot before the request that it was loaded for runs")
                )
            return slot

        def grow_beside(rows: Array) -> tuple[Array | None, int]:
            num_free, left = self.batch.blocks.pool.num_free, self.batch.draft.budget - len(rows)
            growth, num_passes = grow(rows)
            if growth is not None and self._grows_too_far(rows, growth, num_passes, left):
                self._report(AssertionError(f"{len(rows)} rows get {growth} tokens more of {left}"))
            if self.batch.blocks.pool.num_free < min(num_free, self.batch.blocks.watermark_blocks):
                self._report(AssertionError("drafts take blocks that are kept for next tokens"))
            return growth, num_passes

        add_chunk = self.shares.add_chunk

        def add(row: int, shortest_behind: int = sys.maxsize) -> None:
            add_chunk(row, shortest_behind)
            aside, length = self.batch.draft.aside, self.batch.rows.num_uncomputed(row)
            if aside and aside[-1][0] == row and aside[-1][1] and not self._is_shorter_behind(row, length):
                name = self.batch.sequence(row).request.request_id
                self._report(AssertionError(f"{name} gets a share of a step, and no shorter prompt is behind it"))

        promise = self.room.promise

        def keep(group: SequenceGroup) -> None:
            num_free = self.batch.blocks.pool.num_free
            needed = self.room._blocks_taken(group) + self.room.growth_of(group)
            promise(group)
            if num_free - self.batch.blocks.pool.num_free != min(needed, num_free):
                self._report(AssertionError(f"other than {needed} blocks are kept for {group.request.request_id}"))

        give_way, forget_failed = self.room.give_way, self.fetches.forget_failed

        def owners(*, with_pins: bool) -> list[Owner]:
            leases, promises = self.reservations[Kind.LEASE], self.reservations.requests(Kind.PROMISE)
            pins = [(pin.expires_at, pin.key) for pin in self.pins if pin.is_held and with_pins]
            return [*leases, *reversed(promises), *(key for _, key in sorted(pins))]

        def end_first(*, may_end_pins: bool) -> bool:
            if may_end_pins and len(self.running) > 1:
                self._report(AssertionError("a pin ends for others than a request that runs alone"))
            before = owners(with_pins=may_end_pins)
            done = give_way(may_end_pins=may_end_pins)
            if owners(with_pins=may_end_pins) != before[1:]:
                self._report(AssertionError("another reservation gives way than the first"))
            return done

        def forget(arriving: Arriving, failed: Collection[int]) -> None:
            self.forgotten.update(arriving.hashes)
            forget_failed(arriving, failed)

        free_before_windows = self.batch.free_before_windows

        def free_sealed() -> None:
            table, chunk, size = self.batch.rows, self.config.max_num_batched_tokens, self.config.block_size
            most, before = -(-(max(self.config.window, chunk) + chunk) // size) + 1, table.windows_start.copy()
            free_before_windows()
            for row in (
                (table.active & (table.windows_start > np.maximum(before, table.num_sealed))).nonzero()[0].tolist()
            ):
                # With one block more, and the blocks of its next chunk.
                if (int(table.num_computed[row]) + chunk) // size + 2 - int(table.windows_start[row]) <= most:
                    self._report(AssertionError(f"row {row} frees blocks that no other sequence can find yet"))

        self.batch.free_before_windows = free_sealed
        self.room.give_way, self.fetches.forget_failed = end_first, forget
        self.room.promise = keep
        self.shares.add_chunk = add
        self.batch.requeue, self.room.victims, self.batch.adapters.take = leave, note, take
        self.batch._growth_of, self.room.fits = grow_beside, fits_beside

    def _with_room(self, enter: F, *, comes_back: bool) -> F:
        """Who enters beside others leaves room for their next tokens, and for those of the step that it comes back in,
        and rows for those that are to come from elsewhere. Nobody enters with an adapter that is to leave its slot."""

        def call(group: SequenceGroup) -> Any:
            batch, others_run = self.batch, self.room.others_run
            reserve = self._growth() + (-batch.blocks_for_decodes() if comes_back else self._first_growth(group))
            if self._has_preempted:
                self._report(AssertionError(f"{group.request.request_id} enters in a step that preempts others"))
            adapter = group.request.adapter
            if adapter is not None and (
                adapter in self._adapter_use.drained() or adapter not in batch.adapters.num_rows()
            ):
                self._report(AssertionError(f"{group.request.request_id} enters with an adapter that makes way"))
            num_free, needed = batch.blocks.pool.num_free, self.room._blocks_taken(group)
            self._entered[group.request.key] = {each.index: each.num_tokens for each in group.unfinished}
            done = enter(group)
            for each in group.computing if comes_back else ():
                if each.row is not None and each.num_output_tokens and batch.rows.num_uncomputed(each.row) == 1:
                    self._goes_on[each.row] = batch.rows.incarnation[each.row]
            if num_free - batch.blocks.pool.num_free > needed:
                self._report(AssertionError(f"{group.request.request_id} takes more than {needed} blocks"))
            kept = self._that_keep_rows - {group.request.key}
            if batch.rows.num_free < sum(len(self.waiting.get(key).unfinished) for key in kept):
                self._report(AssertionError(f"{group.request.request_id} takes a row that is kept for another one"))
            left = batch.blocks.pool.num_free - (batch.blocks_for_decodes() if comes_back else 0)
            if left < (max(reserve, batch.blocks.watermark_blocks) if others_run else 0):
                self._report(AssertionError(f"{group.request.request_id} leaves {left} blocks, others need {reserve}"))
            return done

        return cast(F, call)

    @property
    def _that_keep_rows(self) -> set[RequestKey]:
        """The requests that rows are kept for."""
        coming = filter(self.waiting.is_held, self.reservations.requests(Kind.COMING))
        return {*self.reservations.requests(Kind.PROMISE), *coming}

    def _growth(self) -> int:
        """Blocks that those that run take for the token after their next one, counted one by one."""
        table, blocks, count = self.batch.rows, self.batch.blocks, 0
        for each in (each for group in self.running for each in group.unfinished):
            if each.row is not None and table.active[each.row]:
                slots = min(int(table.num_tokens[each.row]) + 1, each.request.max_len - 1)
                count += max(blocks.layout.table_length(slots) - len(each.block_table), 0)
        return count + self._windowed_of_chunks() + self._shared_states(table.active.nonzero()[0].tolist())

    def _shared_states(self, rows: Sequence[int]) -> int:
        """Blocks that these rows take for states of their own: all sequences that share one but the last."""
        if not (size := self.config.state_blocks):
            return 0
        firsts = Counter(self.batch.sequence(row).state_blocks[0] for row in rows)
        return size * sum(min(count, self.batch.blocks.pool.ref_count(each) - 1) for each, count in firsts.items())

    def _windowed_of_chunks(self) -> int:
        """Blocks of windowed groups that prompts take for their next chunks, counted one by one."""
        table, layout, blank, count = self.batch.rows, self.batch.blocks.layout, self.batch.blocks.blank, 0
        for row in table.prefilling().tolist() if blank else ():
            first, sequence = int(table.num_computed[row]), self.batch.sequence(row)
            end = min(first + self.config.max_num_batched_tokens, int(table.num_tokens[row]))
            entries = range(first // layout.block_size * layout.num_groups, layout.table_length(end))
            are_blank = [
                sequence.block_table[each] in blank for each in entries if each % layout.num_groups >= layout.num_full
            ]
            count += sum(are_blank)
        return count

    def _first_growth(self, group: SequenceGroup) -> int:
        """Blocks that a group that waits takes for the first token of each of its sequences, beyond those it has."""
        blocks = self.batch.blocks
        slots = ((each, min(each.num_tokens + 1, each.request.max_len - 1)) for each in group.unfinished)
        length = blocks.layout.table_length
        states = self.config.state_blocks * (len(group.unfinished) - len(group.computing))
        return states + sum(max(length(end) - length(each.num_tokens), 0) for each, end in slots)

    def _that_hold_little(self, entering: SequenceGroup, candidates: Sequence[SequenceGroup]) -> set[str]:
        """Tenants of candidates that hold less than twice what the one that enters holds then, when the last of these
        would leave: rows where it lacks these, or else blocks."""
        blocks = self.batch.blocks

        def held_by(tenant: str) -> int:
            own = [each for group in self.running if group.request.tenant == tenant for each in group.unfinished]
            tables = [block for each in own for block in (*each.block_table, *each.state_blocks)]
            held = [block for block in tables if block not in blocks.blank]
            return len(own if self.room.lacks_rows(entering) else held)

        wanted = held_by(entering.request.tenant) + (
            len(entering.unfinished)
            if self.room.lacks_rows(entering)
            else sum(blocks.blocks_for(each.num_tokens) for each in entering.computing)
        )
        leaving = defaultdict[str, list[int]](list)
        for each in candidates:
            size = sum(blocks.blocks_for(one.num_tokens) for one in each.computing)
            leaving[each.request.tenant].append(len(each.unfinished) if self.room.lacks_rows(entering) else size)
        held = {tenant: held_by(tenant) - sum(sizes[:-1]) for tenant, sizes in leaving.items()}
        return {tenant for tenant, count in held.items() if count < 2 * wanted}

    def _is_shorter_behind(self, row: int, length: int) -> bool:
        """Whether a prompt with less to compute is behind this one, or among the next that wait."""
        table, blocks = self.batch.rows, self.batch.blocks
        behind = [each for each in table.prefilling().tolist() if table.order[each] >= table.order[row]]
        if any(table.num_uncomputed(each) < length for each in behind):
            return True
        known = self.shares._num_uncached
        for group in self.waiting.next_few(admission._NUM_LOOKED_AT):
            uncached = group.num_tokens_to_compute - num_cached(blocks, group.computing[0]) * blocks.block_size
            if min(uncached, known.get(group.request.key, uncached)) < length:
                return True
        return False

    def _grows_too_far(self, rows: Array, growth: Array, num_passes: int, left: int) -> bool:
        """Whether drafts take more than half of what is left of a step, or are where they do not pay; a row that had
        none lately has none of further passes."""
        fixed, most = self.config.fixed_tokens, self.config.max_drafts
        pays = len(rows) <= _LIKELY * (fixed + len(rows))
        had_some = [self._had_drafts.get((row, int(self.batch.rows.incarnation[row])), True) for row in rows.tolist()]
        draws = ~self.batch.rows.dependent[rows]
        if most and (np.array(had_some) != self.batch.drafts.had_some[rows])[draws].any():
            self._report(AssertionError("it is not known which rows had drafts lately"))
        drafts = growth - (num_passes - 1)
        bound = most * np.where(had_some, num_passes, 1) if pays else 0
        return bool(2 * growth.sum() > left or (drafts > bound).any())

    def _are_in_order(self, candidates: Sequence[SequenceGroup]) -> bool:
        """Whether those that got the most leave first, and of them the newest."""
        is_fair = self.config.policy is PolicyKind.FAIR
        ranks = [(self._counter(each.request.tenant) if is_fair else 0, each.request.tenant) for each in candidates]
        places = [(count, each.order) for (count, _), each in zip(ranks, candidates, strict=True)]
        equal = len({count for count, _ in ranks}) < len({tenant for _, tenant in ranks})
        return equal or places == sorted(places, reverse=True)

    def _make_room_by(self, leaving: Sequence[SequenceGroup], group: SequenceGroup) -> bool:
        """Whether the group may enter beside others when these have left."""
        blocks, pool = self.batch.blocks, self.batch.blocks.pool
        sequences = [each for other in leaving for each in other.unfinished]
        others = self._that_keep_rows - {group.request.key}
        kept = sum(len(self.waiting.get(key).unfinished) for key in others)
        if len(group.unfinished) + kept > self.batch.rows.num_free + len(sequences):
            return False
        taken = {block for each in group.computing for block in blocks.cached_start(each).all_blocks}
        holders = Counter(block for each in sequences for block in (*each.block_table, *each.state_blocks))
        num_freed = sum(count == pool.ref_count(block) for block, count in holders.items() if block not in taken)
        needed, reserve = self._needed_by(group)
        return needed + max(reserve, blocks.watermark_blocks) <= pool.num_free + num_freed

    def _needed_by(self, group: SequenceGroup) -> tuple[int, int]:
        """Blocks that a group takes as it enters, and that it leaves then for the next tokens of all."""
        if group.request.key not in self.swapped:
            taken = self.batch.blocks.blocks_to_allocate(group.computing)
            return taken, self._growth() + self._first_growth(group)
        to_decode = self._needed_now()
        return self.batch.blocks.blocks_to_swap_in(group.computing) + to_decode, self._growth() - to_decode

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
        table = self.batch.rows
        prefilling = {row: (int(table.order[row]), table.num_uncomputed(row)) for row in table.prefilling().tolist()}
        prompts = (table.active & table.prefills).nonzero()[0].tolist()
        num_prompts = len(self.waiting) + len(prompts)
        plan = Planner.schedule(self.planner, now)
        if self.batch.blocks.blank or self.config.state_blocks:
            self._check_windows()
        self.tally.planned(plan)
        # The checkpoints that rows wait for take no further blocks.
        if plan is not None and plan.step_id in self.batch.checkpoints and plan.max_drafts is None:
            self._check_room_beside_checkpoints()
        if plan is not None and self.preparations.suspect_is_next:
            self._report(AssertionError("a step is planned, and what may be deadly waits for the end of all steps"))
        self._observe_fairness()
        self._check()
        if plan is not None and self.num_preemptions == num_before and not (are_trials or self.trials.are_on):
            self._check_shares(plan, first)
            if prefilling:
                self._check_first(plan, prefilling)
            # Requests that came back to the queue while the step was planned wait in it, or have entered again.
            num_prompts = max(num_prompts, len(self.waiting) + len(prompts) + len(plan.assign))
            self._check_mixed(plan, _num_decodes(plan, prompts), num_prompts)
        # With drafts it is not known how much of a step was kept for them.
        most, limit = self.config.max_num_batched_tokens, self.config.max_mixed_prefill_tokens
        if limit is not None and plan is not None and (num_decodes := _num_decodes(plan, prompts)):
            most = min(most, num_decodes + limit)
        if self.config.state_blocks:
            # A prompt waits if its chunk, or what is left of it, would be one token.
            most -= admission.LEAST_CHUNK_WITH_STATE - 1
        is_full = plan is None or plan.max_drafts is not None or plan.num_tokens >= most
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

    def _check_room_beside_checkpoints(self) -> None:
        """Checkpoints leave the blocks that decodes take for their next tokens and states, and the watermark."""
        rows, blocks = self.batch.rows.decoding(), self.batch.blocks
        needed = blocks.num_groups * len(self.batch.rows.without_slot(rows)) + self._shared_states(rows.tolist())
        if blocks.pool.num_free < max(needed, blocks.watermark_blocks):
            left = blocks.pool.num_free
            self._report(AssertionError(f"checkpoints leave {left} blocks, and decodes take {needed} next"))

    def _check_windows(self) -> None:
        """The core counts what rows take and tenants hold as one by one, and finds all that is cached."""
        held = Counter[str]()
        for each in (each for group in self.running for each in group.unfinished):
            table = (*each.block_table, *each.state_blocks)
            held[each.request.tenant] += sum(block not in self.batch.blocks.blank for block in table)
        if +self.batch.blocks_by_tenant() != +held:
            self._report(AssertionError(f"tenants hold {held} blocks, {self.batch.blocks_by_tenant()} are counted"))
        if (counted := self.batch.blocks_for_decodes()) != (needed := self._needed_now()):
            self._report(AssertionError(f"rows take {needed} blocks next, {counted} are counted"))
        for group in (*self.waiting.next_few(1), *self.swapped.next_few(1)):
            self._check_longest(group.computing[0])

    def _check_longest(self, sequence: CoreSequence) -> None:
        """A sequence counts as cached up to the longest start that all groups of layers can serve."""
        blocks, known = self.batch.blocks, self.batch.blocks.pool._by_hash
        names = sequence.prefix_hashes.first(sequence.num_shareable, sequence.token_ids)
        if self.config.state_blocks:
            # A prompt's last token must not be the only one that is computed.
            names = names[: max(sequence.max_cached_tokens - 1, 0) // self.config.block_size]
            if sequence.request.num_sequences > 1 and max_blocks_apart(sequence.request, self.config) is None:
                # There is no room for states at several places.
                names = names[: max(sequence.num_prompt_tokens - 2, 0) // self.config.block_size]
        longest = max(
            num_blocks
            for num_blocks in range(len(names) + 1)
            if all(in_group(names[index], group) in known for index, group in self._read_behind(num_blocks))
            and self._state_names(names[:num_blocks]) <= known.keys()
            # Nor must it be with output behind it.
            and not (
                num_blocks
                and self.config.state_blocks
                and num_blocks * self.config.block_size == sequence.num_prompt_tokens - 1
            )
        )
        if (found := len(blocks.cached_start(sequence).blocks)) != longest * blocks.num_groups:
            name = sequence.request.request_id
            self._report(AssertionError(f"{name} finds {found} blocks, {longest} of each group are cached"))

    def _state_names(self, hashes: Sequence[PrefixHash]) -> set[BlockHash]:
        """The names of the checkpoint behind blocks with these hashes."""
        config = self.config
        num_groups = config.full_groups + config.windowed_groups
        return {in_group(each, num_groups + piece) for each in hashes[-1:] for piece in range(config.state_blocks)}

    def _check_first(self, plan: StepPlan, prefilled: Mapping[int, tuple[int, int]]) -> None:
        """The first prompt goes on by its share of what decodes leave at least, or to its end. `prefilled` has the
        order and the length of those that were in the batch before."""
        table, chunks = self.batch.rows, dict(zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True))
        row, (order, length) = min(prefilled.items(), key=lambda each: (each[1][0], each[0]))
        is_first = all(table.order[each.row] > order for each in plan.assign) and row not in plan.release.tolist()
        # Rows that waited for a state may begin before it.
        begun = (each for each, count in chunks.items() if count > 1 and each not in prefilled)
        is_first &= all(table.order[each] > order for each in begun)
        if plan.max_drafts is not None or not is_first:
            return
        # A sequence that comes back may decode in the step in which it enters.
        num_decodes = sum(count == 1 and each not in prefilled for each, count in chunks.items())
        left = self.config.max_num_batched_tokens - num_decodes
        if num_decodes and self.config.max_mixed_prefill_tokens is not None:
            left = min(left, self.config.max_mixed_prefill_tokens)
        least = admission.LEAST_CHUNK_WITH_STATE if self.config.state_blocks else 1
        # The rest must not be one token, if layers keep states.
        slack = int(self.config.state_blocks > 0)
        if chunks.get(row, 0) < min(length, max(least, int(left * self.config.max_prefill_share)) - slack):
            name = self.batch.sequence(row).request.request_id
            self._report(AssertionError(f"{name} is first, and gets {chunks.get(row, 0)} of {left} tokens of a step"))

    def _check_mixed(self, plan: StepPlan, num_decodes: int, num_prompts: int) -> None:
        """The streams of a step do not wait for more tokens of prompts than the configuration says, unless more prompts
        wait than streams run."""
        limit, num_new = self.config.max_mixed_prefill_tokens, plan.num_new_tokens
        # A row with one token may decode, also one that comes back from host memory.
        num_prefilled = int(num_new[num_new > 1].sum())
        if limit is None or plan.max_drafts is not None or not num_prompts <= num_decodes > 0:
            return
        if num_prefilled > limit:
            self._report(AssertionError(f"{num_decodes} streams wait for {num_prefilled} tokens of prompts"))

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
        least = admission.LEAST_CHUNK_WITH_STATE if self.config.state_blocks else 1
        most = max(least, int(self.config.max_num_batched_tokens * self.config.max_prefill_share))
        # It also gets tokens that are too few for another prompt.
        most += least - 1
        for row, count in chunks.items():
            is_prefilling = rows.active[row] and rows.prefills[row]
            length, order = count + (rows.num_uncomputed(row) if is_prefilling else 0), int(rows.order[row])
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
            "adapters that requests are owed": waits.adapters.owed,
            "losses of requests": trials._losses,
            "room for requests": self.reservations.requests(Kind.PROMISE, Kind.COMING),
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
        self._started_at.setdefault(group.request.key, now)
        Planner._start(self.planner, group, now)
        self.tally.begun(group)
        self.bills.enters(group, self.batch.rows)
        source, own = group.request.source, MovedBlocks(group.request.key)
        is_asked = own.key in self._fetched or own in [each.need for each in self.preparations._underway.values()]
        if source is not None and num_cached is None and not (is_asked or self.trials.are_on):
            self._report(AssertionError(f"{group.request.request_id} runs, and nobody has asked for its blocks"))
        if num_cached not in (None, group.cached_tokens):
            self._report(AssertionError(f"{group.request.request_id} counts its own blocks as cached"))

    def _observe_fairness(self) -> None:
        if self._fairness is not None:
            self._fairness.observe(frozenset(self._tenants_with_next()))

    def log_cache(self) -> CacheLog:
        """Whoever is told of changes knows what is cached, and what that is, and is told of nothing that is as it
        was."""
        return watched_log(super().log_cache(), self, self._names)

    def submit(self, request: CoreRequest, now: float) -> None:
        if (asked := self.asked.get(request.request_id)) is not None:
            adapter = None if request.adapter is None else request.adapter.name
            come = request.tenant, adapter, request.cache_salt, tuple(request.prompt[: len(asked.prompt)])
            if come != (asked.tenant, asked.adapter, salt_of(asked), asked.prompt):
                self._report(AssertionError(f"{request.request_id} comes with another tenant, adapter, salt or prompt"))
            if asked.front is None and request.priority != asked.priority:
                self._report(AssertionError(f"{request.request_id} comes with priority {request.priority}"))
        is_full = self._is_full(request)
        try:
            Arrivals.submit(self.arrivals, request, now)
        except QueueFullError:
            if not is_full:
                self._report(AssertionError(f"{request.request_id} is refused by a queue that has room"))
            raise
        if is_full:
            self._report(AssertionError(f"{request.request_id} is taken by a queue that has no room"))
        if request.key.client != PIN_CLIENT:
            self.tally.count("offered" if request.is_offer else "submitted")
        self._times_of[request.key] = [now]
        added = len(request.prompt) + sum(len(each.token_ids) for each in request.emitted if not each.has_ended)
        if self.waiting._tokens[request.key] != added:
            self._report(AssertionError(f"{request.request_id} counts {self.waiting._tokens[request.key]} tokens"))
        self._check()

    def _is_full(self, request: CoreRequest) -> bool:
        """Whether the queue has no room for a request: tenants share it, and who has less than its share finds room
        beyond the bounds."""
        config, counted = self.config, self.waiting._tokens
        waiting = [each.request for each in self.waiting]
        num_tenants = len({request.tenant, *(each.tenant for each in waiting)})
        own = [each for each in waiting if each.tenant == request.tenant]
        added = len(request.prompt) + sum(len(each.token_ids) for each in request.emitted if not each.has_ended)

        def lacks(bound: int, total: int, held: int, added: int) -> bool:
            if not total or total + added <= bound:
                return False
            has_share = not held or held + added <= max(bound // num_tenants, 1)
            return num_tenants == 1 or not has_share or total + added > bound + int(bound * config.tenant_overflow)

        def tokens(requests: list[CoreRequest]) -> int:
            return sum(counted[each.key] for each in requests)

        return not request.accepted_before and (
            lacks(config.max_waiting_requests, len(waiting), len(own), 1)
            or lacks(config.max_waiting_tokens, tokens(waiting), tokens(own), added)
        )

    def abort(self, key: RequestKey) -> bool:
        done = Arrivals.abort(self.arrivals, key)
        self._check()
        return done

    def move_away(
        self, key: RequestKey, lease: Lease, now: float, lease_s: float
    ) -> list[tuple[BlockId, BlockHash]] | None:
        group = self.group(key)
        sequences = group.sequences if group is not None and group.request.selects else ()
        is_lost = any(each.num_output_tokens for each in sequences)
        wanted = set[BlockHash]() if group is None else self._that_move(group)
        sealed = Arrivals.move_away(self.arrivals, key, lease, now, lease_s)
        if sealed is not None and wanted - {name for _, name in sealed}:
            self._report(AssertionError(f"{key} moves, and leaves blocks that its next token reads"))
        if sealed is not None and is_lost:
            self._report(AssertionError(f"{key} moves, and what it has generated is lost"))
        self.tally.count("out", sealed is not None)
        self._check()
        return sealed

    def _that_move(self, group: SequenceGroup) -> set[BlockHash]:
        """The names of sealed blocks that the next token of a group reads, of the longest start that full groups have,
        without blocks that come from the host."""
        table, pool, config = self.batch.rows, self.batch.blocks.pool, self.config
        coming = {block for step in self.in_flight for block in step.from_host.tolist()}
        wanted = set[BlockHash]()
        for each in group.computing if self.batch.blocks.blank or config.state_blocks else ():
            count = int(table.num_sealed[each.row]) if each.row is not None and table.active[each.row] else 0
            hashes = each.prefix_hashes.first(count, each.token_ids)
            full = [
                all(in_group(name, group) in pool._by_hash for group in range(config.full_groups)) for name in hashes
            ]
            num_found = (*full, False).index(False)
            for index, part in self._read_behind(num_found):
                wanted.add(in_group(hashes[index], part))
            checkpoints = (self._state_names(hashes[:end]) for end in range(num_found, 0, -1))
            wanted |= next((names for names in checkpoints if names <= pool._by_hash.keys()), set())
        return {name for name in wanted if pool._by_hash.get(name, BlockId(-1)) not in {BlockId(-1), *coming}}

    def renew_lease(self, lease: Lease, now: float, lease_s: float | None) -> None:
        before = self.reservations[Kind.LEASE].get(lease)
        super().renew_lease(lease, now, lease_s)
        if before is not None and lease_s is None and 0 < before.num_fetched < self.num_ranks:
            self._report(AssertionError("a lease ends before each rank has sent its part of the blocks"))
        leased = self.reservations[Kind.LEASE].get(lease)
        if leased is not None and (not lease_s or leased.expires_at != now + lease_s):
            self._report(AssertionError("a lease whose blocks are fetched ends as before"))

    def abort_sequence(self, key: RequestKey, index: int) -> bool:
        done = Arrivals.abort_sequence(self.arrivals, key, index)
        self._check()
        return done

    def apply(self, result: StepResult, now: float) -> dict[ClientId, ClientEvents]:
        charged = self._charged_drafts()
        step = self.in_flight[0] if self.in_flight else None
        searching = (
            [group for group in self.running if group.beams is not None] if self.batch.rows.num_dependent else []
        )
        if self.trials.are_on and step is not None:
            sequences = [self.batch.rows.sequences[row] for row in step.rows.tolist()]
            self._num_answered.update({each.request.key for each in sequences if each is not None})
        applied, running = (
            self.tally.applying(self, result),
            {group.request.key: group.request for group in self.running},
        )
        events = Planner.apply(self.planner, result, now)
        applied(events)
        self._has_answered = True
        for group in searching:
            if group.beams is not None and group.beams.num_generated:
                self._searched_at.setdefault(group.request.key, now)
        if step is not None and result.num_drafts is not None:
            places = zip(step.rows.tolist(), step.incarnations.tolist(), strict=True)
            self._had_drafts.update(zip(places, (result.num_drafts > 0).tolist(), strict=True))
        if step is not None and not step.has_chunks:
            self._decode_s = now - max(step.planned, self._answered_at)
        if self.pace._step_s != self._decode_s:
            self._report(AssertionError(f"a step of decodes took {self._decode_s} s, {self.pace._step_s} are noted"))
        for client, batch in events.items():
            for handle in batch.handles:
                # When it came, and when its first token did.
                if len(times := self._times_of.get(RequestKey(client, handle), [0.0, 0.0])) == 1:
                    times.append(now)
            for end in batch.completed:
                self._check_times(RequestKey(client, end.handle), end, now)
                request, usage = running[RequestKey(client, end.handle)], end.usage
                self.bills.ends(request, usage)
                self.told_s[request.request_id].add((usage.queue_s, usage.prefill_s, usage.decode_s))
        self._answered_at = now
        charged()
        self._check()
        return events

    def _check_times(self, key: RequestKey, end: RequestEnd, now: float) -> None:
        """The times of a request add up to what it took, and those before its first token to when that came."""
        usage, times, searched_at = end.usage, self._times_of.pop(key, None), self._searched_at.pop(key, None)
        if times is None:
            # That of a pin which is computed again.
            return
        came, first, started = times[0], times[-1], self._started_at.pop(key)
        if usage.preemptions != (count := self._num_preempted.pop(key, 0)):
            self._report(AssertionError(f"{usage} of a request that was preempted {count} times"))
        if abs(came + usage.queue_s - started) > _TOLERANCE_S:
            self._report(AssertionError(f"{usage} of a request that came at {came}, and entered at {started}"))
        before = usage.queue_s + usage.prefill_s
        if searched_at is not None and abs(came + before - searched_at) > _TOLERANCE_S:
            self._report(AssertionError(f"{usage} of a search that came at {came}, and got its first at {searched_at}"))
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
        sequences = [table.sequences[row] for row in rows.tolist()]
        grow = [(each, each.num_tokens) for each in sequences if each is not None]
        before = {each.request.tenant: self._counter(each.request.tenant) for each, _ in grow}

        def check() -> None:
            further = Counter[str]()
            for each, count in grow:
                further[each.request.tenant] += max(each.num_tokens - count - 1, 0)
            if self._fairness is not None:
                self._fairness.serve(Counter(), further)
            for tenant, counter in before.items():
                self.bills.charged[tenant] += self._counter(tenant) - counter
                if self._counter(tenant) != counter + SAMPLE_WEIGHT * further[tenant]:
                    self._report(AssertionError(f"{tenant} is not charged for {further[tenant]} further tokens"))

        return check

    def take_preparations(self) -> list[Preparation]:
        wanted = self._turns.wanted(self.preparations)
        told = Arrivals.take_preparations(self.arrivals)
        if (wrong := self._turns.wrong(wanted, [each.need for each in told])) is not None:
            self._report(AssertionError(wrong))
        self._fetched.update(each.need.key for each in told if isinstance(each.need, MovedBlocks))
        waits = self.preparations
        kinds = Counter(type(each.need) for each in waits._underway.values())
        if max(kinds[Constraint], kinds[Adapter]) > _UNDERWAY:
            self._report(AssertionError(f"{kinds} are prepared at once"))
        coming = {each.need for each in waits._underway.values()}.union(*waits._wanted.values())
        if lost := waits._held.keys() - coming:
            self._report(AssertionError(f"requests wait for {lost}, which nobody prepares"))
        self._check(is_changed=bool(told))
        return told

    def prepared(
        self, number: int, failure: str | None = None, failed: frozenset[int] = frozenset()
    ) -> dict[ClientId, ClientEvents]:
        known = (self.preparations._underway | self.preparations._late)[number]
        need, arriving = known.need, known.arriving
        if isinstance(need, Constraint):
            self._compiled = [each for each in self._compiled if each != need] + [need]
        events = Arrivals.prepared(self.arrivals, number, failure, failed)
        if arriving is not None:
            self.tally.fetched(arriving, len(failed))
        if arriving is not None and any(arriving.hashes[index] in self.tier for index in failed):
            self._report(AssertionError("blocks that did not come from disk are asked for again"))
        self._check()
        return events

    def lose_in_flight(self, detail: str | None = None) -> None:
        Arrivals.lose_in_flight(self.arrivals, detail)
        self._had_answered = self._has_answered
        if not self.in_flight and (loss := self.trials._loss) is not None and loss.progress:
            self._report(AssertionError("a loss without a step in flight counts for requests"))

    def judge_loss(self, *, was_alive: bool) -> dict[ClientId, ClientEvents]:
        """A link that broke counts against nobody where steps were answered over it, and else against all that ran;
        nobody is at fault before it was tried alone."""
        loss, has_answered, before = self.trials._loss, self._had_answered, dict(self.trials._losses)
        self._num_answered.clear()
        events = Arrivals.judge_loss(self.arrivals, was_alive=was_alive)
        self._has_answered = False
        if loss is not None and not loss.needs and not (was_alive and has_answered):
            counted = self.trials._losses
            if [key for key in loss.progress if self.group(key) is not None and counted.get(key) is before.get(key)]:
                self._report(AssertionError("a loss does not count against a request that ran"))
        if was_alive and has_answered and self.trials._losses != before:
            self._report(AssertionError("a link that broke counts against a request"))
        for key, progress in ({} if loss is None else loss.progress).items():
            last, num, num_there = self._own_losses.get(key, (progress, 0, 0))
            num = num + 1 if last.num_tokens == progress.num_tokens else 1
            self._own_losses[key] = progress, num, num_there = progress, num, num_there + 1 if last == progress else 1
            counted = self.trials._losses.get(key)
            # One that counts against nobody leaves what is counted as it was.
            is_last = counted is not None and counted.progress == progress
            if counted is not None and is_last and (counted.num > num or counted.num_alone > num_there):
                self._report(AssertionError(f"losses of {key} count on, though it came further between them"))
        for failure in (failure for batch in events.values() for failure in batch.failed):
            if int(failure.message.partition(", the last ")[2].partition(" ")[0]) < LOSSES_ON_TRIAL:
                self._report(AssertionError(f"it is at fault without a trial: {failure.message}"))
        return events

    def refuse_in_flight(self, detail: str) -> dict[ClientId, ClientEvents]:
        # It would be planned again, and perhaps not refused then.
        self._report(AssertionError(f"a worker refuses a step: {detail}"))
        return Arrivals.refuse_in_flight(self.arrivals, detail)

    def _requeue_passed(self, now: float) -> None:
        before, num_running = self.trials._suspects, len(self.running)
        Planner._requeue_passed(self.planner, now)
        if len(self.running) < num_running and not self.trials.are_on:
            self._report(AssertionError("requests make way for suspects, and there is none"))
        passed = [key for key in before if key not in self.trials._suspects and self.group(key) is not None]
        if early := [key for key in passed if self._num_answered[key] < _STEPS_TO_PASS]:
            self._report(AssertionError(f"suspects {early} pass after fewer than {_STEPS_TO_PASS} steps"))

    def _hold(self, group: SequenceGroup) -> bool:
        held = Planner._hold(self.planner, group)
        if held:
            num_cached = len(self.batch.blocks.cached_start(group.computing[0]).blocks) // self.batch.blocks.num_groups
            ends = [end for _, end, key in self.batch.underway.awaited() if key == group.request.key]
            least = max(1, min(_MIN_TOKENS, self.config.max_num_batched_tokens // _MIN_SHARE) // self.config.block_size)
            if ends and max(ends) - num_cached < least:
                name = group.request.request_id
                self._report(AssertionError(f"{name} waits for {max(ends) - num_cached} blocks of another one"))
            if self.config.state_blocks and (rows := self._that_makes(group, max(ends, default=0))) is not None:
                self._report(
                    AssertionError(f"{group.request.request_id} waits for a checkpoint that {rows} never make")
                )
        return held

    def _that_makes(self, group: SequenceGroup, num_blocks: int) -> list[int] | None:
        """The rows that the group waits for; None if one of them is to make a checkpoint behind this number of blocks,
        until there is no more room."""
        place, states = num_blocks * self.config.block_size, self.batch.blocks.states
        rows = [row for row, end, key in self.batch.underway.awaited() if (key, end) == (group.request.key, num_blocks)]
        computed, made = self.batch.rows.num_computed, itertools.chain(*self.batch.checkpoints.values())
        is_made = [place in states.wanted(self.batch.sequence(row), int(computed[row]), place) for row in rows]
        is_underway = any(each.row in rows and each.num_tokens == place for each in made)
        return None if not rows or is_underway or any(is_made) else rows

    def void_in_flight(self, now: float) -> None:
        if self._fairness is not None:
            for group in (*self.running, *self.swapped):
                self._fairness.leaves(group)
        Arrivals.void_in_flight(self.arrivals, now)
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
            # So few tenants are all remembered.
            before = cast(FairPolicy, self.policy).counters.get(tenant, 0)
        floor, last = (self.policy._floor, self._last_turn) if isinstance(self.policy, FairPolicy) else (0, None)
        count = self._counter(tenant) if last is not None and not waiting else 0
        Arrivals._enqueue(self.arrivals, group)
        if last is not None and not waiting and self._counter(tenant) != max(count, floor, self._counter(last)):
            self._report(AssertionError(f"{tenant} comes alone, and starts from another count than {last} has"))
        if comes_back and self._counter(tenant) != max(before, min(map(self._counter, waiting))):
            self._report(AssertionError(f"{tenant} comes back ahead of all that wait, or behind"))

    def _preempt_for_decodes(self, now: float) -> bool:
        self._makes_slots = True
        try:
            self._has_preempted = Planner._preempt_for_decodes(self.planner, now)
            return self._has_preempted
        finally:
            self._makes_slots = False

    def _needed_now(self) -> int:
        """Blocks that decoding rows take for their next tokens, counted one by one: new ones, and copies of shared ones
        for all that write to them but their last holder."""
        table, pool, needed, writers = self.batch.rows, self.batch.blocks.pool, 0, Counter[BlockId]()
        num_groups = self.batch.blocks.num_groups
        for row in table.decoding().tolist():
            sequence, index = self.batch.sequence(row), int(table.num_computed[row]) // self.config.block_size
            written = sequence.block_table[index * num_groups : (index + 1) * num_groups]
            needed += num_groups - len(written)
            writers.update(written)
        needed += self._windowed_of_chunks() + self._shared_states(table.decoding().tolist())
        return needed + sum(min(count, pool.ref_count(block) - 1) for block, count in writers.items())

    def preempt(self, group: SequenceGroup, now: float) -> None:
        if self._makes_slots and self.batch.blocks.retired:
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
        Planner.preempt(self.planner, group, now)
        self._num_preempted[group.request.key] += 1
        self.tally.count("preemptions")
        self.tally.count("swap_outs", group.request.key in self.swapped)
        self.bills.leaves(group)
        if self._fairness is not None and group.request.key in self.swapped:
            # What is in flight is drawn again.
            self._fairness.leaves(group)

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
        before = {pin.pin_id for pin in self.pins}
        if not accepted_before and (wrong := misread_pin(self.pinned, tenant, token_ids, time_to_live)) is not None:
            self._report(AssertionError(wrong))
        try:
            made = Arrivals.pin(
                self.arrivals, tenant, token_ids, now, time_to_live, adapter, accepted_before=accepted_before
            )
        except PinQuotaError:
            if not self._exceeds_quota(tenant, token_ids, adapter):
                self._report(AssertionError(f"{tenant} may not pin blocks that there is room for"))
            raise
        except QueueFullError:
            if self._is_refitting:
                self._report(AssertionError(f"{tenant} loses a pin for a full queue when its worker is back"))
            if before - {pin.pin_id for pin in self.pins}:
                self._report(AssertionError(f"{tenant} loses a pin that is pinned again"))
            raise
        self._pinned_until[made.pin_id] = now + time_to_live, time_to_live
        pinned = {name for each in self.pins if each.tenant == tenant for name in each.hashes}
        if len(pinned) > self.config.pin_quota * self.config.num_blocks:
            self._report(AssertionError(f"{tenant} pins {len(pinned)} blocks of {self.config.num_blocks}"))
        if (
            count := len({name for each in self.pins for name in each.hashes})
        ) > self.config.max_pinned * self.config.num_blocks:
            self._report(AssertionError(f"all pin {count} blocks of {self.config.num_blocks}"))
        return made

    def _exceeds_quota(self, tenant: str, token_ids: list[int], adapter: Adapter | None) -> bool:
        """Whether pins would have too many blocks with this one."""
        size, num_blocks = self.config.block_size, self.config.num_blocks
        hashes = PrefixHashes(cache_root(tenant, adapter), size).first(len(token_ids) // size, token_ids)
        names = [in_group(hashes[index], group) for index, group in self._read_behind(len(hashes))]
        names += self._state_names(hashes[:-1])
        own = {name for each in self.pins if each.tenant == tenant for name in each.hashes}
        every = {name for each in self.pins for name in each.hashes}
        return len(own.union(names)) > int(self.config.pin_quota * num_blocks) or len(every.union(names)) > int(
            self.config.max_pinned * num_blocks
        )

    def _read_behind(self, num_blocks: int) -> list[tuple[int, int]]:
        """The logical indices and groups of the blocks that the first token behind this number of blocks reads."""
        config = self.config
        first = max(num_blocks * config.block_size - config.window + 1, 0) // config.block_size
        num_groups = config.full_groups + config.windowed_groups
        return [
            (index, group)
            for index in range(num_blocks)
            for group in range(num_groups if index >= first else config.full_groups)
        ]

    def expire_pins(self, now: float) -> None:
        before = list(self.pins)
        Arrivals.expire_pins(self.arrivals, now)
        if early := [pin.pin_id for pin in before if self.pins.of_key(pin.key) is None and pin.expires_at > now]:
            self._report(AssertionError(f"pins {early} end before their time"))
        if arrivals._MAX_EXPIRED > 1 and (wrong := [pin for pin in self.pins if self._holds_wrongly(pin, now)]):
            told = [(len(pin.blocks), len(pin.token_ids), self._pinned_until[pin.pin_id]) for pin in wrong]
            self._report(AssertionError(f"at {now} pins hold more or fewer blocks than they are to: {told}"))

    def _holds_wrongly(self, pin: Pin, now: float) -> bool:
        """Whether a pin holds other blocks than its time says: all in its first half, then an eighth fewer each
        sixteenth. With windows or states it holds all to its end, and a checkpoint before its last block."""
        ends_at, seconds = self._pinned_until[pin.pin_id]
        config, num_logical = self.config, len(pin.token_ids) // self.config.block_size
        num_parts = 1 if config.windowed_groups or config.state_blocks else min(num_logical, _NUM_PARTS)
        num_blocks = len(self._read_behind(num_logical)) + config.state_blocks * (num_logical > 1)
        left = 2 * (ends_at - now) / seconds * num_parts
        least, most = (min(math.ceil(left + each), num_parts) for each in (-_TOLERANCE_S, _TOLERANCE_S))
        held = len(pin.blocks)
        return pin.is_held and not -(-num_blocks * least // num_parts) <= held <= -(-num_blocks * most // num_parts)

    def refit(self, config: SchedulerConfig, now: float) -> list[RequestFailure]:
        before = [group.request.key for group in self.waiting if group.request.key.client != PIN_CLIENT]
        ends = {pin.pin_id: pin.expires_at for pin in self.pins}
        self._is_refitting = True
        failures = Arrivals.refit(self.arrivals, config, now)
        self._is_refitting = False
        # Blocks of another size give other ids.
        if longer := [pin.pin_id for pin in self.pins if pin.expires_at > max(ends.values()) + 1e-6]:
            self._report(AssertionError(f"pins {longer} last longer than they were to"))
        failed = {failure.key for failure in failures}
        if lost := [key for key in before if key not in failed and self.group(key) is None]:
            self._report(AssertionError(f"{lost} are dropped without a word"))
        return failures

    def forget_cached(self) -> int:
        self.forgotten.update(self.tier._slots)
        count, blocks = super().forget_cached(), self.batch.blocks
        if len(self.tier) or blocks.pool.num_cached or blocks.host.pool.num_cached:
            self._report(AssertionError("what is cached is to be forgotten, and is known"))
        return count

    def restore_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        super().restore_sealed(sealed)
        if (wrong := out_of_order(self.batch.blocks.pool)) is not None:
            self._report(AssertionError(wrong))
        self._check()

    def _displace(self, now: float) -> None:
        """Who displaces others goes before each of them, and finds room then."""
        before = {} if self.config.policy is PolicyKind.FCFS else dict.fromkeys(self.running)
        if self.config.policy is PolicyKind.FAIR:
            before = {group: self.batch.num_new_tokens(group) for group in before}
            for group in before:
                first, had = group.computing[0], self._entered[group.request.key]
                if first.row is not None and self.batch.rows.num_entered[first.row] != had[first.index]:
                    self._report(AssertionError(f"{group.request.request_id} counts other tokens than it entered with"))
        Planner._displace(self.planner, now)
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
        is_all = len(displaced) < planner._MAX_DISPLACED and self.room.others_run
        # Its blocks may be fetched into that room.
        waits = isinstance(self.preparations.needed_by(entering.request.key), MovedBlocks)
        if is_all and not waits and not self.room.fits(entering, self.room.to_grow()):
            self._report(AssertionError(f"{entering.request.request_id} displaces others in vain"))

    def _check(self, *, is_changed: bool = True) -> None:
        """Looks at all that should hold. Where nothing changed, the invariants hold as they did, or the next operation
        finds that they do not."""
        self._num_checks += 1
        self._adapter_use.observe()
        self._turns.wanted(self.preparations)
        self._check_sealed()
        self._check_held_as_new()
        for pool in (self.batch.blocks.pool, self.batch.blocks.host.pool):
            if self._num_checks % _LOOKED_AT == 0 and (wrong := out_of_order(pool)) is not None:
                self._report(AssertionError(wrong))
        if self._num_checks % _LOOKED_AT == 0 and not all(map(_adds_up, (self.running, self.swapped, self.waiting))):
            self._report(AssertionError("a queue counts other groups or tokens than it has"))
        if self._num_checks % (2 * _LOOKED_AT) == 0 and (wrong := self._onlooker.look(self)) is not None:
            self._report(AssertionError(wrong))
        if lost := [pin.pin_id for pin in self.pins if not pin.is_held and self.group(pin.key) is None]:
            self._report(AssertionError(f"pins {lost} hold nothing, and nobody computes them"))
        if not is_changed:
            return
        try:
            invariants.check(self)
        except Exception as error:
            # The service may catch it.
            self._report(error)
            raise

    def _check_held_as_new(self) -> None:
        """What has run elsewhere is not held with what never ran."""
        for group in self.waiting.held_few(len(self.waiting)) if self.new_wait_until is not None else ():
            key = group.request.key
            waits = self.batch.underway.is_known(key) or self.preparations.needed_by(key)
            if group.request.emitted and not (group.request.is_offer or waits):
                self._report(AssertionError(f"{group.request.request_id} ran elsewhere, and is held as new"))

    def _check_sealed(self) -> None:
        """What a row counts as sealed was sealed once, by whomever, or another row of the request is to seal it."""
        table = self.batch.rows
        now = table.incarnation * (1 << 32) + table.num_sealed
        for row in (table.active & (now != self._num_sealed)).nonzero()[0].tolist():
            count, sequence = int(table.num_sealed[row]), self.batch.sequence(row)
            if not count or _names_of(sequence, count)[-1] in self._names:
                continue
            # To be looked at again.
            now[row] = -1
            others = self.running.get(sequence.request.key).unfinished
            if not any(
                each is not sequence
                and count <= each.num_tokens // self.config.block_size
                and _names_of(each, count) == _names_of(sequence, count)
                and each.row is not None
                and table.num_sealed[each.row] < count
                for each in others
            ):
                self._report(AssertionError(f"row {row} counts {count} blocks as sealed, and nobody seals the last"))
        self._num_sealed = now

    _report = staticmethod(report)


def _names_of(sequence: CoreSequence, count: int) -> list[PrefixHash]:
    """The names of its first blocks, of the first group of layers."""
    return sequence.prefix_hashes.first(count, sequence.token_ids)


def _adds_up(queue: GroupQueue) -> bool:
    """Whether a queue counts what it has."""
    groups, tokens = Counter[str](), Counter[str]()
    for group in queue:
        groups[group.request.tenant] += 1
        tokens[group.request.tenant] += queue._tokens[group.request.key]
    are_right = groups == queue._num_of_tenant and tokens == queue._tokens_of_tenant
    return are_right and queue.num_tokens == tokens.total() and len(queue) == groups.total()


def expire_checked(reservations: Reservations, now: float) -> None:
    """Leases last as long as they were promised to, unless they give way."""
    before = [*reservations[Kind.LEASE].values()]
    _expire(reservations, now)
    if any(each.expires_at > now for each in before if each.owner not in reservations[Kind.LEASE]):
        CheckedScheduler._report(AssertionError("a lease ends early"))


_expire = Reservations.expire_leases


def _num_decodes(plan: StepPlan, prefilled: Collection[int]) -> int:
    """The number of rows that decode, of a step without drafts."""
    prompts = {*prefilled, *(each.row for each in plan.assign)}
    rows = zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), strict=True)
    return sum(count == 1 and row not in prompts for row, count in rows)
