"""Requests to workers that are not answered yet, and whether the oldest takes too long."""

from quire.rpc.patience import LAST_LOOK_S


class Awaited:
    """Orders that workers have not answered yet: steps, or constraints to compile, adapters to load and blocks to
    fetch. Workers handle one after the other, or give up by themselves in time, so only the oldest is checked, and its
    time begins with the answer to the one before it.

    Only a second check finds it late: after a pause of this process its answer may have arrived and not be read yet.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # The time of sending, by number, oldest first.
        self._sent_at: dict[int, float] = {}
        # When the oldest became the oldest, or the workers were attached.
        self._oldest_since = 0.0
        # The first check that found the oldest too slow.
        self._late_since: float | None = None

    def clear(self, now: float) -> None:
        """Workers were attached; nothing is sent yet."""
        self._sent_at.clear()
        self._oldest_since, self._late_since = now, None

    def sent(self, number: int, now: float) -> None:
        self._sent_at[number] = now

    def answered(self, number: int, now: float) -> float:
        """An answer came, or the wait for it was given up. Returns the seconds since it was sent."""
        if number == next(iter(self._sent_at), None):
            self._oldest_since, self._late_since = now, None
        return now - self._sent_at.pop(number, now)

    def late(self, now: float) -> tuple[int, float] | None:
        """The number of a late order, and its seconds so far; None if none is late. Called while workers live."""
        if not self._sent_at:
            return None
        number, sent_at = next(iter(self._sent_at.items()))
        seconds = now - max(sent_at, self._oldest_since)
        if seconds <= self._timeout_s:
            return None
        if self._late_since is None:
            self._late_since = now
        return (number, seconds) if now - self._late_since > LAST_LOOK_S else None
