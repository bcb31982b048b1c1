"""Requests that are ended from outside count as ended, in metrics and in the advice to callers that are refused; and a
worker hangs only once it was seen to for a while."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.step_loop import StepLoop
from scheduler_svc.service.worker_link import WorkerHangsError
from tests.support.core_driver import make_config, make_request
from tests.support.step_loop import make_step_loop

UNKNOWN_MS = 1000


@pytest.fixture
def metrics() -> SchedulerMetrics:
    return SchedulerMetrics()


@pytest.fixture
def loop(metrics) -> StepLoop:
    """One with requests 1 and 2, of 1 and 2 sequences, which wait."""
    loop, _ = make_step_loop(Scheduler(make_config()), metrics)
    loop.submit(make_request(1))
    loop.submit(make_request(2, num_sequences=2))
    return loop


def num_aborted(metrics: SchedulerMetrics) -> float:
    return metrics.registry.get_sample_value("quire_scheduler_requests_total", {"outcome": "aborted"}) or 0.0


def test_aborted_requests_count_each_once(loop, metrics):
    assert all(loop.abort(make_request(handle).key) for handle in (1, 2))
    assert num_aborted(metrics) == 2
    assert not loop.abort(make_request(1).key)
    assert num_aborted(metrics) == 2


def test_a_request_is_aborted_with_its_last_sequence(loop, metrics):
    loop.abort_sequence(make_request(2).key, 0)
    assert num_aborted(metrics) == 0
    loop.abort_sequence(make_request(2).key, 0)
    assert num_aborted(metrics) == 0
    loop.abort_sequence(make_request(2).key, 1)
    assert num_aborted(metrics) == 1
    loop.abort_sequence(make_request(2).key, 1)
    assert num_aborted(metrics) == 1
    assert loop.num_live == 1


def test_aborts_are_places_that_came_free(loop):
    assert loop.retry.retry_after_ms(time.monotonic()) == UNKNOWN_MS
    for handle in (1, 2):
        loop.abort(make_request(handle).key)
    assert loop.retry.retry_after_ms(time.monotonic()) < UNKNOWN_MS


async def test_with_the_last_request_the_loop_is_idle(loop):
    loop.abort(make_request(1).key)
    loop.abort_sequence(make_request(2).key, 0)
    loop.abort_sequence(make_request(2).key, 1)
    assert await loop.drain(timeout_s=None) == 0


def test_a_step_that_is_overdue_is_given_up_by_a_second_look_alone(loop):
    """As where scheduler or worker stood still: its answer comes behind the first heartbeat."""
    link: Any = SimpleNamespace(address="w:1")
    loop._steps.sent(1, 0.0)
    for now in (59.0, 61.0, 61.1):
        loop._check_progress(now, link)
    with pytest.raises(WorkerHangsError, match=r"^worker w:1 has not answered a step for 61\.5 s$"):
        loop._check_progress(61.5, link)
