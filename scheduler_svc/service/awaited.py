"""Answers that workers owe, and whether the oldest takes too long."""

from quire.rpc.patience import LAST_LOOK_S


class Awaited:
    """What workers were sent and have not answered yet: steps, or constraints to compile and adapters to load, or
    blocks to fetch. They do one after the other, or give up by themselves in time, so only the oldest is looked at, and
    its time begins when the one before it was answered.

    It is late by a second look: after a pause of this process its answer may be here and not yet read.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        # The time of sending, by number, oldest first.
        self._sent_at: dict[int, float] = {}
        # Since when the oldest is the oldest, or the workers were attached.
        self._oldest_since = 0.0
        # Since when the oldest takes too long, as far as anybody looked.
        self._late_since: float | None = None

    def clear(self, now: float) -> None:
        """Workers were attached, and nothing is sent yet."""
        self._sent_at.clear()
        self._oldest_since, self._late_since = now, None

    def sent(self, number: int, now: float) -> None:
        self._sent_at[number] = now

    def answered(self, number: int, now: float) -> float:
        """An answer came, or nobody waits for it any more. Returns the seconds since it was sent."""
        if number == next(iter(self._sent_at), None):
            self._oldest_since, self._late_since = now, None
        return now - self._sent_at.pop(number, now)

    def late(self, now: float) -> tuple[int, float] | None:
        """What is late, and the seconds that it takes already. To be called now and then, while workers live."""
        if not self._sent_at:
            return None
        number, sent_at = next(iter(self._sent_at.items()))
        seconds = now - max(sent_at, self._oldest_since)
        if seconds <= self._timeout_s:
            return None
        if self._late_since is None:
            self._late_since = now
        return (number, seconds) if now - self._late_since > LAST_LOOK_S else None
