"""`quire pull`: downloads a model of a hub into the cache, before it is served or without a server."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from quire.model_files.model_directory import HubName
from quire.model_files.model_source import download
from quire.model_files.progress import LoadProgress, ProgressLine
from quire.rpc.process import DaemonThreads
from quire.runtime.settings import ConfigurationError, load_settings, setting

PROGRAM = "quire pull"
_LOOK_EVERY_S = 1.0
# Bytes are counted 10 MiB at a time, which a slow line takes seconds for.
_SILENT_S = 15.0
_PATIENCE = "a hub that sends nothing is given up after a minute"


@dataclass(frozen=True, slots=True)
class PullFlags:
    """Downloads a model of the Hugging Face Hub into its cache, where --model ORG/NAME finds it, offline too. A broken
    download continues where it ended. HF_HOME names the cache, HF_ENDPOINT the hub, HF_TOKEN the account."""

    model: str | None = setting(
        None,
        "ORG/NAME or ORG/NAME@REVISION, a branch, tag or commit; a GGUF file as ORG/NAME:Q4_K_M or ORG/NAME/FILE.gguf",
        positional=True,
    )
    weights: bool = setting(True, "with the weights; a gateway needs only the rest", variable="QUIRE_PULL_WEIGHTS")


def main(argv: Sequence[str]) -> int:
    """Prints the path of the model in the cache."""
    flags = load_settings(PullFlags, argv, os.environ, program=PROGRAM)
    if flags.model is None:
        raise ConfigurationError("no model is given; call it as quire pull ORG/NAME (--help lists all flags)")
    name = HubName.parse(flags.model)
    if name is None:
        raise ConfigurationError(
            f'"{flags.model}" is not valid: expected ORG/NAME, with @REVISION, :Q4_K_M or /FILE.gguf'
        )
    try:
        print(fetch(name, with_weights=flags.weights), flush=True)
    except Stopped as stopped:
        print(f"{PROGRAM}: {stopped}", file=sys.stderr, flush=True)
        return 128 + stopped.signal
    return 0


class Stopped(Exception):  # noqa: N818 - no error
    """A signal has ended a download; `signal` is its number."""

    def __init__(self, name: HubName, number: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}; what has arrived of {name} is kept")
        self.signal = number


def fetch(name: HubName, *, with_weights: bool = True) -> Path:
    """The model in the cache, with the progress of a download on stderr. Called in the main thread.

    Raises:
        ConfigurationError: as in `quire.model_files.hub.pull`.
        Stopped: SIGINT or SIGTERM came.
    """
    shown = DownloadLine(name)
    try:
        with _signals_stop(name):
            # In another thread, since this one does not take signals while the system looks up the hub's address.
            work = partial(download, name, with_weights=with_weights, report=shown.report)
            downloading = DaemonThreads("download").submit(work)
            while not wait([downloading], timeout=_LOOK_EVERY_S).done:
                shown.look()
            return downloading.result()
    finally:
        shown.clear()


class DownloadLine:
    """The line that shows how far a download is, how fast, and whether it stands still."""

    def __init__(self, name: HubName, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._clock = clock
        self._line = ProgressLine(clock=clock)
        self._began: tuple[float, int] | None = None
        self._last: tuple[float, LoadProgress] | None = None

    def report(self, progress: LoadProgress) -> None:
        now = self._clock()
        began_at, bytes_before = self._began = self._began or (now, progress.done_bytes)
        self._last = (now, progress)
        rate = (progress.done_bytes - bytes_before) / (now - began_at) if now > began_at else 0.0
        text = f"quire: {self._name}: {progress}"
        if rate:
            left_s = (progress.total_bytes - progress.done_bytes) / rate
            text += f", {rate / 2**20:.1f} MiB/s, {left_s:.0f} s left"
        self._line.show(text)

    def look(self) -> None:
        """Shows a notice if nothing has arrived for a while. Called regularly."""
        if self._last is None:
            return
        at, progress = self._last
        if (silent_s := self._clock() - at) >= _SILENT_S:
            self._line.show(f"quire: {self._name}: {progress}, no progress for {silent_s:.0f} s ({_PATIENCE})")

    def clear(self) -> None:
        self._line.clear()


@contextmanager
def _signals_stop(name: HubName) -> Iterator[None]:
    def stop(number: int, _: object) -> None:
        raise Stopped(name, number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
