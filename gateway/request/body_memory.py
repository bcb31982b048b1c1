"""Limits the memory of request bodies, as sent and as parsed."""

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar

from gateway.auth.caller import current_tenant
from quire.model_files.progress import shown_bytes
from quire.rpc.errors import ResourceExhausted

_RETRY_MS = 1000


class BodyMemory:
    """Counts the bytes of all request bodies in memory, also while they arrive, and the memory of their values once
    they are parsed.

    When the memory is full, the body that has been arriving for longest is given up, not the newest one. So a client
    that sends half a body and waits takes no memory from other clients, and a body is refused only if it arrives more
    slowly than all others together. Complete bodies are kept; if they fill the memory, a new body is refused. A body
    is also refused if its tenant's bodies already take the tenant's share, which leaves room for other tenants.
    """

    def __init__(self, max_bytes: int, max_tenant_bytes: int | None = None) -> None:
        """A tenant may hold `max_tenant_bytes`, and always one body; None means no limit per tenant."""
        self.max_bytes = max_bytes
        self.max_tenant_bytes = max_tenant_bytes
        self.num_bytes = 0
        self.bytes_of_tenants: Counter[str] = Counter()
        # In order of their beginning.
        self.arriving: dict[HeldBody, None] = {}

    def begin(self, on_refusal: Callable[[], None]) -> "HeldBody":
        """Adds a body before its first byte arrives. `on_refusal` is called when it is given up for other bodies."""
        body = HeldBody(self, on_refusal)
        self.arriving[body] = None
        return body

    def refusal(self, *, of_tenant: bool = False) -> ResourceExhausted:
        """The error for a body that does not fit into the memory, or into its tenant's share."""
        whose, limit = "all", self.max_bytes
        if of_tenant and self.max_tenant_bytes is not None:
            whose, limit = "one tenant's", self.max_tenant_bytes
        return ResourceExhausted(
            f"the bodies of {whose} requests may take {shown_bytes(limit)} of memory together "
            "(--max-total-body-bytes), and there is no room for this one; try again",
            reason="BODIES_FULL",
            retry_after_ms=_RETRY_MS,
        )


class HeldBody:
    """One body: `add` arriving bytes, then `complete` it, and `release` it when its request is over. Its tenant is the
    tenant of the call that adds."""

    __slots__ = ("_is_released", "_memory", "_tenant", "is_kept", "num_bytes", "on_refusal")

    def __init__(self, memory: BodyMemory, on_refusal: Callable[[], None]) -> None:
        self._memory = memory
        self._is_released = False
        self._tenant = ""
        self.is_kept = False
        self.num_bytes = 0
        self.on_refusal = on_refusal

    def add(self, num_bytes: int) -> None:
        """Counts bytes that arrived, or that its values take. Raises ResourceExhausted and releases the body if there
        is no room."""
        if self._is_released:
            return
        memory = self._memory
        self._tenant = self._tenant or current_tenant()
        while (takes_share := self._takes_share(num_bytes)) or self._takes_too_much(num_bytes):
            others = (each for each in memory.arriving if not takes_share or each._tenant == self._tenant)
            longest = next((each for each in others if each.num_bytes or each is self), self)
            longest.release()
            if longest is self:
                raise memory.refusal(of_tenant=takes_share)
            longest.on_refusal()
        memory.num_bytes += num_bytes
        memory.bytes_of_tenants[self._tenant] += num_bytes
        self.num_bytes += num_bytes

    def _takes_share(self, num_bytes: int) -> bool:
        """Whether its tenant has other bodies, and would hold more than its share with all of them."""
        share, of_tenant = self._memory.max_tenant_bytes, self._memory.bytes_of_tenants[self._tenant]
        return share is not None and of_tenant > self.num_bytes and of_tenant + num_bytes > share

    def _takes_too_much(self, num_bytes: int) -> bool:
        """Whether all bodies would take too much memory. The values of the only body may take what they need."""
        memory = self._memory
        is_alone = self not in memory.arriving and memory.num_bytes == self.num_bytes
        return not is_alone and memory.num_bytes + num_bytes > memory.max_bytes

    def add_answer(self, num_bytes: int) -> None:
        """Counts an answer that its client has not received yet. The body is no longer given up for other bodies.
        Raises as `add` does."""
        self.complete()
        self.add(num_bytes)

    def another(self, on_refusal: Callable[[], None]) -> "HeldBody":
        """As `BodyMemory.begin`: another body of the same tenant in the same memory."""
        self._tenant = self._tenant or current_tenant()
        body = self._memory.begin(on_refusal)
        body._tenant = self._tenant
        return body

    def complete(self) -> None:
        """Marks the body as fully arrived: it is no longer given up for others."""
        self._memory.arriving.pop(self, None)

    def keep(self) -> Callable[[], None]:
        """Counts the body until the returned function is called, even if more messages of its call arrive before."""
        self.is_kept = True
        return self.release

    def release(self) -> None:
        """Stops counting the body. Idempotent."""
        self.complete()
        self._is_released = True
        self._memory.num_bytes -= self.num_bytes
        of_tenants = self._memory.bytes_of_tenants
        of_tenants[self._tenant] -= self.num_bytes
        if not of_tenants[self._tenant]:
            del of_tenants[self._tenant]
        self.num_bytes = 0


message_memory: ContextVar[HeldBody] = ContextVar("message_memory")
"""The memory of the current request, until the request is over. The reader of the request sets it."""


def count_memory(num_bytes: int) -> None:
    """Counts memory of the current request in addition to its bytes. Raises ResourceExhausted if none is left."""
    if (memory := message_memory.get(None)) is not None:
        memory.add(num_bytes)


def count_answer(num_bytes: int) -> None:
    """As `HeldBody.add_answer`, for the current request."""
    if (memory := message_memory.get(None)) is not None:
        memory.add_answer(num_bytes)


def keep_memory() -> Callable[[], None]:
    """As `HeldBody.keep`, for the current request."""
    memory = message_memory.get(None)
    return memory.keep() if memory is not None else lambda: None
