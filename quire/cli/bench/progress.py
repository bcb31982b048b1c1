"""How far a run is: a bar on a terminal where tqdm is installed, lines elsewhere. Both on stderr."""

import sys
import time
from typing import Any, Self

from quire.cli.bench.driver import Outcome

_SECONDS_BETWEEN_LINES = 10.0


class Progress:
    """Of one run. `num_requests` is None where a duration decides."""

    def __init__(self, label: str, num_requests: int | None) -> None:
        self._label = label
        self._num_requests = num_requests
        self._bar = _make_bar(label, num_requests)
        self._started = self._printed = time.monotonic()
        self._outcome = Outcome()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()
        else:
            self._print()

    def update(self, outcome: Outcome) -> None:
        """Called when a request has ended."""
        self._outcome = outcome
        if self._bar is not None:
            self._bar.update(len(outcome.records) - self._bar.n)
        elif time.monotonic() - self._printed > _SECONDS_BETWEEN_LINES:
            self._print()

    def _print(self) -> None:
        self._printed = time.monotonic()
        records = self._outcome.records
        of = "" if self._num_requests is None else f" of {self._num_requests:,}"
        failed = sum(record.error is not None for record in records)
        text = f"{self._label}: {len(records):,}{of} requests in {self._printed - self._started:.1f} s"
        print(text + (f", {failed:,} failed" if failed else ""), file=sys.stderr, flush=True)


def _make_bar(label: str, num_requests: int | None) -> Any:
    if not sys.stderr.isatty():
        return None
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return None
    return tqdm(total=num_requests, desc=label, unit=" requests", leave=True)
