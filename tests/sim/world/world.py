"""A world: simulated processes on one virtual clock. All that happens in it is a function of its seed.

No time passes between two events. The seed decides the order of processes that are ready at the same time, the duration
of messages and jobs, and the error of each clock. The history of a world has a hash, so that two runs can be compared.
"""

import asyncio
import gc
import hashlib
import heapq
import itertools
import logging
import random
import sys
import warnings
from asyncio import events
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager, suppress
from contextvars import copy_context
from typing import Any

from quire.runtime.clock import CLOCK
from quire.runtime.entropy import ENTROPY
from quire.runtime.failpoint import FAILPOINTS
from tests.sim.world.loop import NodeLoop

_START_UNIX_S = 1_800_000_000.0
_MAX_TURNS_AT_ONCE = 100_000
_MAX_CLOSINGS = 20
_MAX_JOB_S = 0.002
_MAX_CLOCK_DRIFT = 1e-4
_MAX_CLOCK_OFFSET_S = 2.0


class StuckError(Exception):
    """Nothing can happen any more, or the time is over, and the awaited condition does not hold."""


class ServiceFailedError(Exception):
    """A service failed as `__cause__` says, which ends the world."""


class KilledError(BaseException):
    """Unwinds the code of a process that is killed in the middle of it. Effects of `finally` blocks on the way stay in
    the dead process: its loop is cut and its messages are not sent."""


class Node:
    """A simulated process, from its start to its end; a restarted process is another node of the same host.

    Attributes:
        host: The machine that it runs on.
        errors: Uncaught errors.
    """

    def __init__(self, world: "World", host: str, number: int) -> None:
        self.host = host
        self.name = f"{host}#{number}"
        self.is_dead = False
        self.is_stopped = False
        self.went_on_s = -1.0
        """The time at which it continued after a stop."""
        self.errors: list[dict[str, Any]] = []
        self._world = world
        self._random = world.generator(self.name)
        self._chance = world.generator(f"{self.name}'s clock and jobs")
        self._rate = 1.0 + self._chance.uniform(-_MAX_CLOCK_DRIFT, _MAX_CLOCK_DRIFT)
        self._boot_s = self._chance.uniform(10, 1e6)
        offset_s = self._chance.uniform(-_MAX_CLOCK_OFFSET_S, _MAX_CLOCK_OFFSET_S)
        # All processes of a host see the same Unix clock.
        self._unix_offset_s = _START_UNIX_S + world.clock_offsets_s.setdefault(host, offset_s)
        self.context = copy_context()
        self.context.run(CLOCK.set, self)
        self.context.run(ENTROPY.set, self)
        self.context.run(FAILPOINTS.set, self)
        self.loop = NodeLoop(self)
        self.on_end: list[Callable[[], None]] = []
        """Callbacks at the end of the process, as the kernel closes its sockets and files."""

    def monotonic(self) -> float:
        return self._boot_s + self._world.now * self._rate

    def unix_ns(self) -> int:
        offset_s = self._unix_offset_s - self._world.set_back_s.get(self.host, 0.0)
        return round((offset_s + self._world.now) * 1e9)

    def thread_time(self) -> float:
        return self.monotonic()

    def sleep(self, seconds: float, /) -> None:
        """Does nothing: a thread's wait is part of the duration of its job."""

    def random_bytes(self, count: int) -> bytes:
        return self._random.randbytes(count)

    def passed(self, name: str) -> None:
        """The process passes a failpoint, and dies there if the world decides so."""
        if not self.is_dead and self._world.is_due(self, name):
            self.kill()
            raise KilledError(name)

    def start(self, main: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Runs a coroutine in the process; returns its task."""
        return self.context.copy().run(lambda: self.loop.create_task(main()))

    def kill(self) -> None:
        """kill -9: no code of the process runs any more, not even a `finally`; the kernel closes its connections."""
        if self.is_dead:
            return
        self._world.note("kill", self.name)
        self.is_dead = True
        self._world.end(self)
        for close in self.on_end:
            try:
                close()
            except Exception as error:
                # The loop is cut, and does not catch errors any more.
                self.fail(error)
                raise

    def stop(self) -> None:
        """SIGSTOP: nothing runs until `go_on`, and no other process is notified."""
        self._world.note("stop", self.name)
        self.is_stopped = True

    def go_on(self) -> None:
        self._world.note("continue", self.name)
        self.is_stopped, self.went_on_s = False, self.monotonic()

    # The surface of `loop.Process`

    def wake_at(self, when: float, handle: Any) -> None:
        at = (when - self._boot_s) / self._rate

        def fire() -> None:
            if not handle.cancelled():
                self.loop.put(handle)

        self._world.at(at, fire)

    def run_job(self, job: Callable[[], None], seconds: float | None = None) -> None:
        """Runs a thread's work: it takes time, and then happens at once. While the process is stopped, it waits."""
        duration = self._chance.uniform(0, _MAX_JOB_S) if seconds is None else seconds

        def run() -> None:
            if self.is_stopped:
                self._world.after(_MAX_JOB_S, run)
            elif not self.is_dead:
                self._world.note("job", self.name)
                with suppress(KilledError):
                    self.context.copy().run(job)

        self._world.after(duration, run)

    def failed(self, context: dict[str, Any]) -> None:
        self.errors.append(context)
        self._world.has_errors = True
        error = context.get("exception")
        self.fail(error if isinstance(error, BaseException) else AssertionError(context.get("message")))

    def fail(self, error: BaseException) -> None:
        """Reports a failure of the process, which ends the world even if some code catches the error now."""
        self._world.fail(self, error)


class World:
    """The whole simulation. `with new_world(seed) as world` makes one.

    Attributes:
        now: Seconds since its beginning.
        random: Draws the order of processes, and everything that has no generator of its own.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.random = random.Random(seed)
        self.nodes: list[Node] = []
        self._live: list[Node] = []
        self.num_events = 0
        self.has_errors = False
        """Whether a process has an uncaught error."""
        self.set_back_s: dict[str, float] = {}
        """The seconds by which the clocks of hosts were set back since the beginning."""
        self.clock_offsets_s: dict[str, float] = {}
        """The errors of the hosts' clocks."""
        self.num_passed: Counter[str] = Counter()
        """The number of passes of each failpoint, by any process."""
        self._deaths: dict[tuple[str, str], int] = {}
        self._failure: ServiceFailedError | None = None
        self.story: list[tuple[float, tuple[object, ...]]] | None = None
        """Events with their times, if a reader wants them."""
        self._numbers: dict[str, itertools.count[int]] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._history: list[str] = []
        self._noted_at, self._when = self.now, repr(self.now)
        self._kept: list[Any] = []

    def close(self) -> None:
        """Closes the coroutines of all processes. Their `finally` blocks have no effect on any process."""
        self._kept.extend(node.loop.cut() for node in self._live)
        with _silent_finalizers():
            for thing in itertools.chain.from_iterable(self._kept):
                if isinstance(thing, asyncio.Task):
                    _close(thing)
            self._kept.clear()
            self._events.clear()

    def generator(self, name: str) -> random.Random:
        """A separate generator for something with a name. Its draws do not depend on other draws, so that a world
        changes little if a request or a fault is left out."""
        return random.Random(f"{self.seed} {name}")

    @property
    def digest(self) -> str:
        """A hash of the world's history."""
        return hashlib.blake2b("".join(self._history).encode(), digest_size=16).hexdigest()

    def note(self, *what: object) -> None:
        """Adds an event to the digest. Its arguments must be the same in every process that runs the world."""
        self.num_events += 1
        if self.now is not self._noted_at:
            self._noted_at, self._when = self.now, repr(self.now)
        self._history.append(f"{self._when} {what!r}")
        if self.story is not None:
            self.story.append((self.now, what))

    def node(self, host: str) -> Node:
        """A new process."""
        number = next(self._numbers.setdefault(host, itertools.count()))
        node = Node(self, host, number)
        self.nodes.append(node)
        self._live.append(node)
        self.note("start", node.name)
        return node

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Runs an action at a time; at once if that is past."""
        heapq.heappush(self._events, (max(when, self.now), next(self._order), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        self.at(self.now + seconds, action)

    def set_back(self, host: str, seconds: float) -> None:
        """Corrects the clock of a host, by a negative number to the future; monotonic time is unchanged."""
        self.note("clock", host, round(seconds, 6))
        self.set_back_s[host] = self.set_back_s.get(host, 0.0) + seconds

    def kill_at(self, host: str, failpoint: str, number: int) -> None:
        """Kills the process of the host that makes this pass of the failpoint, counted from now on."""
        self.note("arm", host, failpoint, number)
        self._deaths[host, failpoint] = number

    def is_due(self, node: Node, failpoint: str) -> bool:
        """Whether the process dies at this pass of a failpoint."""
        self.num_passed[failpoint] += 1
        number = self._deaths.get((node.host, failpoint))
        if number is None:
            return False
        self._deaths[node.host, failpoint] = number - 1
        if number > 1:
            return False
        del self._deaths[node.host, failpoint]
        self.note("failpoint", node.name, failpoint)
        return True

    def fail(self, node: Node, error: BaseException) -> None:
        """Records the first failure of a process, which ends the world."""
        if self._failure is None:
            self.note("failed", node.name)
            where = f"(seed {self.seed}, second {self.now:.3f})"
            self._failure = ServiceFailedError(f"{node.name}: {type(error).__name__}: {error} {where}")
            self._failure.__cause__ = error

    def end(self, node: Node) -> None:
        """Removes a killed process. Its suspended objects stay as they are."""
        self._kept.append(node.loop.cut())
        self._live.remove(node)

    def run(self, until: Callable[[], bool], limit_s: float) -> None:
        """Runs events until a condition holds.

        Raises:
            StuckError: it does not hold after `limit_s` virtual seconds, or nothing can happen any more.
            ServiceFailedError: a process failed.
        """
        with _asyncgen_hooks_kept():
            self._run(until, self.now + limit_s, limit_s)

    def _run(self, until: Callable[[], bool], end: float, limit_s: float) -> None:
        num_turns, live = 0, self._live
        while not until():
            if self._failure is not None:
                raise self._failure
            ready = [node for node in live if node.loop.ready and not node.is_stopped]
            if ready:
                node = ready[0] if len(ready) == 1 else self.random.choice(ready)
                self.note("turn", node.name, node.loop.turn())
                num_turns += 1
                if num_turns > _MAX_TURNS_AT_ONCE:
                    raise StuckError(f"{node.name} runs and runs, and no time passes (seed {self.seed})")
                continue
            if not self._events:
                raise StuckError(f"nothing can happen any more (seed {self.seed}, second {self.now:.3f})")
            when, _, action = heapq.heappop(self._events)
            if when > end:
                heapq.heappush(self._events, (when, next(self._order), action))
                raise StuckError(f"not within {limit_s:g} s (seed {self.seed}, second {self.now:.3f})")
            if when > self.now:
                num_turns = 0
            self.now = when
            action()


@contextmanager
def _asyncgen_hooks_kept() -> Iterator[None]:
    """Restores the hooks of asynchronous generators, which loops replace in their turns."""
    hooks = sys.get_asyncgen_hooks()
    try:
        yield
    finally:
        sys.set_asyncgen_hooks(*hooks)


@contextmanager
def new_world(seed: int) -> Iterator[World]:
    """A new world; nothing of it goes on after the block."""
    with without_collections():
        # Services configure the log of their process, which here is that of the tests.
        root = logging.getLogger()
        log_handlers, log_level = list(root.handlers), root.level
        root.setLevel(logging.ERROR)
        world = World(seed)
        try:
            yield world
        finally:
            world.close()
            root.handlers[:] = log_handlers
            root.setLevel(log_level)


@contextmanager
def without_collections() -> Iterator[None]:
    """While the block runs, no garbage is collected, since finalizers would run at moments that depend on what the
    process did before. Afterwards worlds are freed that nothing references any more."""
    if not gc.isenabled():
        yield
        return
    collect_worlds()
    gc.disable()
    # Objects that exist already need not be visited again. A world among them would stay for ever.
    gc.freeze()
    try:
        yield
    finally:
        collect_worlds()
        gc.enable()


def collect_worlds() -> None:
    """Frees worlds that nothing references any more, without a warning of the files that their processes left open."""
    with _silent_finalizers():
        # Finalizers of coroutines revive their world once.
        while gc.collect():
            pass


def _close(task: asyncio.Task[Any]) -> None:
    """Closes the coroutine of a task whose loop is cut. One that waits again in a `finally` is closed again."""
    outer = events._get_running_loop()
    events._set_running_loop(task.get_loop())
    try:
        for _ in range(_MAX_CLOSINGS):
            with suppress(BaseException):
                task.get_coro().close()
                return
    finally:
        events._set_running_loop(outer)


@contextmanager
def _silent_finalizers() -> Iterator[None]:
    before = sys.unraisablehook
    sys.unraisablehook = lambda _: None
    logging.disable()
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(logging.NOTSET)
        sys.unraisablehook = before
