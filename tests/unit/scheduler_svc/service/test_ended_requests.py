"""Requests that are ended from outside count as ended: in metrics, and in the advice to those who are refused."""

import time

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.step_loop import StepLoop
from scheduler_svc.settings import SchedulerSettings
from tests.support.core_driver import make_config, make_request

UNKNOWN_MS = 1000


def ignore(*_: object) -> None:
    """Nobody listens."""


@pytest.fixture
def metrics() -> SchedulerMetrics:
    return SchedulerMetrics()


@pytest.fixture
def loop(metrics) -> StepLoop:
    """One with requests 1 and 2, of 1 and 2 sequences, which wait."""
    loop = StepLoop(
        SchedulerSettings(listen="127.0.0.1:0", workers=("127.0.0.1:1",)), metrics, ignore, ignore, ignore, ignore
    )
    loop.scheduler = Scheduler(make_config())
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
    assert loop.num_live() == 1


def test_aborts_are_places_that_came_free(loop):
    assert loop.retry.retry_after_ms(time.monotonic()) == UNKNOWN_MS
    for handle in (1, 2):
        loop.abort(make_request(handle).key)
    assert loop.retry.retry_after_ms(time.monotonic()) < UNKNOWN_MS


async def test_with_the_last_request_the_loop_is_idle(loop):
    loop.abort(make_request(1).key)
    loop.abort_sequence(make_request(2).key, 0)
    loop.abort_sequence(make_request(2).key, 1)
    await loop.wait_idle()
