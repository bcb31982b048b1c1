"""What callers are told of requests that the core refuses, and when they should come back."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from quire.rpc.errors import AlreadyExists, InvalidArgument, ResourceExhausted
from scheduler_svc.core.errors import DuplicateKeyError, NeverFitsError, PinQuotaError, QueueFullError, RefusedError

_MIN_MS, _MAX_MS, _UNKNOWN_MS = 50, 30_000, 1_000
_WINDOW = 64


class RetryAdvisor:
    """Advises to come back when about one place in the queue will have come free, by the pace of recent completions."""

    def __init__(self) -> None:
        self._completions: deque[float] = deque(maxlen=_WINDOW)

    def completed(self, count: int, now: float) -> None:
        """`count` requests ended at `now`, in seconds."""
        self._completions.extend([now] * count)

    def retry_after_ms(self, now: float) -> int:
        """Milliseconds to wait, from 50 to 30,000."""
        if len(self._completions) < 2:
            return _UNKNOWN_MS
        pace = (now - self._completions[0]) / len(self._completions)
        return int(min(max(pace * 1e3, _MIN_MS), _MAX_MS))


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
