"""Calls of the core that are rare, or grow with more than the rows of a step: how long each blocks the event loop."""

import gc
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from bench.report import Series
from bench.rule_source import constant_tokens, key_of, make_request
from scheduler_svc.core.config import PolicyKind, SchedulerConfig
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan

BOUND_MS = 5.0
"""Maximum time of any one call with 1,024 rows."""

_BLOCK_SIZE = 16
_LONG_PROMPT = 120_000


def measure_calls(num_rows: int, num_runs: int) -> Iterator[Series]:
    """Milliseconds of processor time of each call of CALLS, `num_runs` times, on a new scheduler each time."""
    for name, make in CALLS:
        yield Series(f"{num_rows}, {name}", "ms", tuple(_milliseconds(make(num_rows)) for _ in range(num_runs)))


Calls = Iterable[Callable[[], object]]
"""Successive calls; the slowest one counts."""


def _milliseconds(calls: Calls) -> float:
    slowest = 0.0
    gc.collect()
    gc.disable()
    try:
        for call in calls:
            started = time.process_time()
            call()
            slowest = max(slowest, time.process_time() - started)
    finally:
        gc.enable()
    return slowest * 1e3


def _config(num_rows: int, blocks_each: int, **changes: Any) -> SchedulerConfig:
    config = SchedulerConfig(
        num_blocks=num_rows * blocks_each,
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_rows,
        # All submitted requests run after a few steps, before any of them ends.
        max_num_batched_tokens=max(2048, 8 * num_rows),
        max_model_len=num_rows * blocks_each * _BLOCK_SIZE,
        max_waiting_requests=10 * num_rows,
        max_waiting_tokens=10**9,
        watermark=0.0,
    )
    return replace(config, **changes)


def _request(index: int, prompt_len: int, num_output_tokens: int = 64, **changes: Any) -> Request:
    # Prompts share nothing.
    return make_request(index, [index, *[7] * (prompt_len - 1)], num_output_tokens, **changes)


def _plan(scheduler: Scheduler, plans: list[StepPlan]) -> None:
    """Plans one step, which must have something to compute."""
    plan = scheduler.schedule(0.0)
    if plan is None:
        raise ValueError("nothing is left to compute")
    plans.append(plan)


def _step(scheduler: Scheduler) -> StepPlan | None:
    plan = scheduler.schedule(0.0)
    if plan is not None:
        scheduler.apply(constant_tokens(plan), 0.0)
    return plan


def _full(num_rows: int, config: SchedulerConfig, *, priorities: tuple[int, ...] = (0,)) -> Scheduler:
    """All rows but one decode, with 7 or 8 blocks each, of 8 blocks for each row."""
    scheduler = Scheduler(config)
    for index in range(num_rows - 1):
        priority = priorities[index % len(priorities)]
        scheduler.submit(_request(index, 7 * _BLOCK_SIZE - 8, 32, priority=priority), 0.0)
    while len(scheduler.waiting) or scheduler.batch.rows.prefilling().size:
        if _step(scheduler) is None:
            raise ValueError("the pool is too small")
    return scheduler


def _displacing(num_rows: int) -> Calls:
    """One request needs half of the blocks, which all belong to requests of lower priority."""
    scheduler = _full(num_rows, _config(num_rows, 8, policy=PolicyKind.PRIORITY))
    scheduler.submit(_request(num_rows, num_rows * 4 * _BLOCK_SIZE, 8, priority=1), 0.0)
    yield partial(scheduler.schedule, 0.0)


def _displacing_in_vain(num_rows: int) -> Calls:
    """Half of the requests may be preempted, which would not free enough blocks."""
    scheduler = _full(num_rows, _config(num_rows, 8, policy=PolicyKind.PRIORITY), priorities=(0, 100))
    scheduler.submit(_request(num_rows, num_rows * 6 * _BLOCK_SIZE, 8, priority=1), 0.0)
    yield from (partial(_step, scheduler) for _ in range(3))


def _arrivals(num_rows: int) -> Calls:
    """A request of one prompt token for each row, all in one step."""
    yield from _schedules(_submitted(num_rows, num_rows))


def _arrivals_of_tenants(num_rows: int) -> Calls:
    """Same as `_arrivals`, with a tenant for each request under the fair policy; includes the submissions."""
    scheduler = Scheduler(_config(num_rows, 8, policy=PolicyKind.FAIR))
    for index in range(num_rows):
        yield partial(scheduler.submit, _request(index, 1, tenant=str(index)), 0.0)
    yield from _schedules(scheduler)


def _pressure_of_tenants(num_rows: int) -> Calls:
    """A step that preempts, with a tenant for each row."""
    scheduler = Scheduler(_config(num_rows, 2, policy=PolicyKind.FAIR))
    for index in range(num_rows):
        scheduler.submit(_request(index, 2 * _BLOCK_SIZE - 2, 24, tenant=str(index)), 0.0)
    for _ in range(12):
        yield from _schedule(scheduler)


def _submitted(num_rows: int, num_requests: int, prompt_len: int = 1) -> Scheduler:
    """A scheduler with waiting requests, and blocks for all of them."""
    scheduler = Scheduler(_config(num_rows, 8))
    for index in range(num_requests):
        scheduler.submit(_request(index, prompt_len), 0.0)
    return scheduler


def _schedule(scheduler: Scheduler) -> Calls:
    """The call of `schedule` of one step. Its result is applied too, but not timed."""
    plans: list[StepPlan] = []
    yield partial(_plan, scheduler, plans)
    scheduler.apply(constant_tokens(plans[0]), 0.0)


def _schedules(scheduler: Scheduler) -> Calls:
    """Calls of `schedule` until no request waits."""
    while len(scheduler.waiting):
        yield from _schedule(scheduler)


def _schedule_and_apply(scheduler: Scheduler) -> Calls:
    """Both calls of one step."""
    plans: list[StepPlan] = []
    yield partial(_plan, scheduler, plans)
    yield partial(scheduler.apply, constant_tokens(plans[0]), 0.0)


def _arrival_results(num_rows: int) -> Calls:
    """The result of a step in which all rows get their first token."""
    scheduler = _submitted(num_rows, num_rows)
    while len(scheduler.waiting):
        plans: list[StepPlan] = []
        _plan(scheduler, plans)
        yield partial(scheduler.apply, constant_tokens(plans[0]), 0.0)


def _ends(num_rows: int) -> Calls:
    """The result with which all rows end."""
    scheduler = _submitted(num_rows, num_rows, 100)
    while len(scheduler.waiting) or scheduler.batch.rows.prefilling().size:
        _step(scheduler)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    yield partial(scheduler.apply, constant_tokens(plan, 2), 0.0)


def _after_ends(num_rows: int) -> Calls:
    """The step after the end of all rows, with a waiting request for each row."""
    scheduler = _submitted(num_rows, 2 * num_rows)
    while scheduler.batch.rows.num_free:
        _step(scheduler)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.apply(constant_tokens(plan, 2), 0.0)
    yield from _schedules(scheduler)


def _losing(num_rows: int) -> Calls:
    """The worker is lost with all rows running."""
    scheduler = _submitted(num_rows, num_rows, 100)
    while len(scheduler.waiting):
        _step(scheduler)
    scheduler.schedule(0.0)
    yield scheduler.lose_in_flight
    yield partial(scheduler.void_in_flight, 0.0)
    yield partial(scheduler.judge_loss, was_alive=False)


def _returning(num_rows: int) -> Calls:
    """The steps after a loss, which compute all rows again."""
    scheduler = _submitted(num_rows, num_rows)
    while len(scheduler.waiting):
        _step(scheduler)
    scheduler.void_in_flight(0.0)
    yield from _schedules(scheduler)


def _long_scheduler(num_rows: int, **changes: Any) -> Scheduler:
    blocks_each = 8 + _LONG_PROMPT // _BLOCK_SIZE * 2 // num_rows + 1
    return Scheduler(_config(num_rows, blocks_each, max_num_batched_tokens=2048, **changes))


def _long_prompt(num_rows: int) -> Calls:
    """A prompt of 120,000 tokens, from its submission to its first token."""
    yield from _whole(_long_scheduler(num_rows), _request(0, _LONG_PROMPT, 8))


def _cached_long_prompt(num_rows: int) -> Calls:
    """Same as `_long_prompt`, with all of the prompt cached."""
    scheduler = _long_scheduler(num_rows)
    request = _request(0, _LONG_PROMPT, 1)
    for call in _whole(scheduler, request):
        call()
    yield from _whole(scheduler, replace(request, key=key_of(1), max_tokens=8))


def _prefills_beside_cached(num_rows: int) -> Calls:
    """Steps that compute prompts in chunks, while longer prompts wait whose cached prefixes leave less to compute."""
    scheduler = _long_scheduler(num_rows, max_num_seqs=3)
    cached = _request(0, _LONG_PROMPT, 1)
    for call in _whole(scheduler, cached):
        call()
    for index in range(1, 4):
        scheduler.submit(_request(index, _LONG_PROMPT // 6, 8), 0.0)
    for index, num_more in ((4, _LONG_PROMPT // 4), (5, 10)):
        prompt = [*cached.prompt, *[7] * num_more]
        scheduler.submit(replace(cached, key=key_of(index), prompt=prompt, max_tokens=8), 0.0)
    for _ in range(6):
        yield from _schedule_and_apply(scheduler)


def _whole(scheduler: Scheduler, request: Request) -> Calls:
    """All calls from the submission of a request to its first token: submit, plans and results."""
    yield partial(scheduler.submit, request, 0.0)
    # A request that has a token needs one step less.
    while not any(sequence.num_output_tokens for group in scheduler.groups() for sequence in group.sequences):
        yield from _schedule_and_apply(scheduler)
        if not scheduler.num_live:
            return


CALLS: tuple[tuple[str, Callable[[int], Calls]], ...] = (
    ("displace half of all for one", _displacing),
    ("displace in vain", _displacing_in_vain),
    ("all rows arrive in one step", _arrivals),
    ("first tokens of all rows", _arrival_results),
    ("all rows arrive, a tenant each", _arrivals_of_tenants),
    ("pressure, a tenant each", _pressure_of_tenants),
    ("all rows end in one step", _ends),
    ("all rows arrive after as many ended", _after_ends),
    ("lose the worker", _losing),
    ("all rows come back after a loss", _returning),
    ("a prompt of 120,000 tokens", _long_prompt),
    ("a cached prompt of 120,000 tokens", _cached_long_prompt),
    ("prompts beside cached ones that wait", _prefills_beside_cached),
)
