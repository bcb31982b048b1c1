"""What callers are told of requests that the core refuses, and when they should come back."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from quire.rpc.errors import AlreadyExists, InvalidArgument, ResourceExhausted
from scheduler_svc.core.request import DuplicateKeyError, NeverFitsError, PinQuotaError, QueueFullError, RefusedError

_MIN_MS, _UNKNOWN_MS = 50, 1_000
_MAX_ENDS = 64
# Longer ago, and it may be that nothing was to be done meanwhile.
_WINDOW_S = 10.0


class RetryAdvisor:
    """Advises to come back when about one place in the queue will have come free, by the pace at which requests ended
    in the last seconds."""

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=_MAX_ENDS)

    def ended(self, count: int, now: float) -> None:
        """`count` requests ended at `now`, in seconds, however they did."""
        self._ends.extend([now] * count)

    def retry_after_ms(self, now: float) -> int:
        """Milliseconds to wait, from 50 to 5,000; 1,000 where the pace is not known."""
        while self._ends and now - self._ends[0] > _WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return _UNKNOWN_MS
        return max(int((now - self._ends[0]) / len(self._ends) * 1e3), _MIN_MS)


@contextmanager
def refusals(retry: RetryAdvisor, now: float) -> Iterator[None]:
    """Turns the core's refusals into errors of the RPC. `now` is in seconds."""
    try:
        yield
    except DuplicateKeyError as error:
        raise AlreadyExists(str(error)) from error
    except QueueFullError as error:
        raise ResourceExhausted(str(error), reason="QUEUE_FULL", retry_after_ms=retry.retry_after_ms(now)) from error
    except PinQuotaError as error:
        raise ResourceExhausted(str(error), reason="PIN_QUOTA") from error
    except NeverFitsError as error:
        raise InvalidArgument(str(error), reason="NEVER_FITS") from error
    except RefusedError as error:
        raise InvalidArgument(str(error)) from error
