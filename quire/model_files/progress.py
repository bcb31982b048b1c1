"""The progress of a model on its way into a worker, and the one line that shows it to a person.

A worker reports a `LoadProgress` while it loads. The scheduler hands it on to its gateways: in the metadata of the
status with which it refuses them, or in ReplicaState. Gateways show it in `/ready`, in GetServerInfo and so in
`quire serve`.
"""

import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Self, TextIO

from quire.common.v1 import common_pb2
from quire.runtime import clock

STARTING = "starting"
"""The worker imports libraries, finds its device and, of several ranks, waits for the others."""
DOWNLOADING = "downloading"
READING = "reading"
"""The worker reads weights; each layer is packed for the device once it is read."""
PROFILING = "profiling"
"""The worker runs a step of maximal size, and allocates the KV pool from the memory that is left."""
RECORDING = "recording"
"""The worker records CUDA graphs."""
WARMING_UP = "warming up"
"""The worker runs the first steps, which compile and initialize code for later steps."""

ASLEEP = "asleep"
"""The worker is loaded, and gave the memory of its KV pool back until it is to wake up."""
ASLEEP_WITHOUT_WEIGHTS = "asleep without weights"
"""The worker loads its model when a scheduler attaches it."""

_BYTES_DONE, _BYTES_TOTAL, _PHASE = "load_done_bytes", "load_total_bytes", "load_phase"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")
_LINE_EVERY_S = 5.0
_DRAW_EVERY_S = 0.1
_CLEAR_LINE = "\r\x1b[K"


@dataclass(frozen=True, slots=True)
class LoadProgress:
    """The phase of a load, by the names above, and its bytes; `total_bytes` is 0 in a phase that counts none."""

    phase: str
    done_bytes: int = 0
    total_bytes: int = 0

    def __str__(self) -> str:
        if not self.total_bytes:
            return self.phase
        done, total = of_bytes(self.done_bytes, self.total_bytes)
        return f"{self.phase}, {done} of {total} ({self.percent}%)"

    @property
    def percent(self) -> int | None:
        """Percentage of this phase's bytes, rounded down; None if it counts none."""
        return min(100 * self.done_bytes // self.total_bytes, 100) if self.total_bytes else None

    @classmethod
    def of(cls, message: common_pb2.LoadProgress) -> Self:
        return cls(message.phase, message.done_bytes, message.total_bytes)

    def message(self) -> common_pb2.LoadProgress:
        return common_pb2.LoadProgress(phase=self.phase, done_bytes=self.done_bytes, total_bytes=self.total_bytes)

    @classmethod
    def of_metadata(cls, metadata: Mapping[str, str]) -> Self | None:
        """From the metadata of an error; None if it has none, or numbers of another release."""
        phase = metadata.get(_PHASE)
        done, total = metadata.get(_BYTES_DONE, "0"), metadata.get(_BYTES_TOTAL, "0")
        if not phase or not (done.isdecimal() and total.isdecimal()):
            return None
        return cls(phase, int(done), int(total))

    def metadata(self) -> dict[str, str]:
        """For the metadata of an error."""
        return {_PHASE: self.phase, _BYTES_DONE: str(self.done_bytes), _BYTES_TOTAL: str(self.total_bytes)}


Report = Callable[[LoadProgress], object]
"""Called with progress, in any thread, as often as there is some."""


def no_report(progress: LoadProgress) -> None:
    """A `Report` that discards the progress."""


def of_bytes(done: int, total: int) -> tuple[str, str]:
    """Two sizes in the unit of the second, which is named once: ("1.2", "4.8 GiB")."""
    power = max(min((max(total, 1).bit_length() - 1) // 10, len(_UNITS) - 1), 0)
    digits = 1 if power else 0
    return f"{done / 1024**power:.{digits}f}", f"{total / 1024**power:.{digits}f} {_UNITS[power]}"


def shown_bytes(num_bytes: int) -> str:
    """A size for people: "1.5 GiB", or "64 B". Rounded down, so that it never exceeds the available size."""
    power = max(min((max(num_bytes, 1).bit_length() - 1) // 10, len(_UNITS) - 1), 0)
    tenths = num_bytes * 10 >> 10 * power
    return f"{tenths // 10}.{tenths % 10} {_UNITS[power]}" if power else f"{num_bytes} B"


class ProgressLine:
    """One line that changes, on a terminal; elsewhere, as in a log, a line of its own every few seconds.

    Lines that others print while the line stands must go through `print`, which puts them above it.
    """

    def __init__(
        self,
        stream: TextIO | None = None,
        *,
        clock: Callable[[], float] = clock.monotonic,
        every_s: float = _LINE_EVERY_S,
    ) -> None:
        """`every_s`: the least time between two lines in a log."""
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._every_s = every_s
        self._is_terminal = self._stream.isatty() and os.environ.get("TERM") != "dumb"
        self._shown = ""
        self._shown_at = clock()

    def show(self, text: str) -> None:
        """Replaces the shown text by `text`, if enough time has passed since the last change."""
        now = self._clock()
        if text == self._shown or now - self._shown_at < (_DRAW_EVERY_S if self._is_terminal else self._every_s):
            return
        self._shown, self._shown_at = text, now
        if self._is_terminal:
            width = max(shutil.get_terminal_size().columns - 1, 20)
            self._write(_CLEAR_LINE + text[:width])
        else:
            self._write(text + "\n")

    def print(self, line: str) -> None:
        """A line that stays."""
        self.clear()
        self._write(line + "\n")

    def clear(self) -> None:
        """Removes the text on the terminal."""
        if self._is_terminal and self._shown:
            self._write(_CLEAR_LINE)
        self._shown = ""

    def _write(self, text: str) -> None:
        try:
            self._stream.write(text)
            self._stream.flush()
        except OSError:
            """Its reader is gone, as after `quire serve 2>&1 | head`."""
