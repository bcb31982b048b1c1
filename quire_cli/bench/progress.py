"""The progress of a run: a bar on a terminal if tqdm is installed, otherwise lines. Both on stderr."""

import os
import sys
import time
from typing import Any, Self

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """The progress of one run. `num_requests` is None if a duration limits it. With `stays` its last state remains."""

    def __init__(self, label: str, num_requests: int | None, *, stays: bool = True) -> None:
        self._label = label
        self._num_requests = num_requests
        self._stays = stays
        self._bar = _make_bar(label, num_requests, stays=stays)
        self._started = self._printed = time.monotonic()
        self._num_ended = self._num_failed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        elif self._stays:
            self._print()

    def update(self, num_ended: int, num_failed: int) -> None:
        """Called when a request has ended; both count all of the run."""
        self._num_ended, self._num_failed = num_ended, num_failed
        if self._bar is not None:
            self._bar.update(num_ended - self._bar.n)
        elif time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        of = "" if self._num_requests is None else f" of {self._num_requests:,}"
        text = f"{self._label}: {self._num_ended:,}{of} requests in {self._printed - self._started:.1f} s"
        print(text + (f", {self._num_failed:,} failed" if self._num_failed else ""), file=sys.stderr, flush=True)


def _make_bar(label: str, num_requests: int | None, *, stays: bool) -> Any:
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm(total=num_requests, desc=label, unit=" requests", leave=stays)
