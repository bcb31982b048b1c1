"""A draining scheduler reports that it drains, also to new streams, and gateways send new requests elsewhere."""

import asyncio

import pytest
from grpc_health.v1 import health_pb2

from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.grpc_types import health_stub
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    running_scheduler,
    scheduler_task,
    state_of,
    until_state,
    wait_attached,
)

_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def socket(tmp_path) -> str:
    return str(tmp_path / "s.sock")


async def test_health_says_that_it_does_not_serve_also_when_a_worker_comes_back(worker, socket):
    async with running_scheduler(socket, worker.address) as scheduler, open_channel(f"unix:{socket}") as channel:
        await wait_attached(scheduler)
        watch = health_stub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        stream, _ = await GatewayStream.open(scheduler)
        drained = await scheduler.Drain(scheduler_pb2.DrainRequest(timeout_ms=60_000), timeout=90)
        assert drained.remaining_requests == 0
        assert (await watch.read()).status == _NOT_SERVING
        watch.cancel()
        before = (await state_of(scheduler)).workers[0].worker_generation
        await worker.restart()
        await until_state(
            scheduler, lambda state: state.workers[0].attached and state.workers[0].worker_generation != before
        )
        # Earlier messages are read before the answer to this request.
        await stream.submit(make_submit(1))
        await stream.read_until_over(1)
        assert stream.failed[1].reason == "DRAINING"
        assert stream.readiness == [False]
        answer = await health_stub(channel).Check(health_pb2.HealthCheckRequest(), timeout=30)
        assert answer.status == _NOT_SERVING
        stream.close()


async def open_with_waiting_request(
    scheduler: scheduler_pb2_grpc.SchedulerServiceStub, submit: scheduler_pb2.Submit
) -> GatewayStream:
    """A stream with an accepted request that waits for the lost worker."""

    stream, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    await stream.submit(submit)
    await until_state(scheduler, lambda state: state.waiting_requests == 1)
    return stream


async def test_a_scheduler_that_stops_does_not_wait_for_what_nobody_can_read_any_more(socket, worker):
    async with scheduler_task(socket, worker.address, drain_timeout=60.0) as (scheduler, service):
        await wait_attached(scheduler)
        await worker.stop()
        stream = await open_with_waiting_request(scheduler, make_submit(1, durable=True))
        service.cancel()
        stream.close()
        _, left = await asyncio.wait([service], timeout=30)
        assert not left


async def test_a_durable_request_can_be_resumed_for_as_long_as_a_gateway_is_connected_to_what_stops(socket, worker):
    async with scheduler_task(socket, worker.address, drain_timeout=60.0) as (scheduler, service):
        await wait_attached(scheduler)
        await worker.stop()
        stream = await open_with_waiting_request(scheduler, make_submit(1, durable=True))
        await stream.say(detach={"handle": 1})
        service.cancel()
        await stream.resume(2, "request-1")
        await worker.restart()
        await stream.read_until_over(2)
        assert stream.outputs[2] == expected_tokens(1)
        stream.close()


async def test_a_scheduler_that_drains_takes_what_was_accepted_before_and_says_that_it_is_busy(socket, worker):
    async with running_scheduler(socket, worker.address) as scheduler:
        await wait_attached(scheduler)
        stream, _ = await GatewayStream.open(scheduler)
        drained = await scheduler.Drain(scheduler_pb2.DrainRequest(timeout_ms=60_000), timeout=90)
        assert drained.remaining_requests == 0
        await stream.submit(make_submit(1, resubmitted=True))
        await stream.submit(make_submit(2, resubmitted=True, offer=True))
        await stream.read_until_over(1)
        assert stream.outputs[1] == expected_tokens(1)
        assert stream.failed[2].reason == "DRAINING"
        while len(stream.busy) < 3:
            await stream.read()
        assert stream.busy == [False, True, False]
        assert stream.readiness == [False] * 3
        stream.close()
