"""Requests that have ended or left, and that are still remembered for a while."""

from asyncio import TimerHandle
from collections.abc import Iterator

from quire.rpc.errors import Cancelled, Unavailable
from scheduler_svc.core.request import Handle
from scheduler_svc.service.readers import CallLater

MAX_CANCELLED = 1024
"""Maximum number of cancelled requests that are remembered."""

MOVED_S = 1.0
"""Seconds for which the id of a request that left is known: its gateway is about to submit it to another scheduler."""

MAX_UNDELIVERED = 2_000_000
"""Maximum tokens and log probabilities that are kept of plain requests that ended without a reader."""

_MOVED_RETRY_MS = 100


class EndedRequests:
    """Cancelled requests, which their gateways may submit again; requests that have just left for another scheduler;
    and the sizes of outputs that no reader got.

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
