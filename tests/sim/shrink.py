"""Makes the story of a failing world short enough to read: the fewest requests and faults that still fail, and the
events of that run.

A plan is a value, so the search removes parts greedily: halves first, then one part after the other, as long as the
world fails in the same way. It takes at most `_LIMIT_S`, and then reports the smallest plan so far.
"""

import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from quire.runtime.clock import CLOCK
from quire_torture.shrinking import fewest
from tests.sim.plans import Plan
from tests.sim.world.world import Node, World
from tests.sim.worlds import run_world

_LIMIT_S = 60.0
_MAX_LINES = 80
_MAX_SHOWN = 4
_LOGGERS = ("gateway", "scheduler_svc", "worker_svc")
_DULL = frozenset({"turn", "job"})
_DULL_MESSAGES = ("message", "credit", "metadata", "hello", "welcome", "half close", "bytes", "window")


class WorldFailedError(AssertionError):
    """A world fails. The message is its shrunk story."""


@dataclass(frozen=True, slots=True)
class Failure:
    """How a world fails.

    Attributes:
        kind: The class of the error and of its causes, each with the line that raised it. Failures of one kind count as
            the same.
    """

    kind: str
    what: str


def failure_of(plan: Plan, on_world: Callable[[World], object] = lambda _: None) -> Failure | None:
    """The failure of a plan's world; None if it passes. `on_world` gets the world before it begins."""
    try:
        run_world(plan, on_world)
    except Exception as error:
        cause = "" if error.__cause__ is None else f"\n  because of {type(error.__cause__).__name__}: {error.__cause__}"
        return Failure(_kind(error), f"{type(error).__name__}: {error}{cause}")
    return None


def _kind(error: BaseException) -> str:
    # An error that was never raised itself has no frames.
    frames = traceback.extract_tb(error.__traceback__)[-1:]
    kind = "".join((type(error).__name__, *(f" at {last.filename}:{last.lineno}" for last in frames)))
    return kind if error.__cause__ is None else f"{kind} because of {_kind(error.__cause__)}"


def check_world(plan: Plan) -> None:
    """Runs the world of a plan. Raises WorldFailedError, with the story of a smaller plan, if it fails."""
    failure = failure_of(plan)
    if failure is not None:
        small, steps = shrunk(plan, failure.kind)
        raise WorldFailedError(told(plan, small, failure_of, steps))


def shrunk(plan: Plan, kind: str, limit_s: float = _LIMIT_S) -> tuple[Plan, int]:
    """The smallest plan found that fails in this way, and the number of worlds that the search ran."""
    end, num_worlds = time.monotonic() + limit_s, 0

    def fails(smaller: Plan) -> bool:
        nonlocal num_worlds
        if time.monotonic() > end:
            return False
        num_worlds += 1
        failure = failure_of(smaller)
        return failure is not None and failure.kind == kind

    while time.monotonic() <= end:
        before = plan
        faults = fewest(plan.faults, lambda rest, plan=plan: fails(replace(plan, faults=rest)))
        plan = replace(plan, faults=faults)
        requests = fewest(plan.requests, lambda rest, plan=plan: fails(replace(plan, requests=rest)))
        plan = replace(plan, requests=requests)
        if plan == before:
            break
    return plan, num_worlds


def told(plan: Plan, small: Plan, run: Callable[..., Failure | None], num_worlds: int) -> str:
    """The story of a small failing plan, for people."""
    lines: list[str] = []
    worlds: list[World] = []

    def listen(world: World) -> None:
        world.story = []
        worlds.append(world)

    with _logs(lambda: worlds[-1]):
        failure = run(small, listen)
    lines += [
        "" if failure is None else failure.what,
        f"seed {plan.seed}; of {len(plan.requests)} requests and {len(plan.faults)} faults "
        f"{len(small.requests)} and {len(small.faults)} are needed ({num_worlds} worlds ran to find that)",
        f"{_differing(small.layout)}",
        f"low limits: {', '.join(small.low_limits) or 'none'}",
        "requests:",
        *(f"  {_differing(request)}" for request in small.requests),
        "faults:",
        *(f"  {fault}" for fault in small.faults),
        "what happened:",
    ]
    told_lines = list(_relevant(worlds[-1].story or [])) if worlds else []
    if len(told_lines) > _MAX_LINES:
        told_lines = [f"  ({len(told_lines) - _MAX_LINES} lines before)", *told_lines[-_MAX_LINES:]]
    return "\n".join(lines + told_lines)


def _relevant(story: Sequence[tuple[float, tuple[Any, ...]]]) -> Iterator[str]:
    """The lines of a story without routine events; repeated events become one line."""
    last, first_at, last_at, count = "", 0.0, 0.0, 0
    for at, what in story:
        words = [str(word) for word in what]
        if words[0] in _DULL or (words[0].startswith("connection") and words[1].startswith(_DULL_MESSAGES)):
            continue
        line = " ".join(words)
        if line == last:
            last_at, count = at, count + 1
            continue
        if count:
            yield _line(last, first_at, last_at, count)
        last, first_at, last_at, count = line, at, at, 1
    if count:
        yield _line(last, first_at, last_at, count)


def _line(what: str, first_at: float, last_at: float, count: int) -> str:
    again = "" if count == 1 else f" ({count} times, until {last_at:.4f} s)"
    return f"  {first_at:9.4f} s  {what}{again}"


def _differing(value: Any) -> str:
    """The fields of a dataclass that differ from their defaults."""
    fields = type(value).__dataclass_fields__
    shown = [
        f"{name}={_short(getattr(value, name))}" for name in fields if getattr(value, name) != fields[name].default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"


def _short(value: Any) -> str:
    if isinstance(value, tuple) and len(value) > _MAX_SHOWN:
        return f"({', '.join(map(repr, value[:_MAX_SHOWN]))}, ... {len(value)} in all)"
    return f"{value:.4f}" if isinstance(value, float) else repr(value)


class _IntoStory(logging.Handler):
    """Adds what services log to the story of their world."""

    def __init__(self, world: Callable[[], World]) -> None:
        super().__init__(logging.INFO)
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        world, node = self._world(), CLOCK.get()
        if world.story is not None and isinstance(node, Node):
            said = record.getMessage()
            if record.exc_info and record.exc_info[1] is not None:
                said += f" ({type(record.exc_info[1]).__name__}: {record.exc_info[1]})"
            world.story.append((world.now, (node.name, "says:", said)))


@contextmanager
def _logs(world: Callable[[], World]) -> Iterator[None]:
    handler = _IntoStory(world)
    before = [(logger, logger.level, logger.propagate) for logger in map(logging.getLogger, _LOGGERS)]
    for logger, _, _ in before:
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False
    try:
        yield
    finally:
        for logger, level, propagates in before:
            logger.removeHandler(handler)
            logger.setLevel(level)
            logger.propagate = propagates
