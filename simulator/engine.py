"""The loop in virtual time: requests arrive, the core plans steps, and a cost model gives the duration of each.

Two steps are in flight, as in the service (`scheduler_svc.service.step_loop`): a step is planned while the one before
it runs, so a request that arrives meanwhile enters the step after that. Nothing here draws random numbers or reads a
clock: the same requests give the same result.
"""

import heapq
import itertools
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
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
from simulator.memory import Limit, MemoryUse, limit_of, paged_memory
from simulator.tokens import TokenSource, fake_tokens, work_with

CLIENT = ClientId(0)
MAX_STEPS_IN_FLIGHT = 2
"""As `--max-steps-in-flight` of `quire scheduler`."""


def key_of(index: int) -> RequestKey:
    """The key of the request with this number. Numbers identify requests, from 0."""
    return RequestKey(CLIENT, Handle(index))


class Arrivals(Protocol):
    """Requests and their times of arrival. The end of one may cause the next, as in a chat or a closed loop."""

    def next_at(self) -> float | None:
        """When the next request arrives, in seconds; None if none does until a live one ends."""
        ...

    def next_request(self) -> Request:
        """The next request, whose key is `key_of` its number."""
        ...

    def record_end(self, index: int, now: float, *, failed: bool) -> None:
        """The request with this number completed, or was refused or failed."""
        ...


@dataclass(slots=True)
class Life:
    """The course of one request. Times are seconds since the start.

    `sent` is when it reached the scheduler, `token_times` has a list for each delivered sequence, with the time of each
    token. `reason` is the code under which it was refused or failed, and `error` the message. `moved_at` has the number
    of its tokens at each move to another device.
    """

    arrived: float
    sent: float
    request: Request
    token_times: list[list[float]] = field(default_factory=list[list[float]])
    ended: float | None = None
    usage: Usage | None = None
    reason: str | None = None
    error: str | None = None
    moved_at: list[int] = field(default_factory=list[int])


class Step(NamedTuple):
    """One step: when it was planned, began on the device, ended there and was applied; its work and its memory."""

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
    """All requests by number, all steps in the order of planning, the number of preemptions, the numbers of verified
    and right drafts, and the number of devices."""

    lives: list[Life]
    steps: list[Step]
    num_preemptions: int
    num_swap_outs: int
    num_drafts: int = 0
    num_right_drafts: int = 0
    num_devices: int = 1

    @property
    def seconds(self) -> float:
        """When the last result came."""
        return max((step.applied for step in self.steps), default=0.0)

    @property
    def pauses(self) -> list[float]:
        """Seconds between the last token before each move and the first one after it."""
        moves = ((life.token_times[0], at) for life in self.lives for at in life.moved_at)
        return [times[at] - times[at - 1] for times, at in moves if at < len(times)]

    def column(self, name: str) -> NDArray[np.float64]:
        """One number of each step by its name: a field of `Step`, `StepWork` or `MemoryUse`, or `device_seconds`, the
        step's seconds on the device."""
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
        config: The core's configuration.
        costs: The duration of steps.
        make_blocks: Makes the block manager: the core's own, or one that allocates memory in another way.
        look: Measures the use of that block manager's pool.
        tokens: Makes the device's samples.
        max_steps_in_flight: As in the service.
    """
    return Run(arrivals, [Device(Scheduler(config, make_blocks), costs, look, tokens, max_steps_in_flight)]).to_end()


class Device:
    """A core, and a device that answers its steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        costs: CostModel,
        look: Callable[[Scheduler], MemoryUse] = paged_memory,
        tokens: TokenSource = fake_tokens,
        max_steps_in_flight: int = MAX_STEPS_IN_FLIGHT,
    ) -> None:
        self.scheduler = scheduler
        self._costs = costs
        self._look = look
        self._tokens = tokens
        self._max_steps_in_flight = max_steps_in_flight
        self._free_at = 0.0
        self._answers: deque[tuple[float, StepResult]] = deque()

    @property
    def answers_at(self) -> float:
        """When the next result comes; infinity if no step is in flight."""
        return self._answers[0][0] if self._answers else math.inf

    def answer(self) -> tuple[float, dict[ClientId, ClientEvents]]:
        """The time of the next result, and its events."""
        now, result = self._answers.popleft()
        return now, self.scheduler.apply(result, now)

    def plan(self, now: float) -> Iterator[Step]:
        """Plans steps up to the maximum in flight, and sends them to the device."""
        scheduler = self.scheduler
        while len(scheduler.in_flight) < self._max_steps_in_flight and (plan := scheduler.schedule(now)) is not None:
            result = self._tokens(plan, scheduler.batch.rows)
            work = work_with(plan, result.num_drafts)
            took = self._costs.seconds(work)
            began = max(now + took.launch, self._free_at)
            self._free_at = over = began + took.device
            # Results arrive in order, whatever the latency of each.
            applied = max(over + took.answer, self._answers[-1][0] if self._answers else 0.0)
            self._answers.append((applied, result))
            yield Step(
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


class Run:
    """Requests and devices in one virtual time. All requests go to the first device; subclasses choose others."""

    def __init__(self, arrivals: Arrivals, devices: Sequence[Device]) -> None:
        self.now = 0.0
        self.lives: list[Life] = []
        self._arrivals = arrivals
        self._devices = devices
        self._later: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = itertools.count()

    def to_end(self) -> Simulation:
        """Runs all requests to their end."""
        steps: list[Step] = []
        while self._advance():
            for device in self._devices:
                steps += device.plan(self.now)
                self.planned(device)
        schedulers = [device.scheduler for device in self._devices]
        if num_left := sum(each.num_live for each in schedulers):
            raise StuckError(f"{num_left} requests are left at {self.now:.3f} s and no step is planned")
        return Simulation(
            self.lives,
            steps,
            sum(each.num_preemptions for each in schedulers),
            sum(each.num_swap_outs for each in schedulers),
            sum(each.draft_counts.num_drafts for each in schedulers),
            sum(sum(each.draft_counts.right_at) for each in schedulers),
            len(schedulers),
        )

    def at(self, seconds: float, call: Callable[[], object]) -> None:
        """Schedules a call at this time."""
        heapq.heappush(self._later, (seconds, next(self._numbers), call))

    def _advance(self) -> bool:
        """Advances to the next arrival, call or result. Returns whether there was one."""
        arrives_at, called_at = self._arrivals.next_at(), self._later[0][0] if self._later else math.inf
        device = min(self._devices, key=lambda each: each.answers_at)
        if arrives_at is not None and arrives_at <= min(called_at, device.answers_at):
            self.now = max(self.now, arrives_at)
            request = self._arrivals.next_request()
            if request.key != key_of(len(self.lives)):
                raise ValueError(f"request {request.key} is number {len(self.lives)}: numbers must rise by one from 0")
            self.lives.append(Life(arrives_at, self.now, request, [[] for _ in range(request.num_returned)]))
            self.submit(request)
        elif called_at <= device.answers_at and self._later:
            self.now, _, call = heapq.heappop(self._later)
            call()
        elif device.answers_at < math.inf:
            self.now, answers = device.answer()
            for events in answers.values():
                self.deliver(events)
        else:
            return False
        return True

    def choose(self, request: Request) -> Device:
        return self._devices[0]

    def planned(self, device: Device) -> None:
        """Called after the steps of a device were planned."""

    def submit(self, request: Request) -> None:
        """Submits a request to the core of a device. A refused request is over."""
        try:
            self.choose(request).scheduler.submit(request, self.now)
        except RefusedError as error:
            self._fail(request.key.handle, _reason_of(error), str(error))

    def deliver(self, events: ClientEvents) -> None:
        """Records the events that a step has for clients."""
        for handle, sequence in zip(events.handles, events.sequence_indices, strict=True):
            self.lives[handle].token_times[sequence].append(self.now)
        for end in events.completed:
            self.lives[end.handle].usage = end.usage
            self.end_request(end.handle, failed=False)
        for failure in events.failed:
            self._fail(failure.key.handle, failure.reason, failure.message)

    def _fail(self, index: int, reason: str, message: str) -> None:
        self.lives[index].reason, self.lives[index].error = reason, message
        self.end_request(index, failed=True)

    def end_request(self, index: int, *, failed: bool) -> None:
        """The request with this number is over."""
        self.lives[index].ended = self.now
        self._arrivals.record_end(index, self.now, failed=failed)


def _reason_of(error: RefusedError) -> str:
    """The reason that the service reports to gateways."""
    match error:
        case QueueFullError():
            return "QUEUE_FULL"
        case NeverFitsError():
            return "NEVER_FITS"
        case _:
            return "INVALID_ARGUMENT"
