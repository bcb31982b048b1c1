"""Named places in services where a test ends or delays the process, to test the state that it leaves behind.

`failpoint(name)` does nothing unless the context has something armed: a simulation sets `FAILPOINTS` in the context of
a simulated process, and `arm` does so for a real one, which is for tests only. docs/internals/failpoints.md explains
each name.

A real process watches a directory, into which orders are moved whole: a file NAME with the content "kill 3" ends the
process by SIGKILL at the third pass of failpoint NAME from then on, and is gone before that, so that its successor
lives. "delay 0.5" waits half a second at each pass, in the thread that passes, as long as the file is there.
"""

import os
import signal
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from quire.runtime import clock
from quire.runtime.settings import ConfigurationError

VARIABLE = "QUIRE_FAILPOINTS"
"""The environment variable with the directory. For tests: a process that writes there can end the service."""

NAMES = (
    "scheduler.submit.before_queue",
    "scheduler.submit.accepted",
    "scheduler.step.before_send",
    "scheduler.step.between_ranks",
    "scheduler.apply.before_emit",
    "scheduler.events.before_write",
    "scheduler.attach.before_inventory",
    "scheduler.reader.changed",
    "scheduler.drain.begun",
    "worker.load.begun",
    "worker.attach.before_inventory",
    "worker.step.admitted",
    "worker.step.moved",
    "worker.step.sealed",
    "worker.fetch.before_write",
    "worker.move.written",
    "gateway.submit.before_send",
    "gateway.connected.before_resubmit",
    "gateway.events.before_apply",
    "gateway.events.before_credit",
    "gateway.stream.before_write",
    "gateway.background.before_end",
    "gateway.drain.begun",
)


class Failpoints(Protocol):
    """The actions at failpoints."""

    def passed(self, name: str) -> None:
        """The process passes a failpoint. Does not return if the process is to end there."""
        ...


FAILPOINTS: ContextVar[Failpoints | None] = ContextVar("quire failpoints", default=None)
"""To be set by a simulation, in the context of a simulated process, and by `arm`."""


def failpoint(name: str) -> None:
    """A place of this name, one of `NAMES`. Costs one look-up in the context if nothing is armed."""
    if (armed := FAILPOINTS.get()) is not None:
        armed.passed(name)


def arm(environ: Mapping[str, str]) -> None:
    """Arms the failpoints of this context, and of all contexts that are copied from it, if the variable is set.

    Raises ConfigurationError if it names no directory.
    """
    if value := environ.get(VARIABLE):
        directory = Path(value)
        if not directory.is_dir():
            raise ConfigurationError(f"{VARIABLE} is {value}, which is no directory")
        FAILPOINTS.set(WatchedDirectory(directory))


@dataclass(slots=True)
class _Order:
    """The order in a file, and the number of passes of its failpoint since it was found. A rewritten file is another
    order."""

    written_ns: int
    verb: str
    value: float
    num_passes: int = 0


class WatchedDirectory:
    """Orders for failpoints of this process, as files that others put into a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._orders: dict[str, _Order] = {}

    def passed(self, name: str) -> None:
        path = self._directory / name
        try:
            written_ns = path.stat().st_mtime_ns
            order = self._orders.get(name)
            if order is None or order.written_ns != written_ns:
                verb, value = path.read_text().split()
                order = self._orders[name] = _Order(written_ns, verb, float(value))
        except FileNotFoundError:
            return
        order.num_passes += 1
        if order.verb == "delay":
            clock.sleep(order.value)
        elif order.num_passes == order.value and _take(path):
            os.kill(os.getpid(), signal.SIGKILL)


def _take(path: Path) -> bool:
    """Removes a file. Returns whether this process was the one that did."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
