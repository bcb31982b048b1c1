"""Queues of groups, and the policies that order admission and preemption.

The policy is chosen once, at the start. The scheduler asks it which group of its queues is next and reports each
planned step; everything else about scheduling is the same under all policies.
"""

import heapq
import itertools
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, KeysView
from collections.abc import Sequence as SequenceOf
from typing import NamedTuple

from scheduler_svc.core.config import PolicyKind, SchedulerConfig
from scheduler_svc.core.paging import sequence
from scheduler_svc.core.paging.batch import Array
from scheduler_svc.core.paging.sequence import ORDER
from scheduler_svc.core.request import MAX_PRIORITY, Request, RequestKey, check_shared_bound
from scheduler_svc.core.running_batch import Batch
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import StepPlan

_MANY = 32
"""Minimum number of groups that are removed together from a queue, in one pass over its entries."""


class GroupQueue(sequence.GroupQueue[SequenceGroup]):
    """Groups by their `order`, lowest first, and the groups of each tenant in the same order.

    Orders are unique; the policy assigns them. Searching costs O(log n); adding and removing moves the machine words
    behind the place. A group can be held: it stays in the queue with its order, and `first`, `last` and similar methods
    skip it until it is released.
    """

    def __init__(self, on_new_first: Callable[[str, int], None] | None = None) -> None:
        """Calls `on_new_first` with a tenant and an order when a group of this order becomes the tenant's first."""
        super().__init__()
        self._on_new_first = on_new_first
        self._of_tenant: dict[str, list[SequenceGroup]] = {}
        self._tokens: dict[Hashable, int] = {}
        self._held: dict[SequenceGroup, None] = {}
        self._tokens_of_tenant: Counter[str] = Counter()
        self._num_of_tenant: Counter[str] = Counter()
        self.num_tokens = 0
        """Tokens that all groups would have to compute if none were cached, as of the time when each was added."""
        self.num_changes = 0
        """Number of times that a group was added or removed."""

    def __iter__(self) -> Iterator[SequenceGroup]:
        return iter(sorted((*self._groups, *self._held), key=ORDER) if self._held else self._groups)

    def next_few(self, count: int) -> list[SequenceGroup]:
        """The first `count` groups that are not held."""
        return self._groups[:count]

    def held_few(self, count: int) -> list[SequenceGroup]:
        """At most `count` held groups, in no order."""
        return list(itertools.islice(self._held, count))

    def is_held(self, key: RequestKey) -> bool:
        return self._by_key.get(key) in self._held

    def hold(self, key: RequestKey) -> None:
        """Holds a group. It must not be held already. Raises KeyError if it is not here."""
        group = self._by_key[key]
        self._take_out_of_order([group])
        self._held[group] = None

    def release(self, key: RequestKey) -> None:
        """Returns a held group to its place. Does nothing if it is not here or not held."""
        group = self._by_key.get(key)
        if group is not None and group in self._held:
            del self._held[group]
            insort(self._groups, group, key=ORDER)
            self._add_to_tenant(group)

    def release_all(self) -> None:
        for group in list(self._held):
            self.release(group.request.key)

    def all(self) -> list[SequenceGroup]:
        """All groups, in any order; safe in another thread than the one that changes the queue."""
        return list(self._by_key.values())

    def tenants(self) -> KeysView[str]:
        return self._num_of_tenant.keys()

    def tenants_with_next(self) -> KeysView[str]:
        """Tenants that have a group here that is not held."""
        return self._of_tenant.keys()

    def num_of(self, tenant: str) -> int:
        return self._num_of_tenant[tenant]

    def num_tokens_of(self, tenant: str) -> int:
        return self._tokens_of_tenant[tenant]

    def first_of(self, tenant: str) -> SequenceGroup:
        return self._of_tenant[tenant][0]

    def last_of(self, tenant: str) -> SequenceGroup:
        return self._of_tenant[tenant][-1]

    def newest_of(self, tenant: str) -> Iterator[SequenceGroup]:
        """The tenant's groups that are not held, the highest order first."""
        return reversed(self._of_tenant.get(tenant, ()))

    def newest_from(self, lowest: int) -> list[SequenceGroup]:
        """The groups with this order or a higher one that are not held, the highest first."""
        return self._groups[bisect_left(self._groups, lowest, key=ORDER) :][::-1]

    def add(self, group: SequenceGroup) -> None:
        super().add(group)
        self._add_to_tenant(group)
        self.num_changes += 1
        num_tokens = self._tokens[group.key] = group.num_tokens_to_compute
        self.num_tokens += num_tokens
        self._tokens_of_tenant[group.request.tenant] += num_tokens
        self._num_of_tenant[group.request.tenant] += 1

    def remove(self, key: Hashable) -> SequenceGroup:
        group = self._by_key[key]
        self.remove_all([group])
        return group

    def remove_all(self, groups: SequenceOf[SequenceGroup]) -> None:
        """Removes groups. All must be here."""
        self._take_out_of_order(groups)
        for group in groups:
            del self._by_key[group.key]
            tenant = group.request.tenant
            num_tokens = self._tokens.pop(group.key)
            self.num_tokens -= num_tokens
            num_left = self._num_of_tenant[tenant] - 1
            if num_left:
                self._num_of_tenant[tenant] = num_left
                self._tokens_of_tenant[tenant] -= num_tokens
            else:
                del self._num_of_tenant[tenant], self._tokens_of_tenant[tenant]
        self.num_changes += len(groups)

    def take_all(self) -> list[SequenceGroup]:
        """Removes all groups and returns them, in order."""
        groups = list(self)
        of_groups = (self._groups, self._by_key, self._tokens, self._held)
        for each in (*of_groups, self._of_tenant, self._tokens_of_tenant, self._num_of_tenant):
            each.clear()
        self.num_tokens = 0
        self.num_changes += len(groups)
        return groups

    def _add_to_tenant(self, group: SequenceGroup) -> None:
        tenant = group.request.tenant
        own = self._of_tenant.setdefault(tenant, [])
        insort(own, group, key=ORDER)
        if own[0] is group and self._on_new_first is not None:
            self._on_new_first(tenant, group.order)

    def _take_out_of_order(self, groups: SequenceOf[SequenceGroup]) -> None:
        if len(groups) >= _MANY:
            removed = set(groups)
            self._held = {group: None for group in self._held if group not in removed}
            self._groups = [group for group in self._groups if group not in removed]
            for tenant in {group.request.tenant for group in groups} & self._of_tenant.keys():
                own = [group for group in self._of_tenant[tenant] if group not in removed]
                if own:
                    self._of_tenant[tenant] = own
                else:
                    del self._of_tenant[tenant]
            return
        for group in groups:
            if group in self._held:
                del self._held[group]
                continue
            del self._groups[bisect_left(self._groups, group.order, key=ORDER)]
            own = self._of_tenant[group.request.tenant]
            del own[bisect_left(own, group.order, key=ORDER)]
            if not own:
                del self._of_tenant[group.request.tenant]


class Queues(NamedTuple):
    """Live groups are in exactly one of three queues: `running` groups have rows and GPU blocks, `swapped` groups have
    host blocks, `waiting` groups have neither."""

    waiting: GroupQueue
    swapped: GroupQueue
    running: GroupQueue

    def queue_of(self, key: RequestKey) -> GroupQueue | None:
        """The queue that a group is in; None if it is not live."""
        return next((queue for queue in (self.running, self.waiting, self.swapped) if key in queue), None)

    def is_live(self, key: RequestKey) -> bool:
        return self.queue_of(key) is not None

    def release(self, keys: Iterable[RequestKey]) -> None:
        """Ends the waiting of these groups."""
        for key, queue in itertools.product(keys, (self.waiting, self.swapped)):
            queue.release(key)


def check_queue(request: Request, waiting: GroupQueue, config: SchedulerConfig) -> None:
    """Raises QueueFullError if the bounds of the queue have no room for a request. A request that was accepted before
    is exempt."""
    if request.accepted_before:
        return
    tenants, tenant = waiting.tenants(), request.tenant
    num_tenants = len(tenants) + (tenant not in tenants)
    check_shared_bound(
        "requests would be waiting",
        config.max_waiting_requests,
        total=len(waiting),
        own=waiting.num_of(tenant),
        added=1,
        num_tenants=num_tenants,
        overflow=config.tenant_overflow,
    )
    check_shared_bound(
        "tokens would be waiting",
        config.max_waiting_tokens,
        total=waiting.num_tokens,
        own=waiting.num_tokens_of(tenant),
        added=len(request.prompt) + sum(len(each.token_ids) for each in request.emitted if not each.has_ended),
        num_tenants=num_tenants,
        overflow=config.tenant_overflow,
    )


class Policy:
    """First come, first served (the paper's section 4.5): the oldest is admitted first, the newest preempted first."""

    def order(self, request: Request, arrival: int) -> int:
        """The group's place in queues, unique and permanent; lower goes first. `arrival` numbers requests."""
        return arrival

    def arriving(self, tenant: str, *queues: GroupQueue) -> None:
        """A request of this tenant is about to join one of these queues, which hold all groups that wait to enter."""

    def new_first(self, tenant: str, order: int) -> None:
        """A group of this order became the tenant's first in a queue of groups that wait to enter the batch."""

    def next_of(self, *queues: GroupQueue) -> SequenceGroup:
        """The group of these queues that enters the batch next. One of them `has_next`."""
        return min((queue.first() for queue in queues if queue.has_next), key=ORDER)

    def victims(self, running: GroupQueue) -> Iterator[SequenceGroup]:
        """The groups to preempt, one after the other. Each must leave the queue before the next is requested, and no
        group may join it meanwhile."""
        while len(running):
            yield running.last()

    def displaced_by(
        self, entering: SequenceGroup, running: GroupQueue, batch: Batch, *, lacks_rows: bool
    ) -> SequenceOf[SequenceGroup]:
        """The running groups that `entering` may displace if there is no room for it otherwise, in the order in which
        they leave. It lacks rows if `lacks_rows`, otherwise blocks."""
        return ()

    def charge(self, plan: StepPlan, prefills: Array, tenants: Array) -> None:
        """Charges a planned step. `prefills`, bool[rows], says which rows had not sampled before it; `tenants`,
        str[rows], has the tenant of each row."""

    def charge_drafts(self, tenants: Array, counts: Array) -> None:
        """Charges tokens that samples brought in addition to their first. `tenants`, str[n], has the tenant of each."""


class PriorityPolicy(Policy):
    """Higher priority first, first come first served among equals.

    A group that waits or is swapped displaces groups of lower priority if there is no room for it otherwise.
    """

    _ORDERS_PER_PRIORITY = 1 << 48
    """More than the number of requests that can ever arrive."""

    def order(self, request: Request, arrival: int) -> int:
        return (MAX_PRIORITY - request.priority) * self._ORDERS_PER_PRIORITY + arrival

    def displaced_by(
        self, entering: SequenceGroup, running: GroupQueue, batch: Batch, *, lacks_rows: bool
    ) -> SequenceOf[SequenceGroup]:
        return running.newest_from((MAX_PRIORITY - entering.request.priority + 1) * self._ORDERS_PER_PRIORITY)


PREFILL_WEIGHT = 1
SAMPLE_WEIGHT = 2
TURN = 32
"""Tokens that each sequence of a group gets before another tenant displaces the group."""


class FairPolicy(Policy):
    """Equal service to all tenants that have requests: virtual token counters (Sheng et al., Fairness in Serving Large
    Language Models, OSDI 2024).

    Every tenant has a counter of the service that it got,

        c = PREFILL_WEIGHT * (prompt tokens computed) + SAMPLE_WEIGHT * (tokens sampled),

    where cached tokens cost nothing, and tokens that are computed again after a preemption count again. Among the
    tenants with waiting or swapped groups, the one with the lowest counter is next to enter the batch, with its oldest
    group. Under memory pressure the tenant with the highest counter is preempted, newest group first. A tenant that
    comes back after it had no requests starts from the lowest counter of the tenants that wait or are swapped, or, if
    there are none, from the counter of the tenant whose turn came last. So idle time earns no credit.

    Counters by themselves would let one tenant's wide and long requests keep all others out until they end. So a group
    that finds no room displaces groups of tenants that have a higher counter and hold at least twice what its own
    tenant would hold with it. Holdings are counted in rows if rows are missing, otherwise in blocks, as if no block
    were shared. Each displaced group has had TURN tokens since it entered. Tenants with similar holdings do not
    displace each other, so groups do not oscillate.

    Bound: let tenants f and g both have waiting or swapped requests throughout an interval in which nothing is computed
    again, and let c_f >= c_g at a moment t of it. When a group of f last entered the batch, at s, c_f(s) <= c_g(s).
    Since then c_f grew only by tokens that the groups of f running at s had still to get, at most max_num_seqs
    sequences of max_len tokens, so

        c_f(t) - c_g(t) <= U = SAMPLE_WEIGHT * max_num_seqs * max_len,

    and the service that both get in that interval differs by at most 2 U, for any length of it and any requests.
    Each preemption of a group of f adds the tokens that are computed again.
    """

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        """The counters of tenants that are active, or ahead of active ones."""
        self._floor = 0
        """The lowest counter that a waiting tenant had when it was last looked at."""
        self._chosen: tuple[str, ...] = ()
        """The tenant whose turn came last; empty before the first turn."""
        # A heap of the tenants with groups that wait or are swapped: counter, order of the first such group, tenant.
        # Counters rise, so an entry may be too low; it is replaced when it comes first. A lower order adds an entry.
        # `_entries` has the newest entry of each tenant; all other entries are void.
        self._heap: list[tuple[int, int, str]] = []
        self._entries: dict[str, tuple[int, int, str]] = {}
        self._held: set[str] = set()
        """Tenants without an entry because all their groups were held."""

    def arriving(self, tenant: str, *queues: GroupQueue) -> None:
        if any(tenant in queue.tenants() for queue in queues):
            return
        known = self.counters.get(tenant)
        lowest = self._raise_floor(queues)
        self.counters[tenant] = lowest if known is None else max(known, lowest)

    def new_first(self, tenant: str, order: int) -> None:
        self._held.discard(tenant)
        entry = (self._counter(tenant), order, tenant)
        known = self._entries.get(tenant)
        if known is None or entry < known:
            self._entries[tenant] = entry
            heapq.heappush(self._heap, entry)
            if len(self._heap) > 2 * len(self._entries) + 64:
                self._heap = sorted(self._entries.values())

    def next_of(self, *queues: GroupQueue) -> SequenceGroup:
        tenant = self._next_tenant(queues)
        assert tenant is not None, "no group is next"
        self._floor = max(self._floor, min(map(self._counter, (tenant, *self._held))))
        self._chosen = (tenant,)
        return _first_of(tenant, queues)

    def victims(self, running: GroupQueue) -> Iterator[SequenceGroup]:
        heap = [(-self._counter(tenant), -running.last_of(tenant).order, tenant) for tenant in running.tenants()]
        heapq.heapify(heap)
        while heap:
            count, _, tenant = heap[0]
            yield running.last_of(tenant)
            if tenant in running.tenants():
                heapq.heapreplace(heap, (count, -running.last_of(tenant).order, tenant))
            else:
                heapq.heappop(heap)

    def displaced_by(
        self, entering: SequenceGroup, running: GroupQueue, batch: Batch, *, lacks_rows: bool
    ) -> SequenceOf[SequenceGroup]:
        def size_of(group: SequenceGroup) -> int:
            if lacks_rows:
                return len(group.unfinished)
            return sum(batch.blocks.blocks_for(each.num_tokens) for each in group.computing)

        tenant = entering.request.tenant
        held = batch.rows_by_tenant() if lacks_rows else batch.blocks_by_tenant()
        wanted, counter = held[tenant] + size_of(entering), self._counter(tenant)
        ahead = [each for each, size in held.items() if size >= 2 * wanted and self._counter(each) > counter]
        displaced: list[SequenceGroup] = []
        for other in sorted(ahead, key=self._counter, reverse=True):
            for group in running.newest_of(other):
                if held[other] < 2 * wanted:
                    break
                if batch.num_new_tokens(group) >= TURN:
                    displaced.append(group)
                    held[other] -= size_of(group)
        return displaced

    def charge(self, plan: StepPlan, prefills: Array, tenants: Array) -> None:
        # All rows may sample, so samples are counted by tenant, not row by row. Only few rows compute a chunk.
        sampled: Counter[str] = Counter(tenants[plan.samples[:, 0]].tolist())
        for tenant, count in sampled.items():
            self.counters[tenant] = self._counter(tenant) + SAMPLE_WEIGHT * count
        computes_chunk = prefills[plan.rows]
        chunks = zip(tenants[plan.rows[computes_chunk]], plan.num_new_tokens[computes_chunk].tolist(), strict=True)
        for tenant, num_new in chunks:
            self.counters[tenant] = self._counter(tenant) + PREFILL_WEIGHT * num_new

    def charge_drafts(self, tenants: Array, counts: Array) -> None:
        for tenant, count in zip(tenants.tolist(), counts.tolist(), strict=True):
            self.counters[tenant] = self._counter(tenant) + SAMPLE_WEIGHT * count

    def _counter(self, tenant: str) -> int:
        # A tenant that was forgotten was at the floor or below.
        return self.counters.get(tenant, self._floor)

    def _next_tenant(self, queues: SequenceOf[GroupQueue]) -> str | None:
        """The tenant with the lowest counter that has a group in these queues that is not held; None if none has."""
        while self._heap:
            entry = self._heap[0]
            tenant = entry[2]
            if self._entries.get(tenant) != entry:
                heapq.heappop(self._heap)
            elif any(tenant in queue.tenants_with_next() for queue in queues):
                current = (self._counter(tenant), _first_of(tenant, queues).order, tenant)
                if current == entry:
                    return tenant
                self._entries[tenant] = current
                heapq.heapreplace(self._heap, current)
            else:
                heapq.heappop(self._heap)
                del self._entries[tenant]
                if any(tenant in queue.tenants() for queue in queues):
                    self._held.add(tenant)
        return None

    def _raise_floor(self, queues: SequenceOf[GroupQueue]) -> int:
        """Returns the counter from which a tenant that arrives now starts. It is below the floor if a preempted group
        waits whose tenant got less service than the one that ran without competition meanwhile."""
        # A tenant that is served at once never waits together with others. Without `_chosen` the floor would then never
        # rise, and all tenants that ever came would be ahead of it.
        following = self._next_tenant(queues)
        self._held = {tenant for tenant in self._held if any(tenant in queue.tenants() for queue in queues)}
        wanting = [*self._held] if following is None else [following, *self._held]
        lowest = min(map(self._counter, wanting or self._chosen), default=self._floor)
        self._floor = max(self._floor, lowest)
        num_tenants = sum(len(queue.tenants()) for queue in queues)
        if max(len(self.counters), len(self._heap)) > 2 * num_tenants + 64:
            tenants = {tenant for queue in queues for tenant in queue.tenants()}
            # A tenant at or below the floor starts from the floor, whether its counter is remembered or not.
            self.counters = {
                tenant: count for tenant, count in self.counters.items() if count > self._floor or tenant in tenants
            }
            self._entries = {tenant: entry for tenant, entry in self._entries.items() if tenant in tenants}
            self._heap = sorted(self._entries.values())
        return lowest if wanting else self._floor


def _first_of(tenant: str, queues: SequenceOf[GroupQueue]) -> SequenceGroup:
    """The first of the tenant's groups that is not held."""
    return min((queue.first_of(tenant) for queue in queues if tenant in queue.tenants_with_next()), key=ORDER)


POLICIES = {PolicyKind.FCFS: Policy, PolicyKind.PRIORITY: PriorityPolicy, PolicyKind.FAIR: FairPolicy}
