"""Time of a step by part of the scheduler's core, measured from outside."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from scheduler_svc.core.admission import TokenShares
from scheduler_svc.core.planner import Planner
from scheduler_svc.core.results import Results
from scheduler_svc.core.running_batch import Batch
from scheduler_svc.core.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Part:
    """A function or method of the core, `owner.attribute`, whose time counts for the named part."""

    name: str
    owner: Any
    attribute: str


@dataclass(slots=True)
class PartTimes:
    """Seconds spent in each part since the start, without the seconds of parts that run inside it."""

    clock: Callable[[], float] = time.perf_counter
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    _inner: list[float] = field(default_factory=list)
    """For each part that is running, outermost first, the seconds that parts inside it took."""

    @contextmanager
    def measure(self, parts: Sequence[Part]) -> Iterator[None]:
        """Measures these parts while the context is open. AttributeError if one does not exist."""
        with ExitStack() as stack:
            for part in parts:
                timed = self.timed(part.name, getattr(part.owner, part.attribute))
                stack.enter_context(patch.object(part.owner, part.attribute, timed))
            yield

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps the function so that its time is counted."""

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self._inner.append(0.0)
            started = self.clock()
            try:
                return function(*args, **kwargs)
            finally:
                elapsed = self.clock() - started
                self.seconds[name] += elapsed - self._inner.pop()
                if self._inner:
                    self._inner[-1] += elapsed

        return wrapper


def core_parts(scheduler: Scheduler) -> tuple[Part, ...]:
    """The parts of each step of this core."""
    return (
        Part("make room", Planner, "_displace"),
        Part("make room", Planner, "_preempt_for_decodes"),
        Part("decodes", Batch, "add_decodes"),
        Part("prefills and admission", Planner, "_resume_swapped"),
        Part("prefills and admission", TokenShares, "add_prefills"),
        Part("prefills and admission", Planner, "_admit"),
        Part("commit", Planner, "_commit"),
        Part("rest of schedule", scheduler, "schedule"),
        Part("seal", Results, "_seal"),
        Part("ends", Results, "_end_groups"),
        Part("ends", Batch, "end"),
        Part("tokens", scheduler, "apply"),
    )
