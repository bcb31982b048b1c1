"""The limits on kept durable requests, and the part of them that each request takes."""

from collections import Counter, deque
from dataclasses import dataclass
from heapq import heapify, heappop, heapreplace
from typing import Protocol

from quire.rpc.errors import ResourceExhausted
from scheduler_svc.core.request import Handle, QueueFullError, Request, check_shared_bound

MAX_GROWTH = 1024
"""Output tokens for which room is reserved, for each sequence of a running durable request, beyond its present ones.
Tokens beyond the reserved ones are kept too, and leave less room for new requests."""

_RETRY_MS = 1000
"""A caller that was refused for the limits on durable requests may retry after this time."""


@dataclass(frozen=True, slots=True)
class Durable:
    """The original submission of a durable request, and its charge in tokens. A log probability counts as a token."""

    description: bytes
    prompt_charge: int
    charge_per_token: int
    num_sequences: int
    max_tokens: int
    """The max_tokens of each sequence."""

    @classmethod
    def from_request(cls, request: Request, description: bytes) -> "Durable":
        sampling = request.sampling
        per_prompt = 1 if sampling.prompt_logprobs is None else 2 + sampling.prompt_logprobs
        per_token = 1 if sampling.logprobs is None else 2 + sampling.logprobs
        prompt_charge = len(request.prompt) * per_prompt
        return cls(description, prompt_charge, per_token, request.num_returned, request.max_tokens)

    def charge(self, num_output_tokens: int, *, is_over: bool) -> int:
        """The tokens that count: these output tokens, and while it runs the tokens that may soon follow."""
        growth = 0 if is_over else self.num_sequences * MAX_GROWTH
        num_tokens = min(num_output_tokens + growth, self.num_sequences * self.max_tokens)
        return self.prompt_charge + num_tokens * self.charge_per_token


class Charged(Protocol):
    """The part of a durable request that the limits count."""

    tenant: str
    is_over: bool

    @property
    def charge(self) -> int: ...


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
        self.requests: dict[Handle, Charged] = {}
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

    def add(self, handle: Handle, request: Charged) -> None:
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

    def _count(self, handle: Handle, request: Charged) -> None:
        if request.is_over:
            self._over.setdefault(request.tenant, []).append((handle, request.charge))
        else:
            self._num_running[request.tenant] += 1
            self._charge_running[request.tenant] += request.charge


def _durable_limit(message: str) -> ResourceExhausted:
    return ResourceExhausted(message, reason="DURABLE_LIMIT", retry_after_ms=_RETRY_MS)
