"""The clocks that services read: one seam, so that a simulation can run whole services on virtual time.

Each reads the clock of the context that it is called in; without one, the process's own. An event loop's `time()`,
`call_later` and `asyncio.sleep` are on the loop's clock already and need nothing of this.
"""

import time as _process
from contextvars import ContextVar
from typing import Protocol


class Clock(Protocol):
    """The source of a process's time."""

    def monotonic(self) -> float:
        """Seconds since some moment; never goes back."""
        ...

    def unix_ns(self) -> int:
        """Nanoseconds since 1970, which an operator may set back."""
        ...

    def thread_time(self) -> float:
        """Seconds of processor time of the calling thread."""
        ...

    def sleep(self, seconds: float, /) -> None:
        """Makes the calling thread wait; not for tasks of an event loop."""
        ...


class ProcessClock:
    monotonic = staticmethod(_process.monotonic)
    unix_ns = staticmethod(_process.time_ns)
    thread_time = staticmethod(_process.thread_time)
    sleep = staticmethod(_process.sleep)


CLOCK: ContextVar[Clock] = ContextVar("quire clock", default=ProcessClock())  # noqa: B039  (it has no state)
"""To be set only by a simulation, in the context of a simulated process."""


def monotonic() -> float:
    """Seconds since some moment; never goes back."""
    return CLOCK.get().monotonic()


def unix_ns() -> int:
    """Nanoseconds since 1970."""
    return CLOCK.get().unix_ns()


def unix_s() -> float:
    """Seconds since 1970."""
    return CLOCK.get().unix_ns() / 1e9


def thread_time() -> float:
    """Seconds of processor time of the calling thread, to be compared with each other."""
    return CLOCK.get().thread_time()


def sleep(seconds: float) -> None:
    """Makes the calling thread wait; tasks await `asyncio.sleep`."""
    CLOCK.get().sleep(seconds)
