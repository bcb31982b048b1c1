"""A rate as a bucket that fills steadily. Pure: it is told the time."""


class TokenBucket:
    """Holds at most what one minute brings; starts full. Its level may be below 0, as a debt that the time pays off.

    Attributes:
        per_minute: What comes in a minute, and the most that is held.
    """

    def __init__(self, per_minute: int, now: float) -> None:
        """`now` and all times are in seconds of one clock that never goes back."""
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._filled_at = now

    def seconds_until(self, amount: float, now: float) -> float:
        """How long until `amount` is there; 0 where it is there now. `amount` is at most `per_minute`."""
        self._fill(now)
        return max(0.0, (amount - self._level) * 60 / self.per_minute)

    def take(self, amount: float, now: float) -> None:
        """Takes `amount`, there or not."""
        self._fill(now)
        self._level -= amount

    def give_back(self, amount: float, now: float) -> None:
        """Undoes a `take`."""
        self._fill(now)
        self._level = min(self._level + amount, self.per_minute)

    def resize(self, per_minute: int, now: float) -> None:
        """Another rate from now on. What was used up stays used up."""
        self._fill(now)
        self._level = min(self._level + per_minute - self.per_minute, per_minute)
        self.per_minute = per_minute

    def _fill(self, now: float) -> None:
        passed_s = max(0.0, now - self._filled_at)
        self._level = min(self._level + passed_s * self.per_minute / 60, self.per_minute)
        self._filled_at = max(now, self._filled_at)
