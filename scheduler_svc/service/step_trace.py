"""What happens in each step and when, as a file that Chrome's tracing page and Perfetto open (`--trace-steps FILE`).

One line of the picture is the scheduler (plan, send, apply), one the gateways' streams (emit), one the worker (queue,
cache operations, model, sample). The worker reports durations only: its line is drawn so that it ends when the result
was received, so it stands late by the way back.
"""

import json
from pathlib import Path
from typing import TextIO

from quire.settings import ConfigurationError

_SCHEDULER, _GATEWAYS, _WORKER = 1, 2, 3
_NAMES = {_SCHEDULER: "scheduler", _GATEWAYS: "gateway streams", _WORKER: "worker"}
_WORKER_STAGES = ("queue", "cache operations", "model", "sample")


class StepTrace:
    """Appends an event a line. A file that was cut off, as by kill -9, opens all the same: the format lets the end of
    the list be missing. Times are seconds of one monotonic clock."""

    def __init__(self, file: TextIO | None) -> None:
        """Without a file nothing is traced."""
        self._file = file
        if file is not None:
            file.write("[\n")
        for track, name in _NAMES.items():
            self._write({"name": "thread_name", "ph": "M", "pid": 1, "tid": track, "args": {"name": name}})

    @classmethod
    def open(cls, path: str | None) -> "StepTrace":
        """Raises ConfigurationError when the file cannot be written."""
        if path is None:
            return cls(None)
        try:
            return cls(Path(path).open("w", encoding="utf-8"))
        except OSError as error:
            raise ConfigurationError(f"--trace-steps {path}: {error.strerror}") from error

    def planned(self, step_id: int, num_tokens: int, start: float, end: float) -> None:
        self._span("plan", _SCHEDULER, step_id, start, end, num_tokens=num_tokens)

    def sent(self, step_id: int, start: float, end: float) -> None:
        self._span("send", _SCHEDULER, step_id, start, end)

    def answered(self, step_id: int, worker_us: tuple[int, int, int, int], received: float) -> None:
        """`worker_us` are the microseconds of queue, cache operations, model and sample."""
        start = received - sum(worker_us) / 1e6
        for name, duration_us in zip(_WORKER_STAGES, worker_us, strict=True):
            end = start + duration_us / 1e6
            self._span(name, _WORKER, step_id, start, end)
            start = end

    def applied(self, step_id: int, start: float, end: float) -> None:
        self._span("apply", _SCHEDULER, step_id, start, end)

    def emitted(self, step_id: int, start: float, end: float) -> None:
        self._span("emit", _GATEWAYS, step_id, start, end)

    def close(self) -> None:
        if self._file is not None:
            # The list may not end with a comma.
            self._file.write('{"name":"end","ph":"M","pid":1,"args":{}}\n]\n')
            self._file.close()
            self._file = None

    def _span(self, name: str, track: int, step_id: int, start: float, end: float, **details: int) -> None:
        if self._file is None:
            return
        self._write(
            {
                "name": name,
                "ph": "X",
                "pid": 1,
                "tid": track,
                "ts": round(start * 1e6, 1),
                "dur": round((end - start) * 1e6, 1),
                "args": {"step": step_id, **details},
            }
        )

    def _write(self, event: dict[str, object]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(event, separators=(",", ":")) + ",\n")
