"""Who goes first: the order in which groups are admitted and preempted.

A policy is chosen once, at the start. The scheduler asks it which group of its queues is next and tells it what was
planned; everything else about scheduling is the same under all policies.
"""

from collections.abc import Callable
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

    def victim_of(self, running: GroupQueue) -> SequenceGroup:
        """Who is preempted next. The queue is not empty."""
        return running.last()

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

    def arriving(self, tenant: str, *queues: GroupQueue) -> None:
        if any(tenant in queue.tenants() for queue in queues):
            return
        self._raise_floor(queues)
        self.counters[tenant] = max(self._counter(tenant), self._floor)

    def next_of(self, *queues: GroupQueue) -> SequenceGroup:
        first = min(
            (queue.first_of(tenant) for queue in queues for tenant in queue.tenants_with_next()),
            key=lambda group: (self._counter(group.request.tenant), group.rank),
        )
        self._floor = max(self._floor, self._counter(first.request.tenant))
        self._chosen = (first.request.tenant,)
        return first

    def victim_of(self, running: GroupQueue) -> SequenceGroup:
        return running.last_of(
            max(running.tenants(), key=lambda each: (self._counter(each), running.last_of(each).rank))
        )

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

    def _raise_floor(self, queues: SequenceOf[GroupQueue]) -> None:
        # Who is served at once never waits beside others. Without the last of them the floor would stay for ever, and
        # all tenants that ever came would be ahead of it.
        tenants = [tenant for queue in queues for tenant in queue.tenants()]
        lowest = min(map(self._counter, tenants or self._chosen), default=self._floor)
        self._floor = max(self._floor, lowest)
        # A tenant at or below the floor starts from the floor whether it is remembered or not.
        if len(self.counters) > 2 * len(tenants) + 64:
            wanting = set(tenants)
            self.counters = {
                tenant: count for tenant, count in self.counters.items() if count > self._floor or tenant in wanting
            }


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
