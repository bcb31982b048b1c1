"""One long run of the scheduler's core: requests of every kind, with short lengths, in an order that the seed decides,
and all disturbances from outside."""

import gc
import random
import resource
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from bench.rule_source import VOCAB_SIZE, RuleSource, key_of
from scheduler_svc.core import invariants
from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import QueueFullError, RefusedError, Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepResult


def resident_bytes() -> int:
    """Memory of this process that is in RAM, after garbage collection."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


SHARES: Mapping[str, float] = {
    "greedy": 0.5,
    "stops": 0.15,
    "prefix": 0.2,
    "samples": 0.08,
    "best_of": 0.04,
    "beams": 0.03,
}
"""Shares of all requests by kind."""
_NUM_TENANTS = 5
_ONE_TIME_TENANTS = 0.01
_NUM_PREFIXES, _PREFIX_LEN = 64, 24
_NUM_MARKS = 20
_ABORT, _ABORT_SEQUENCE, _PREEMPT, _PIN, _UNPIN = 0.03, 0.01, 0.005, 0.002, 0.001
"""Probability of each disturbance, per submitted request."""
_FAIL_EVERY, _LOSE_WORKER_EVERY = 997, 20_011
"""Steps between two of each."""
_LONGEST_PIN = 500
"""Maximum duration of a pin in steps, which are this run's clock."""


@dataclass(frozen=True, slots=True)
class Mark:
    """Progress of a run: counts since its start, and the memory of the process."""

    HEADER: ClassVar[str] = (
        f"{'requests':>9} {'time':>10} {'steps':>9} {'preemptions':>11} {'swap outs':>9} {'pins':>6} {'resident':>13}"
    )

    num_requests: int
    seconds: float
    num_steps: int
    num_preemptions: int
    num_swap_outs: int
    num_pins: int
    resident_mib: float

    def __str__(self) -> str:
        return (
            f"{self.num_requests:>9} {self.seconds:>8.1f} s {self.num_steps:>9} {self.num_preemptions:>11} "
            f"{self.num_swap_outs:>9} {self.num_pins:>6} {self.resident_mib:>9.2f} MiB"
        )


class SoakRun:
    """All random choices come from the seed, and time is counted in steps, so a failure can be repeated."""

    def __init__(
        self,
        config: SchedulerConfig,
        num_requests: int,
        seed: int,
        memory_in_use: Callable[[], int] = resident_bytes,
    ) -> None:
        self._memory_in_use = memory_in_use
        self.scheduler = Scheduler(config)
        self._num_requests = num_requests
        self._seed = seed
        self._rng = random.Random(seed + 1)
        self._source = RuleSource(config.max_num_seqs, _FAIL_EVERY)
        self._in_flight: deque[StepResult] = deque()
        self._prefixes = _prefixes(seed)
        self._recent: deque[Request] = deque(maxlen=128)
        self._pins: deque[tuple[str, str]] = deque(maxlen=32)
        """Tenant and id of the newest pins."""
        self._num_pins = 0

    def marks(self) -> Iterator[Mark]:
        """Submits all requests and lets them end. Yields a mark after each part of them is submitted, and one at the
        end. Checks the invariants at each mark; raises InvariantViolationError."""
        started = time.perf_counter()
        every = max(self._num_requests // _NUM_MARKS, 1)
        for number, request in enumerate(_requests(self._num_requests, self._seed), start=1):
            self._submit(request)
            self._disturb()
            if number % every == 0 and number < self._num_requests:
                yield self._mark(number, started)
        while self._step():
            pass
        self.scheduler.expire_pins(self._now() + _LONGEST_PIN)
        yield self._mark(self._num_requests, started)

    def faults(self) -> list[str]:
        """Resources that are still held although all requests have ended and no pin is left."""
        scheduler = self.scheduler
        held = {
            "blocks": scheduler.batch.blocks.pool.num_used,
            "host blocks": scheduler.batch.blocks.host.pool.num_used,
            "rows": scheduler.config.max_num_seqs - scheduler.batch.rows.num_free,
            "requests": len(list(scheduler.groups())),
            "pins": len(scheduler.pins),
        }
        return [f"{count} {name} are held at the end" for name, count in held.items() if count]

    def _now(self) -> float:
        return float(self.scheduler.num_steps)

    def _submit(self, request: Request) -> None:
        """Runs steps until the queue takes the request."""
        while True:
            try:
                self.scheduler.submit(request, self._now())
            except QueueFullError:
                self._step()
            else:
                self._recent.append(request)
                return

    def _step(self) -> bool:
        """Plans a step, or applies the oldest result if two steps are in flight or nothing can be computed. Returns
        whether anything was left to do."""
        plan = self.scheduler.schedule(self._now()) if len(self._in_flight) < 2 else None
        if plan is not None:
            self._in_flight.append(self._source(plan))
            if self.scheduler.num_steps % _LOSE_WORKER_EVERY == 0:
                self._in_flight.clear()
                self.scheduler.void_in_flight(self._now())
        elif self._in_flight:
            self.scheduler.apply(self._in_flight.popleft(), self._now())
        else:
            return False
        return True

    def _disturb(self) -> None:
        """Aborts requests and changes prefixes at random, now and then."""
        request = self._rng.choice(self._recent)
        if self._happens(_ABORT):
            self.scheduler.abort(request.key)
        if self._happens(_ABORT_SEQUENCE):
            self.scheduler.abort_sequence(request.key, self._rng.randrange(request.num_sequences))
        if self._happens(_PREEMPT) and request.key in self.scheduler.running:
            self.scheduler.planner.preempt(self.scheduler.running.get(request.key), self._now())
        if self._happens(_PIN):
            self._pin()
        if self._pins and self._happens(_UNPIN):
            self.scheduler.unpin(*self._rng.choice(self._pins))

    def _pin(self) -> None:
        owner = _tenant(self._rng.randrange(100))
        # A quota or the queue may be full.
        with suppress(RefusedError):
            time_to_live = self._rng.randint(1, _LONGEST_PIN)
            pin = self.scheduler.pin(owner, self._rng.choice(self._prefixes), self._now(), time_to_live)
            self._pins.append((owner, pin.pin_id))
            self._num_pins += 1

    def _happens(self, chance: float) -> bool:
        return self._rng.random() < chance

    def _mark(self, num_requests: int, started: float) -> Mark:
        invariants.check(self.scheduler)
        scheduler, seconds = self.scheduler, time.perf_counter() - started
        counts = (scheduler.num_steps, scheduler.num_preemptions, scheduler.num_swap_outs, self._num_pins)
        return Mark(num_requests, seconds, *counts, self._memory_in_use() / 2**20)


def _prefixes(seed: int) -> list[list[int]]:
    """Prefixes that many prompts share."""
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(_PREFIX_LEN)] for _ in range(_NUM_PREFIXES)]


def _requests(count: int, seed: int) -> Iterator[Request]:
    """`count` requests with keys from 0 on. The same for the same arguments."""
    rng, shared = random.Random(seed), _prefixes(seed)
    for index in range(count):
        (kind,) = rng.choices(list(SHARES), list(SHARES.values()))
        yield _request(index, kind, shared, rng)


def _request(index: int, kind: str, shared: list[list[int]], rng: random.Random) -> Request:
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 40))]
    if kind == "prefix":
        prompt = rng.choice(shared) + prompt
    width = rng.randint(2, 4) if kind in ("samples", "best_of", "beams") else 1
    comes_once = rng.random() < _ONE_TIME_TENANTS
    return Request(
        key_of(index),
        str(index),
        prompt,
        RowSampling(seed=index),
        max_tokens=rng.randint(1, 24),
        stop_token_ids=frozenset(rng.sample(range(VOCAB_SIZE), 4)) if kind in ("stops", "beams") else frozenset(),
        tenant=f"once {index}" if comes_once else _tenant(index),
        num_sequences=width,
        num_returned=1 if kind in ("best_of", "beams") else width,
        priority=rng.randint(-2, 2),
        beam=BeamParameters(width) if kind == "beams" else None,
    )


def _tenant(index: int) -> str:
    """A tenant that comes again and again."""
    return f"tenant {index % _NUM_TENANTS}"
