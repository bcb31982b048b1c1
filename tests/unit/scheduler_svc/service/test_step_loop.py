"""Counts of requests that are ended from outside, the time at which a worker's answer is late, and the time at which a
refused caller should come back."""

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from quire.rpc.errors import Unavailable
from quire.rpc.patience import LAST_LOOK_S
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service import replica, worker_link
from scheduler_svc.service.metrics import SchedulerMetrics
from scheduler_svc.service.refusals import RetryAdvisor
from scheduler_svc.service.step_loop import PendingOrders, StepLoop
from scheduler_svc.service.worker_link import WorkerHangsError
from tests.support.core_driver import make_config, make_request
from tests.support.step_loop import make_step_loop

UNKNOWN_MS = 1000


@pytest.fixture
def metrics() -> SchedulerMetrics:
    return SchedulerMetrics()


@pytest.fixture
def loop(metrics) -> StepLoop:
    """A loop whose requests 1 and 2, of 1 and 2 sequences, wait."""
    loop, _ = make_step_loop(Scheduler(make_config()), metrics)
    loop.replica.submit(make_request(1))
    loop.replica.submit(make_request(2, num_sequences=2))
    return loop


def num_aborted(metrics: SchedulerMetrics) -> float:
    return metrics.registry.get_sample_value("quire_scheduler_requests_total", {"outcome": "aborted"}) or 0.0


async def test_aborted_requests_count_once_each_with_their_last_sequence_and_leave_places(loop, metrics):
    assert loop.replica.retry.retry_after_ms(time.monotonic()) == UNKNOWN_MS
    for request, counted in ((1, True), (1, False)):
        assert loop.replica.abort(make_request(request).key) == counted
        assert num_aborted(metrics) == 1
    for index, expected in ((0, 1), (0, 1), (1, 2), (1, 2)):
        loop.replica.abort_sequence(make_request(2).key, index)
        assert num_aborted(metrics) == expected
    assert loop.replica.retry.retry_after_ms(time.monotonic()) < UNKNOWN_MS
    assert loop.replica.num_live == 0
    assert await loop.lifecycle.drain(timeout_s=None) == 0


async def test_an_abort_has_the_next_step_planned(loop):
    """Its blocks may be what another request waits for, and no worker's answer may be under way."""
    loop.replica.wake.clear()
    assert loop.replica.abort(make_request(1).key)
    assert loop.replica.wake.is_set()


class Link:
    """The link to a worker that takes two steps at once. While a step is sent, a request leaves."""

    address, info = "w:1", SimpleNamespace(max_steps_in_flight=2, worker_generation=1)

    def __init__(self, loop: StepLoop) -> None:
        self.sent: list[object] = []
        self._loop = loop

    async def write(self, order: bytes) -> None:
        if order.endswith(b"offer"):
            self.sent.append(order)
        else:
            self.sent.append(worker_pb2.RunRequest.FromString(order).step.step_id)
            self._loop.replica.unsent_offers.append(b"another offer")


async def test_what_is_offered_is_told_before_a_step_that_may_take_its_room(loop):
    """A worker does not send blocks that were written since they were offered."""
    link: Any = Link(loop)
    loop.replica.unsent_offers.append(b"an offer")
    loop.replica.wake.set()
    sending = asyncio.create_task(loop._send_steps(link, loop.replica.scheduler))
    await asyncio.sleep(0.01)
    sending.cancel()
    assert link.sent == [b"an offer", 1, b"another offer", 2, b"another offer"]


TIMEOUT_S = 60.0
LATE_S = TIMEOUT_S + 1
SECOND_LOOK_S = LATE_S + 2 * LAST_LOOK_S


@pytest.fixture
def pending() -> PendingOrders:
    pending = PendingOrders(TIMEOUT_S)
    pending.clear(0.0)
    return pending


def test_the_oldest_is_late_by_a_second_look(pending):
    """If scheduler or worker stood still, its answer may come right after the first heartbeat."""
    assert pending.find_late(1e6) is None
    pending.record_sent(1, 0.0)
    assert pending.record_answer(1, 5.0) == 5.0
    assert pending.find_late(1e6) is None
    pending.clear(0.0)
    pending.record_sent(1, 0.0)
    pending.record_sent(2, 0.0)
    assert pending.find_late(LATE_S) is None
    assert pending.find_late(SECOND_LOOK_S) == (1, SECOND_LOOK_S)


def test_a_step_that_is_overdue_is_told_with_the_address_of_its_worker(loop):
    loop._steps.record_sent(1, 0.0)
    for now in (59.0, 61.0, 61.1):
        loop._check_progress(now, "w:1")
    with pytest.raises(WorkerHangsError, match=r"^worker w:1 has not answered a step for 61\.5 s$"):
        loop._check_progress(61.5, "w:1")


def test_what_waited_for_the_one_before_has_its_own_time(pending):
    pending.record_sent(1, 0.0)
    pending.record_sent(2, 0.0)
    assert pending.find_late(LATE_S) is None
    pending.record_answer(1, LATE_S)
    assert pending.find_late(SECOND_LOOK_S) is None
    assert pending.find_late(LATE_S + LATE_S) is None
    assert pending.find_late(LATE_S + SECOND_LOOK_S) == (2, pytest.approx(SECOND_LOOK_S))


def test_answers_to_later_ones_give_the_oldest_no_more_time(pending):
    pending.record_sent(1, 0.0)
    for number in range(2, 100):
        pending.record_sent(number, float(number))
        pending.record_answer(number, float(number))
    assert pending.find_late(LATE_S) is None
    assert pending.find_late(SECOND_LOOK_S) == (1, SECOND_LOOK_S)


def test_with_other_workers_all_begins_anew(pending):
    pending.record_sent(1, 0.0)
    pending.clear(LATE_S)
    pending.record_sent(1, LATE_S)
    assert pending.find_late(SECOND_LOOK_S) is None


@pytest.mark.parametrize(
    ("ends", "now", "expected"),
    [
        ([], 5.0, 1000),
        # One end gives no pace.
        ([(1, 0.0)], 3.0, 1000),
        # The pace of recent ends, within bounds.
        ([(2, float(second)) for second in range(10)], 10.0, 500),
        ([(60, 0.0)], 0.1, 50),
        ([(2, 0.0)], 10.0, 5000),
        # Idle time does not count, and after a pause only ends since then count.
        ([(1, each / 20) for each in range(64)], 3.2 + 10 * 60.0, 1000),
        ([(1, each / 20) for each in range(64)], 3.2 + 3600.0, 1000),
        ([(30, 0.0), *((1, 600.0 + each / 10) for each in range(10))], 601.0, 100),
    ],
)
def test_the_advice_to_come_back_is_the_pace_of_recent_ends(ends, now, expected):
    advisor = RetryAdvisor()
    for count, at in ends:
        advisor.ended(count, now=at)
    assert advisor.retry_after_ms(now=now) == expected


async def test_a_sleep_that_a_drain_ends_does_not_say_that_it_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = make_step_loop(Scheduler(make_config()))
    loop.replica.info, loop.replica.is_attached = cast(Any, SimpleNamespace(device="cpu")), True
    loop.lifecycle._detached.set()
    passed: list[asyncio.Task[None]] = []

    async def drained(*arguments: Any, **named: Any) -> None:
        await loop.lifecycle.drain(0.0)
        # No worker is attached while it may be about to end.
        passing = asyncio.create_task(loop.lifecycle.wait_until_awake())
        await asyncio.sleep(0)
        assert not passing.done()
        passed.append(passing)

    monkeypatch.setattr(replica, "release_memory", drained)
    with pytest.raises(Unavailable, match="drains"):
        await loop.lifecycle.sleep(discard_weights=True)
    assert (loop.lifecycle.is_asleep, loop.lifecycle.loading) == (False, None)
    await passed[0]


async def test_a_second_sleep_that_fails_leaves_the_replica_asleep(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, _ = make_step_loop(Scheduler(make_config()))
    loop.replica.info, loop.replica.is_attached = cast(Any, SimpleNamespace(device="cpu")), True
    loop.lifecycle._detached.set()

    async def release(*arguments: Any, discard_weights: bool) -> None:
        if discard_weights:
            raise Unavailable("a worker is gone")

    monkeypatch.setattr(replica, "release_memory", release)
    await loop.lifecycle.sleep(discard_weights=False)
    with pytest.raises(Unavailable, match="gone"):
        await loop.lifecycle.sleep(discard_weights=True)
    assert loop.lifecycle.is_asleep


async def test_a_rank_is_told_where_another_one_cannot_give_its_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    class Channel:
        def __init__(self, address: str) -> None:
            self.address = address

        async def __aenter__(self) -> "Channel":
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def ReleaseMemory(self, request: object, timeout: float) -> None:  # noqa: ASYNC109 (a stub's)
            if self.address == "refuses":
                raise Unavailable("a worker is gone")
            try:
                await asyncio.Event().wait()
            finally:
                told.append(self.address)

    monkeypatch.setattr(worker_link, "_open", lambda address, tls: Channel(address))
    monkeypatch.setattr(worker_link.worker_pb2_grpc, "WorkerServiceStub", lambda channel: channel)
    with pytest.raises(Unavailable, match="gone"):
        await worker_link.release_memory(("waits", "refuses"), 7, 30.0, discard_weights=True)
    assert told == ["waits"]
