"""Errors for callers whose requests the core refuses, with the time after which they should retry."""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from quire.rpc.errors import AlreadyExists, FailedPrecondition, InvalidArgument, ResourceExhausted
from quire.runtime import clock
from scheduler_svc.core.request import (
    DuplicateKeyError,
    NeverFitsError,
    NoAdaptersError,
    PinQuotaError,
    QueueFullError,
    RefusedError,
)


class RetryAdvisor:
    """Computes when a refused caller should retry: when about one place in the queue becomes free, by the rate at which
    requests ended in the last seconds."""

    _MIN_MS, _UNKNOWN_MS = 50, 1_000
    _MAX_ENDS = 64
    # Older ends do not count, because the scheduler may have been idle since.
    _WINDOW_S = 10.0

    def __init__(self) -> None:
        self._ends: deque[float] = deque(maxlen=self._MAX_ENDS)

    def ended(self, count: int, now: float) -> None:
        """`count` requests ended at `now`, in seconds, for any reason."""
        self._ends.extend([now] * count)

    def retry_after_ms(self, now: float) -> int:
        """Milliseconds to wait, from 50 to 5,000; 1,000 if the rate is not known."""
        while self._ends and now - self._ends[0] > self._WINDOW_S:
            self._ends.popleft()
        if len(self._ends) < 2:
            return self._UNKNOWN_MS
        return max(int((now - self._ends[0]) / len(self._ends) * 1e3), self._MIN_MS)


@contextmanager
def refusals_as_errors(retry: RetryAdvisor) -> Iterator[None]:
    """Turns the core's refusals into errors of the RPC."""
    try:
        yield
    except DuplicateKeyError as error:
        raise AlreadyExists(str(error)) from error
    except QueueFullError as error:
        retry_after_ms = retry.retry_after_ms(clock.monotonic())
        raise ResourceExhausted(str(error), reason="QUEUE_FULL", retry_after_ms=retry_after_ms) from error
    except PinQuotaError as error:
        raise ResourceExhausted(str(error), reason="PIN_QUOTA") from error
    except NoAdaptersError as error:
        raise FailedPrecondition(str(error), reason="ADAPTERS_OFF") from error
    except NeverFitsError as error:
        raise InvalidArgument(str(error), reason="NEVER_FITS") from error
    except RefusedError as error:
        raise InvalidArgument(str(error)) from error
