"""The time that a call has."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

_LONGEST_S = 1e9


@dataclass(frozen=True, slots=True)
class CallTime:
    """How long a call may take in all, waits included.

    Attributes:
        end: When its time is over, on `clock`; None where it never is.
    """

    end: float | None
    clock: Callable[[], float] = time.monotonic

    @staticmethod
    def of(timeout_s: float | None) -> "CallTime":
        """From now on. ValueError where it is no number; gRPC knows no longer times than many years."""
        if timeout_s is not None and math.isnan(timeout_s):
            raise ValueError("timeout_s is NaN")
        return CallTime(None if timeout_s is None or timeout_s > _LONGEST_S else time.monotonic() + timeout_s)

    def left_s(self) -> float | None:
        """Seconds that are left, for gRPC."""
        return None if self.end is None else max(self.end - self.clock(), 0.0)

    def allows(self, delay_s: float) -> bool:
        """Whether something is left after a wait."""
        return self.end is None or self.clock() + delay_s <= self.end
