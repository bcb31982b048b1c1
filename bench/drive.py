"""Drives the scheduler's core without a worker: a rule stands for the model, two steps are in flight."""

import time
from collections import deque
from collections.abc import Callable, Mapping

from scheduler_svc.core.request import ClientId, Handle, RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import ClientEvents, StepPlan, StepResult

CLIENT = ClientId(0)

Source = Callable[[StepPlan], StepResult]
"""What a worker would answer to a step."""


class Drive:
    """A scheduler, and the results that it has not been given yet. `clock` says the time in seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        source: Source,
        max_in_flight: int = 2,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.scheduler = scheduler
        self._source = source
        self._max_in_flight = max_in_flight
        self._clock = clock
        self._results: deque[StepResult] = deque()

    def plan(self) -> StepPlan | None:
        """Plans one more step, or returns None where enough are in flight or there is nothing to compute."""
        if len(self._results) >= self._max_in_flight:
            return None
        plan = self.scheduler.schedule(self._clock())
        if plan is not None:
            self._results.append(self._source(plan))
        return plan

    def deliver(self) -> Mapping[ClientId, ClientEvents]:
        """Applies the oldest result. RuntimeError where none is left: the scheduler has nothing to do, or is stuck."""
        if not self._results:
            raise RuntimeError("no step is in flight")
        return self.scheduler.apply(self._results.popleft(), self._clock())

    def lose_worker(self) -> None:
        """Loses everything in flight, as when a worker dies."""
        self._results.clear()
        self.scheduler.void_in_flight(self._clock())

    @property
    def is_idle(self) -> bool:
        """Whether no result is left to apply."""
        return not self._results


def key_of(index: int) -> RequestKey:
    """The key of the request with this number."""
    return RequestKey(CLIENT, Handle(index))
