"""A device whose streams run later, in any order that their marks allow. So code that forgets to wait for work fails
sooner or later."""

import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from worker_svc.streams import Mark, Stream, Streams


class FakeMark(Mark):
    def __init__(self, device: "FakeDevice") -> None:
        self.passed = False
        self._device = device

    def is_passed(self) -> bool:
        return self.passed

    def wait(self) -> None:
        while not self.passed:
            self._device.advance()


class FakeStream(Stream):
    def __init__(self, device: "FakeDevice", name: str) -> None:
        self.name = name
        self.entries: deque[Callable[[], object] | FakeMark] = deque()
        """Work, the stream's own marks, and marks of other streams that it waits for."""
        self._device = device
        self._own: set[FakeMark] = set()

    def mark(self) -> FakeMark:
        mark = FakeMark(self._device)
        self._own.add(mark)
        self.entries.append(mark)
        return mark

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, FakeMark)
        if mark not in self._own:
            self.entries.append(mark)

    @contextmanager
    def _entered(self) -> Iterator[None]:
        before, self._device.current = self._device.current, self
        try:
            yield
        finally:
            self._device.current = before

    def used(self) -> AbstractContextManager[object]:
        return self._entered()

    @property
    def can_run(self) -> bool:
        if not self.entries:
            return False
        first = self.entries[0]
        return not isinstance(first, FakeMark) or first in self._own or first.passed

    def run_one(self) -> None:
        entry = self.entries.popleft()
        if not isinstance(entry, FakeMark):
            entry()
        elif entry in self._own:
            entry.passed = True


class FakeDevice:
    """Three streams; the next one to run is drawn at random."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.compute, self.swaps, self.results = (FakeStream(self, each) for each in ("compute", "swaps", "results"))
        self.current = self.compute

    @property
    def streams(self) -> Streams:
        return Streams(self.compute, self.swaps, self.results)

    def queue(self, work: Callable[[], object]) -> None:
        """Puts work into the stream that is in use."""
        self.current.entries.append(work)

    def advance(self) -> None:
        """Runs one entry of any stream; AssertionError if none can run."""
        ready = [each for each in (self.compute, self.swaps, self.results) if each.can_run]
        assert ready, "every stream waits"
        self._rng.choice(ready).run_one()

    def advance_some(self, most: int) -> None:
        """Runs up to `most` entries, each of any stream."""
        for _ in range(self._rng.randrange(most + 1)):
            if any(each.can_run for each in (self.compute, self.swaps, self.results)):
                self.advance()

    def finish(self) -> None:
        while any(each.entries for each in (self.compute, self.swaps, self.results)):
            self.advance()
