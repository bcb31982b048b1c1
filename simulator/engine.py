"""The loop in virtual time: requests come, the core plans steps, a cost model says when each of them is over.

Two steps are in flight, as in the service (`scheduler_svc.service.step_loop`): a step is planned while the one before
it runs, so a request that comes meanwhile enters the step after that. Nothing here draws random numbers or looks at a
clock: the same requests give the same result.
"""

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.request import (
    ClientId,
    Handle,
    NeverFitsError,
    QueueFullError,
    RefusedError,
    Request,
    RequestKey,
)
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import ClientEvents, StepResult, StepWork, Usage
from simulator.costs import CostModel
from simulator.drafts import work_with
from simulator.memory import Limit, MemoryUse, limit_of, paged_memory
from simulator.tokens import TokenSource, fake_tokens

CLIENT = ClientId(0)
MAX_STEPS_IN_FLIGHT = 2
"""As `--max-steps-in-flight` of `quire scheduler`."""


def key_of(index: int) -> RequestKey:
    """The key of the request with this number. Numbers identify requests, from 0."""
    return RequestKey(CLIENT, Handle(index))


class Arrivals(Protocol):
    """Requests and when they come. What ends may bring the next one, as in a chat or a closed loop."""

    def next_at(self) -> float | None:
        """When the next request comes, in seconds; None where none does until one that lives ends."""
        ...

    def take(self) -> Request:
        """The next request, whose key is `key_of` its number."""
        ...

    def ended(self, index: int, now: float, *, failed: bool) -> None:
        """The request with this number is over: well, or refused or failed."""
        ...


@dataclass(slots=True)
class Life:
    """What happened to one request. Times are seconds since the start.

    `sent` is when it reached the scheduler, `token_times` has a list for each sequence that was delivered, with the
    time of each token. `reason` is the code under which it was refused or failed, and `error` the message.
    """

    arrived: float
    sent: float
    request: Request
    token_times: list[list[float]] = field(default_factory=list[list[float]])
    ended: float | None = None
    usage: Usage | None = None
    reason: str | None = None
    error: str | None = None


class Step(NamedTuple):
    """One step: when it was planned, began on the device, was over there, and was applied; what it did and held."""

    planned: float
    began: float
    over: float
    applied: float
    work: StepWork
    memory: MemoryUse
    limit: Limit
    num_running: int
    num_waiting: int
    num_swapped: int
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class Simulation:
    """All requests by their number, all steps in order, how many preemptions there were, and how many drafts were
    verified and right."""

    lives: list[Life]
    steps: list[Step]
    num_preemptions: int
    num_swap_outs: int
    num_drafts: int = 0
    num_right_drafts: int = 0

    @property
    def seconds(self) -> float:
        """When the last result came."""
        return self.steps[-1].applied if self.steps else 0.0

    def column(self, name: str) -> NDArray[np.float64]:
        """One number of each step by its name: a field of `Step`, `StepWork` or `MemoryUse`, or the step's seconds on
        the device as `device_seconds`."""
        if name == "device_seconds":
            return self.column("over") - self.column("began")
        for part in ("work", "memory"):
            if self.steps and hasattr(getattr(self.steps[0], part), name):
                return np.array([getattr(getattr(step, part), name) for step in self.steps], dtype=np.float64)
        return np.array([getattr(step, name) for step in self.steps], dtype=np.float64)


class StuckError(RuntimeError):
    """Requests are left, and the scheduler plans no step: a defect of the scheduler or of a block manager."""


def simulate(
    arrivals: Arrivals,
    config: SchedulerConfig,
    costs: CostModel,
    *,
    make_blocks: Callable[[SchedulerConfig], BlockManager] = BlockManager.of,
    look: Callable[[Scheduler], MemoryUse] = paged_memory,
    tokens: TokenSource = fake_tokens,
    max_steps_in_flight: int = MAX_STEPS_IN_FLIGHT,
) -> Simulation:
    """Runs all requests to their end.

    Args:
        arrivals: The requests.
        config: Of the core.
        costs: How long steps take.
        make_blocks: Makes the block manager: the core's own, or one that gives out memory in another way.
        look: What that block manager's pool holds.
        tokens: What the device samples.
        max_steps_in_flight: As of the service.
    """
    run = _Run(arrivals, Scheduler(config, make_blocks), costs, look, tokens)
    while run.take_next():
        while len(run.scheduler.in_flight) < max_steps_in_flight and run.plan():
            pass
    scheduler, drafts = run.scheduler, run.scheduler.draft_counts
    preempted = (scheduler.num_preemptions, scheduler.num_swap_outs)
    return Simulation(run.lives, run.steps, *preempted, drafts.num_drafts, sum(drafts.right_at))


class _Run:
    def __init__(
        self,
        arrivals: Arrivals,
        scheduler: Scheduler,
        costs: CostModel,
        look: Callable[[Scheduler], MemoryUse],
        tokens: TokenSource,
    ) -> None:
        self.scheduler = scheduler
        self.lives: list[Life] = []
        self.steps: list[Step] = []
        self._arrivals = arrivals
        self._costs = costs
        self._look = look
        self._tokens = tokens
        self._now = 0.0
        self._device_free_at = 0.0
        self._answers: deque[tuple[float, StepResult]] = deque()

    def take_next(self) -> bool:
        """Goes on to the next arrival or result. Returns whether there was one."""
        arrives_at, answered_at = self._arrivals.next_at(), self._answers[0][0] if self._answers else math.inf
        if arrives_at is not None and arrives_at <= answered_at:
            self._now = max(self._now, arrives_at)
            self._submit(self._arrivals.take(), arrives_at)
            return True
        if self._answers:
            self._now, result = self._answers.popleft()
            for events in self.scheduler.apply(result, self._now).values():
                self._deliver(events)
            return True
        if self.scheduler.num_live:
            raise StuckError(f"{self.scheduler.num_live} requests are left at {self._now:.3f} s and no step is planned")
        return False

    def plan(self) -> bool:
        """Plans one step and sends it to the device. Returns whether there was anything to compute."""
        scheduler, now = self.scheduler, self._now
        plan = scheduler.schedule(now)
        if plan is None:
            return False
        result = self._tokens(plan, scheduler.batch.rows)
        work = work_with(plan, result.num_drafts)
        took = self._costs.seconds(work)
        began = max(now + took.launch, self._device_free_at)
        self._device_free_at = over = began + took.device
        # Results come in order, whatever each of them takes on its way.
        applied = max(over + took.answer, self._answers[-1][0] if self._answers else 0.0)
        self._answers.append((applied, result))
        self.steps.append(
            Step(
                planned=now,
                began=began,
                over=over,
                applied=applied,
                work=work,
                memory=self._look(scheduler),
                limit=limit_of(scheduler, plan),
                num_running=len(scheduler.running),
                num_waiting=len(scheduler.waiting),
                num_swapped=len(scheduler.swapped),
                num_preemptions=scheduler.num_preemptions,
            )
        )
        return True

    def _submit(self, request: Request, arrived: float) -> None:
        index = request.key.handle
        if request.key != key_of(len(self.lives)):
            raise ValueError(f"request {request.key} came as number {len(self.lives)}: numbers must rise by one from 0")
        life = Life(arrived, self._now, request, [[] for _ in range(request.num_returned)])
        self.lives.append(life)
        try:
            self.scheduler.submit(request, self._now)
        except RefusedError as error:
            life.reason, life.error, life.ended = _reason_of(error), str(error), self._now
            self._arrivals.ended(index, self._now, failed=True)

    def _deliver(self, events: ClientEvents) -> None:
        now, lives = self._now, self.lives
        for handle, sequence in zip(events.handles, events.sequence_indices, strict=True):
            lives[handle].token_times[sequence].append(now)
        for end in events.completed:
            life = lives[end.handle]
            life.usage, life.ended = end.usage, now
            self._arrivals.ended(end.handle, now, failed=False)
        for failure in events.failed:
            life = lives[failure.key.handle]
            life.reason, life.error, life.ended = failure.reason, failure.message, now
            self._arrivals.ended(failure.key.handle, now, failed=True)


def _reason_of(error: RefusedError) -> str:
    """As the service reports it to gateways."""
    match error:
        case QueueFullError():
            return "QUEUE_FULL"
        case NeverFitsError():
            return "NEVER_FITS"
        case _:
            return "INVALID_ARGUMENT"
