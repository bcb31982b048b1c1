"""The time that a call has."""

import time
from collections.abc import Callable
from dataclasses import dataclass


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
        """From now on."""
        return CallTime(None if timeout_s is None else time.monotonic() + timeout_s)

    def left_s(self) -> float | None:
        """Seconds that are left, for gRPC."""
        return None if self.end is None else max(self.end - self.clock(), 0.0)

    def allows(self, delay_s: float) -> bool:
        """Whether something is left after a wait."""
        return self.end is None or self.clock() + delay_s <= self.end
