"""Requests of a replica that cannot go on with them are served by another one: no worker, or it drains."""

import asyncio

from google.rpc import code_pb2

from quire.rpc.errors import Unavailable
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, collect, error_of, running_gateway, stream_request
from tests.support.processes import until_true

NUM_TOKENS = 30


def start_requests(gateway: RunningGateway, num_requests: int = 8, **fields) -> list[asyncio.Task]:
    return [
        asyncio.create_task(
            collect(
                gateway.generation.GenerateStream(stream_request(f"request {number}", max_tokens=NUM_TOKENS, **fields))
            )
        )
        for number in range(num_requests)
    ]


async def start_at_both(gateway: RunningGateway, *schedulers: FakeScheduler) -> list[asyncio.Task]:
    """Requests, of which each scheduler has some, and none has a token."""
    for each in schedulers:
        each.emits.clear()
    reading = start_requests(gateway)
    await until_true(lambda: sum(len(each.live) for each in schedulers) == len(reading))
    assert all(each.live for each in schedulers)
    return reading


async def assert_all_complete(reading: list[asyncio.Task]) -> None:
    for stream in await asyncio.gather(*reading):
        first, second = stream.token_ids[:2]
        # As one scheduler alone would have answered: each token follows from the prompt and its position.
        assert stream.token_ids == [40 + (first - 40 + 7 * position) % 200 for position in range(NUM_TOKENS)]
        assert second != first


async def test_requests_leave_a_replica_without_its_worker_for_one_that_runs(scheduler, other):
    scheduler.step_delay_s = other.step_delay_s = 0.01
    async with running_gateway(scheduler, other, failover_delay=0.05) as gateway:
        reading = await start_at_both(gateway, scheduler, other)
        other.emits.set()
        there = {request.submit.request_id for request in scheduler.live.values()}
        scheduler.lose_worker()
        await assert_all_complete(reading)
        assert there <= {submit.request_id for submit in other.submits}
        await scheduler.until(lambda: not scheduler.live)
        assert set(scheduler.aborted) == there


async def test_requests_stay_where_the_worker_is_back_soon(scheduler, other):
    scheduler.step_delay_s = other.step_delay_s = 0.01
    async with running_gateway(scheduler, other, failover_delay=30.0) as gateway:
        reading = await start_at_both(gateway, scheduler, other)
        num_submits = len(scheduler.submits), len(other.submits)
        other.emits.set()
        scheduler.lose_worker()
        scheduler.regain_worker()
        await assert_all_complete(reading)
        assert (len(scheduler.submits), len(other.submits)) == num_submits
        assert not scheduler.aborted


async def test_what_still_gets_tokens_stays_at_a_replica_that_says_it_is_not_ready(scheduler, other):
    """So it is while a scheduler drains."""
    scheduler.step_delay_s = other.step_delay_s = 0.02
    async with running_gateway(scheduler, other, failover_delay=0.4) as gateway:
        reading = await start_at_both(gateway, scheduler, other)
        num_submits = len(scheduler.submits)
        scheduler.emits.set()
        other.emits.set()
        scheduler.drain()
        await assert_all_complete(reading)
        assert not scheduler.aborted
        assert len(scheduler.submits) == num_submits


async def test_refusals_of_a_replica_that_drains_are_placed_anew(scheduler, other):
    """Those that were on their way when it said so."""
    async with running_gateway(scheduler, other) as gateway:
        scheduler.drain(tells=False)
        other.emits.clear()
        reading = start_requests(gateway)
        await scheduler.until(lambda: scheduler.submits)
        other.emits.set()
        await assert_all_complete(reading)
        assert len(other.submits) == 8


async def test_refusal_after_one_of_a_replica_that_drains_counts_as_the_first(scheduler, other):
    """It was never accepted, so it does not wait for a place in the queue."""
    async with running_gateway(scheduler, other) as gateway:
        scheduler.drain(tells=False)
        other.emits.clear()
        reading = start_requests(gateway, 6)
        await until_true(lambda: scheduler.submits and len(other.live) == 6)
        refusals = [scheduler_pb2.RequestFailure(code=code_pb2.RESOURCE_EXHAUSTED, reason="QUEUE_FULL")] * 2
        other.refusal.extend(refusals)
        # Its successor is about to drain, too.
        scheduler.drains = False
        scheduler.break_streams()
        await scheduler.until(lambda: scheduler.connections == 2 and scheduler.is_heard)
        scheduler.drain(tells=False)
        new = [
            asyncio.create_task(error_of(gateway.generation.GenerateStream(stream_request(f"new {number}"))))
            for number in range(2)
        ]
        assert {error.reason for error in await asyncio.gather(*new)} == {"QUEUE_FULL"}
        other.emits.set()
        await assert_all_complete(reading)


async def test_waiting_for_the_successor_of_a_replica_that_drains_ends_some_time_after_that_did(scheduler):
    async with running_gateway(scheduler, connect_timeout=0.1) as gateway:
        scheduler.drain()
        failing = asyncio.create_task(error_of(gateway.generation.GenerateStream(stream_request())))
        assert await asyncio.wait([failing], timeout=0.5) == (set(), {failing})
        await scheduler.stop()
        error = await failing
        assert isinstance(error, Unavailable)
        assert error.reason == "NO_SCHEDULER"
        assert len(scheduler.submits) == 1
