"""When a refused request should come back."""

from collections import deque

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
