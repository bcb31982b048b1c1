"""Requests that are ended from outside count as ended: in metrics, and in the advice to callers that are refused."""

import time

import pytest

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.step_loop import RetryAdvisor, StepLoop
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


# When a refused caller should come back


def test_without_history_the_advice_is_a_second():
    assert RetryAdvisor().retry_after_ms(now=5.0) == 1000


def test_one_end_tells_no_pace():
    advisor = RetryAdvisor()
    advisor.ended(1, now=0.0)
    assert advisor.retry_after_ms(now=3.0) == 1000


def test_the_advice_is_the_pace_of_recent_ends():
    advisor = RetryAdvisor()
    for second in range(10):
        advisor.ended(2, now=float(second))
    assert advisor.retry_after_ms(now=10.0) == 500


def test_the_advice_stays_within_its_bounds():
    advisor = RetryAdvisor()
    advisor.ended(60, now=0.0)
    assert advisor.retry_after_ms(now=0.1) == 50
    slow = RetryAdvisor()
    slow.ended(2, now=0.0)
    assert slow.retry_after_ms(now=10.0) == 5000


def test_time_without_work_is_no_pace():
    advisor = RetryAdvisor()
    for each in range(64):
        advisor.ended(1, now=each / 20)
    for idle_s in (10 * 60.0, 3600.0):
        assert advisor.retry_after_ms(now=3.2 + idle_s) == 1000


def test_after_a_pause_the_pace_is_that_of_what_ended_since():
    advisor = RetryAdvisor()
    advisor.ended(30, now=0.0)
    for each in range(10):
        advisor.ended(1, now=600.0 + each / 10)
    assert advisor.retry_after_ms(now=601.0) == 100
