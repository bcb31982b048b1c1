"""Who goes first: the order in which groups are admitted and preempted.

A policy is chosen once, at the start. The scheduler asks it which group of its queues is next and tells it what was
planned; everything else about scheduling is the same under all policies.
"""

import heapq
from collections.abc import Callable, Iterator
from collections.abc import Sequence as SequenceOf

from scheduler_svc.core.config import PolicyKind
from scheduler_svc.core.queues import GroupQueue
from scheduler_svc.core.request import MAX_PRIORITY, Request
from scheduler_svc.core.sequence import Sequence, SequenceGroup
from scheduler_svc.core.step_plan import StepPlan

_RANKS_PER_PRIORITY = 1 << 48
"""More than requests can ever arrive."""


class Policy:
    """First come, first served (the paper's section 4.5): the oldest is admitted first, the newest preempted first."""

    def rank(self, request: Request, arrival: int) -> int:
        """The group's place in queues, unique and for good; lower goes first. `arrival` numbers requests."""
        return arrival

    def arriving(self, tenant: str, *queues: GroupQueue) -> None:
        """A request of this tenant is about to join one of these queues, which hold all that are to enter the batch."""

    def next_of(self, *queues: GroupQueue) -> SequenceGroup:
        """Who of these queues enters the batch next. One of them `has_next`."""
        return min((queue.first() for queue in queues if queue.has_next), key=_rank)

    def new_first(self, tenant: str, rank: int) -> None:
        """A group of this rank became the first of this tenant in one of the queues of those who are to enter."""

    def victims(self, running: GroupQueue) -> Iterator[SequenceGroup]:
        """Who is preempted, one after the other. Each must have left the queue before the next is taken, and nobody
        may join it meanwhile."""
        while len(running):
            yield running.last()

    def displaces_from(self, entering: SequenceGroup) -> int | None:
        """The lowest rank of running groups that this one may push out, where there is no room for it otherwise; None
        where it may push out nobody."""
        return None

    def planned(self, plan: StepPlan, prefills: list[bool], sequence_of: Callable[[int], Sequence]) -> None:
        """A step was planned. `prefills` says which rows of its batch have not sampled before it."""


class PriorityPolicy(Policy):
    """Higher priority first, first come first served among equals.

    A group that waits or is swapped preempts groups of lower priority when there is no room for it otherwise.
    """

    def rank(self, request: Request, arrival: int) -> int:
        return (MAX_PRIORITY - request.priority) * _RANKS_PER_PRIORITY + arrival

    def displaces_from(self, entering: SequenceGroup) -> int | None:
        return (MAX_PRIORITY - entering.request.priority + 1) * _RANKS_PER_PRIORITY


PREFILL_WEIGHT = 1
SAMPLE_WEIGHT = 2


class FairPolicy(Policy):
    """Equal service to all tenants that want it: virtual token counters (Sheng et al., Fairness in Serving Large
    Language Models, OSDI 2024).

    Every tenant has a counter of the service that it got,

        c = PREFILL_WEIGHT * (prompt tokens computed) + SAMPLE_WEIGHT * (tokens sampled),

    where what the prefix cache had costs nothing and recomputation after a preemption counts again, since it was
    computed. Of the tenants with groups that wait or are swapped, the one with the lowest counter is next to enter the
    batch, with its oldest group. Under memory pressure the tenant with the highest counter is preempted, newest group
    first. A tenant that comes back after it wanted nothing starts from the lowest counter of those who wait or are
    swapped, or, where nobody does, from that of the tenant whose turn came last, so that idle time is not saved up.

    Bound: let tenants f and g both have waiting or swapped requests all through some time in which nothing is computed
    again, and let c_f >= c_g at a moment t of it. When a group of f last entered the batch, at s, c_f(s) <= c_g(s).
    Since then c_f grew only by what the groups of f that ran at s were still to get, at most max_num_seqs sequences of
    max_len tokens, so

        c_f(t) - c_g(t) <= U = SAMPLE_WEIGHT * max_num_seqs * max_len,

    and the service that both get in that time differs by at most 2 U, however long it is and whatever they ask for.
    Each preemption of a group of f adds what is computed again.
    """

    def __init__(self) -> None:
        self.counters: dict[str, int] = {}
        """Of tenants that are active or ahead of those who are."""
        self._floor = 0
        """The lowest counter that a waiting tenant had when it was last looked at."""
        self._chosen: tuple[str, ...] = ()
        """The tenant whose turn came last; none before the first."""
        # A heap of the tenants with groups that wait or are swapped: counter, rank of the first such group, tenant.
        # Counters rise, so an entry may be too low; it is replaced when it comes first. A lower rank adds an entry.
        # `_entries` has the newest entry of each tenant; all others are void.
        self._order: list[tuple[int, int, str]] = []
        self._entries: dict[str, tuple[int, int, str]] = {}
        self._held: set[str] = set()
        """Tenants that had no entry any more, since all their groups were held."""

    def arriving(self, tenant: str, *queues: GroupQueue) -> None:
        if any(tenant in queue.tenants() for queue in queues):
            return
        self._raise_floor(queues)
        self.counters[tenant] = max(self._counter(tenant), self._floor)

    def next_of(self, *queues: GroupQueue) -> SequenceGroup:
        tenant = self._next_tenant(queues)
        assert tenant is not None, "somebody is next"
        self._floor = max(self._floor, self._counter(tenant))
        self._chosen = (tenant,)
        return _first_of(tenant, queues)

    def new_first(self, tenant: str, rank: int) -> None:
        self._held.discard(tenant)
        entry = (self._counter(tenant), rank, tenant)
        known = self._entries.get(tenant)
        if known is None or entry < known:
            self._enter(entry)

    def victims(self, running: GroupQueue) -> Iterator[SequenceGroup]:
        order = [(-self._counter(tenant), -running.last_of(tenant).rank, tenant) for tenant in running.tenants()]
        heapq.heapify(order)
        while order:
            count, _, tenant = order[0]
            yield running.last_of(tenant)
            if tenant in running.tenants():
                heapq.heapreplace(order, (count, -running.last_of(tenant).rank, tenant))
            else:
                heapq.heappop(order)

    def planned(self, plan: StepPlan, prefills: list[bool], sequence_of: Callable[[int], Sequence]) -> None:
        for row, num_new, is_prefill in zip(plan.rows.tolist(), plan.num_new_tokens.tolist(), prefills, strict=True):
            if is_prefill:
                self._charge(sequence_of(row), PREFILL_WEIGHT * num_new)
        for row in plan.samples[:, 0].tolist():
            self._charge(sequence_of(row), SAMPLE_WEIGHT)

    def _counter(self, tenant: str) -> int:
        # Who was forgotten was at the floor or below.
        return self.counters.get(tenant, self._floor)

    def _charge(self, sequence: Sequence, service: int) -> None:
        tenant = sequence.request.tenant
        self.counters[tenant] = self._counter(tenant) + service

    def _enter(self, entry: tuple[int, int, str]) -> None:
        self._entries[entry[2]] = entry
        heapq.heappush(self._order, entry)
        if len(self._order) > 2 * len(self._entries) + 64:
            self._order = sorted(self._entries.values())

    def _next_tenant(self, queues: SequenceOf[GroupQueue]) -> str | None:
        """The tenant with the lowest counter that has a group in these queues that is not held; None where there is
        none."""
        while self._order:
            entry = self._order[0]
            tenant = entry[2]
            if self._entries.get(tenant) != entry:
                heapq.heappop(self._order)
            elif any(tenant in queue.tenants_with_next() for queue in queues):
                current = (self._counter(tenant), _first_of(tenant, queues).rank, tenant)
                if current == entry:
                    return tenant
                self._entries[tenant] = current
                heapq.heapreplace(self._order, current)
            else:
                heapq.heappop(self._order)
                del self._entries[tenant]
                if any(tenant in queue.tenants() for queue in queues):
                    self._held.add(tenant)
        return None

    def _raise_floor(self, queues: SequenceOf[GroupQueue]) -> None:
        # Who is served at once never waits beside others. Without the last of them the floor would stay for ever, and
        # all tenants that ever came would be ahead of it.
        following = self._next_tenant(queues)
        self._held = {tenant for tenant in self._held if any(tenant in queue.tenants() for queue in queues)}
        wanting = [*self._held] if following is None else [following, *self._held]
        lowest = min(map(self._counter, wanting or self._chosen), default=self._floor)
        self._floor = max(self._floor, lowest)
        num_tenants = sum(len(queue.tenants()) for queue in queues)
        if max(len(self.counters), len(self._order)) > 2 * num_tenants + 64:
            tenants = {tenant for queue in queues for tenant in queue.tenants()}
            # A tenant at or below the floor starts from the floor whether it is remembered or not.
            self.counters = {
                tenant: count for tenant, count in self.counters.items() if count > self._floor or tenant in tenants
            }
            self._entries = {tenant: entry for tenant, entry in self._entries.items() if tenant in tenants}
            self._order = sorted(self._entries.values())


def _first_of(tenant: str, queues: SequenceOf[GroupQueue]) -> SequenceGroup:
    """The first of the tenant's groups that are not held."""
    return min((queue.first_of(tenant) for queue in queues if tenant in queue.tenants_with_next()), key=_rank)


def _rank(group: SequenceGroup) -> int:
    return group.rank


def make_policy(kind: PolicyKind) -> Policy:
    """A policy that has seen nothing yet."""
    match kind:
        case PolicyKind.FCFS:
            return Policy()
        case PolicyKind.PRIORITY:
            return PriorityPolicy()
        case PolicyKind.FAIR:
            return FairPolicy()
