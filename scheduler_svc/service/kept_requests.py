"""Requests that are kept: durable ones, with the limits on them, and the memory of requests that have ended or left."""

from asyncio import TimerHandle
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace

from quire.rpc.errors import Cancelled, ResourceExhausted, Unavailable
from scheduler_svc.core.request import Handle, QueueFullError, check_shared_bound
from scheduler_svc.service.readers import CallLater, OwnedRequest

MAX_CANCELLED = 1024
"""Maximum number of cancelled requests that are remembered."""

MOVED_S = 1.0
"""Seconds for which the id of a request that left is known: its gateway is about to submit it to another scheduler."""

MAX_UNDELIVERED = 2_000_000
"""Maximum tokens and log probabilities that are kept of plain requests that ended without a reader."""

_RETRY_MS = 1000
"""A caller that was refused for the limits on durable requests may retry after this time."""

_MOVED_RETRY_MS = 100


@dataclass(frozen=True, slots=True)
class DurableLimits:
    """The limits on durable requests: their number; their tokens, including tokens that may come soon; and seconds
    without a reader, or after the end. `tenant_overflow` is as in the core's config."""

    max_requests: int
    max_tokens: int
    grace_s: float
    tenant_overflow: float = 1.0


class DurableRoom:
    """All durable requests, and their use of the limits."""

    def __init__(self, limits: DurableLimits) -> None:
        self.limits = limits
        self.requests: dict[Handle, OwnedRequest] = {}
        # By tenant: running requests and their charges; ended requests, oldest first, with their charges.
        self._num_running: Counter[str] = Counter()
        self._charge_running: Counter[str] = Counter()
        self._over: dict[str, list[tuple[Handle, int]]] = {}
        self._is_summed = True

    @property
    def num_tokens(self) -> int:
        """All requests' part of the limit. Metrics are read in another thread, so this uses no running sums, and copies
        the table, which may change meanwhile."""
        return sum(each.charge for each in list(self.requests.values()))

    def add(self, handle: Handle, request: OwnedRequest) -> None:
        self._sum_up()
        self.requests[handle] = request
        self._count(handle, request)

    def remove(self, handle: Handle) -> None:
        """Forgets a request. No effect if it is not durable."""
        if self.requests.pop(handle, None) is not None:
            self._is_summed = False

    def changed(self) -> None:
        """Histories have grown, or requests have ended. They are summed up when room is needed next."""
        self._is_summed = False

    def make_room(self) -> list[Handle]:
        """The ended requests that must be forgotten, since a new one was added: repeatedly the oldest of the tenant
        that holds most of the scarce resource. So a tenant that floods the scheduler loses its own requests."""
        self._sum_up()
        over = {each: deque(kept) for each, kept in self._over.items()}
        num_held = self._num_running + Counter({each: len(kept) for each, kept in over.items()})
        charges = self._charge_running + Counter({each: sum(own for _, own in kept) for each, kept in over.items()})
        forgotten: list[Handle] = []
        for held, limit in ((num_held, self.limits.max_requests), (charges, self.limits.max_tokens)):
            excess = held.total() - limit
            holders = [(-size, each) for each, size in held.items() if over.get(each)]
            heapify(holders)
            while excess > 0 and holders:
                _, largest = holders[0]
                handle, own = over[largest].popleft()
                forgotten.append(handle)
                excess -= own if held is charges else 1
                num_held[largest] -= 1
                charges[largest] -= own
                if over[largest]:
                    heapreplace(holders, (-held[largest], largest))
                else:
                    heappop(holders)
        return forgotten

    def check_room(self, tenant: str, charge: int) -> None:
        """Raises ResourceExhausted if a new request has no room in addition to the running ones. Not called for a
        request that was accepted before, here or by another scheduler: it has grown since, and has room."""
        self._sum_up()
        limits = self.limits
        num_tenants = len(self._num_running) + (tenant not in self._num_running)
        if not limits.max_requests or charge > limits.max_tokens:
            raise _durable_limit(
                f"1 durable request would be kept, with {charge} tokens; at most {limits.max_requests} requests and "
                f"{limits.max_tokens} tokens are"
            )
        try:
            for counted, limit, running, added in (
                ("durable requests would run", limits.max_requests, self._num_running, 1),
                ("tokens of durable requests would be kept", limits.max_tokens, self._charge_running, charge),
            ):
                check_shared_bound(
                    counted,
                    limit,
                    total=running.total(),
                    own=running[tenant],
                    added=added,
                    num_tenants=num_tenants,
                    overflow=limits.tenant_overflow,
                )
        except QueueFullError as error:
            raise _durable_limit(str(error)) from error

    def _sum_up(self) -> None:
        if not self._is_summed:
            self._num_running.clear()
            self._charge_running.clear()
            self._over.clear()
            for handle, request in self.requests.items():
                self._count(handle, request)
            self._is_summed = True

    def _count(self, handle: Handle, request: OwnedRequest) -> None:
        if request.is_over:
            self._over.setdefault(request.tenant, []).append((handle, request.charge))
        else:
            self._num_running[request.tenant] += 1
            self._charge_running[request.tenant] += request.charge


def _durable_limit(message: str) -> ResourceExhausted:
    return ResourceExhausted(message, reason="DURABLE_LIMIT", retry_after_ms=_RETRY_MS)


class EndedRequests:
    """Cancelled requests, which are refused if their gateways submit them again; requests that have just left for
    another scheduler; and the sizes of outputs that no reader got.

    Attributes:
        cancelled: Tenant, id and nonce of the newest cancelled requests.
        undelivered: Sizes of the kept outputs of plain requests that ended without a reader, oldest first.
    """

    def __init__(self, call_later: CallLater) -> None:
        self.cancelled: dict[tuple[str, str, int], None] = {}
        self.undelivered: dict[Handle, int] = {}
        self.undelivered_size = 0
        self._call_later = call_later
        self._moved: dict[tuple[str, str], TimerHandle] = {}

    def record_cancelled(self, tenant: str, request_id: str, nonce: int) -> None:
        self.cancelled[tenant, request_id, nonce] = None
        if len(self.cancelled) > MAX_CANCELLED:
            del self.cancelled[next(iter(self.cancelled))]

    def check_not_cancelled(self, tenant: str, request_id: str, nonce: int) -> None:
        """Raises Cancelled if the tenant has cancelled this request."""
        if (tenant, request_id, nonce) in self.cancelled:
            raise cancelled_by_id(request_id)

    def record_moved(self, tenant: str, request_id: str) -> None:
        name = tenant, request_id
        if (timer := self._moved.get(name)) is not None:
            timer.cancel()
        self._moved[name] = self._call_later(MOVED_S, lambda: self._moved.pop(name, None))

    def check_not_moved(self, tenant: str, request_id: str) -> None:
        """Raises Unavailable if the request has just left: a caller that asks all schedulers would not find it until
        the other one has it."""
        if (tenant, request_id) in self._moved:
            text = f'request "{request_id[:128]}" is on its way to another scheduler'
            raise Unavailable(text, retry_after_ms=_MOVED_RETRY_MS)

    def add_undelivered(self, handle: Handle, size: int) -> None:
        """Counts the output of a request that ended without a reader."""
        self.undelivered[handle] = size
        self.undelivered_size += size

    def remove_undelivered(self, handle: Handle) -> None:
        """A reader got the output, or it was dropped. No effect if the request is not counted."""
        self.undelivered_size -= self.undelivered.pop(handle, 0)

    def oldest_above_limit(self) -> Iterator[Handle]:
        """The oldest requests, until the rest is within the limit. The caller removes each."""
        while self.undelivered_size > MAX_UNDELIVERED:
            yield next(iter(self.undelivered))


def cancelled_by_id(request_id: str) -> Cancelled:
    """The error for readers of a request that its tenant has cancelled."""
    return Cancelled(f'request "{request_id}" was cancelled', reason="CANCELLED_BY_ID")
