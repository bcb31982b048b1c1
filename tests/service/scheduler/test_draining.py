"""A scheduler that drains says so, and goes on saying it: gateways send new requests elsewhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2

from quire.compatibility import SCHEDULER_PROTOCOL
from quire.rpc.channel import open_channel
from quire.rpc.errors import Unavailable, from_rpc_error
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_svc.service.app import serve
from scheduler_svc.settings import SchedulerSettings
from tests.support.fake_worker import FakeWorker
from tests.support.grpc_types import health_stub
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    running_scheduler,
    state_of,
    until,
    wait_attached,
)

_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def socket(tmp_path) -> str:
    return str(tmp_path / "s.sock")


@pytest.fixture
async def scheduler(worker, socket):
    async with running_scheduler(socket, worker.address) as stub:
        await wait_attached(stub)
        yield stub


@contextlib.asynccontextmanager
async def health_of(socket: str) -> AsyncIterator[Any]:
    async with open_channel(f"unix:{socket}") as channel:
        yield health_stub(channel)


async def start_draining(scheduler: scheduler_pb2_grpc.SchedulerServiceStub) -> asyncio.Task[int]:
    """Returns once it drains; the task ends with the number of requests that were left."""

    async def drain() -> int:
        return (await scheduler.Drain(scheduler_pb2.DrainRequest(timeout_ms=60_000), timeout=90)).remaining_requests

    async def drains() -> bool:
        return (await state_of(scheduler)).draining

    draining = asyncio.create_task(drain())
    await until(drains)
    return draining


async def wait_replaced(scheduler: scheduler_pb2_grpc.SchedulerServiceStub, generation: int) -> None:
    """Waits until a worker is attached that is not of this generation."""

    async def is_replaced() -> bool:
        worker = (await state_of(scheduler)).workers[0]
        return worker.attached and worker.worker_generation != generation

    await until(is_replaced)


async def read_until_told(stream: GatewayStream) -> None:
    async with asyncio.timeout(30):
        while not stream.readiness:
            await stream.read()


async def test_every_gateway_is_told_at_once_and_what_runs_ends_in_full(scheduler, worker):
    busy, _ = await GatewayStream.open(scheduler, "gateway-a")
    idle, _ = await GatewayStream.open(scheduler, "gateway-b")
    await busy.submit(make_submit(1, max_tokens=60))
    await busy.read()
    worker.hang.set()
    draining = await start_draining(scheduler)
    await read_until_told(idle)
    worker.hang.clear()
    await busy.read_until_over(1)
    assert busy.readiness == idle.readiness == [False]
    assert busy.outputs[1] == expected_tokens(1, max_tokens=60)
    assert await draining == 0
    busy.close()
    idle.close()


async def test_health_says_that_it_does_not_serve(scheduler, socket):
    async with health_of(socket) as health:
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=30)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await (await start_draining(scheduler))
        assert (await watch.read()).status == _NOT_SERVING
        watch.cancel()


async def test_a_worker_that_comes_back_does_not_make_it_ready(tmp_path, socket):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker, successor = FakeWorker(), FakeWorker()
    await worker.start(address)
    async with running_scheduler(socket, address) as scheduler, health_of(socket) as health:
        await wait_attached(scheduler)
        stream, _ = await GatewayStream.open(scheduler)
        await (await start_draining(scheduler))
        generation = (await state_of(scheduler)).workers[0].worker_generation
        await worker.stop()
        await successor.start(address)
        await wait_replaced(scheduler, generation)
        # Whatever was said before is read before the answer to this.
        await stream.submit(make_submit(1))
        await stream.read_until_over(1)
        assert stream.failed[1].reason == "DRAINING"
        assert stream.readiness == [False]
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=30)).status == _NOT_SERVING
        stream.close()
    await successor.stop()


async def test_a_stream_whose_hello_comes_after_draining_began_is_refused_with_the_reason(scheduler):
    call = scheduler.Connect()
    # The call is there before another one is answered.
    await state_of(scheduler)
    await (await start_draining(scheduler))
    hello = scheduler_pb2.Hello(protocol=SCHEDULER_PROTOCOL.message(), gateway_id="gateway-a")
    await call.write(scheduler_pb2.ConnectRequest(hello=hello))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    error = from_rpc_error(caught.value)
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"


@contextlib.asynccontextmanager
async def stopping_scheduler(
    socket: str, worker: str
) -> AsyncIterator[tuple[scheduler_pb2_grpc.SchedulerServiceStub, asyncio.Task[None]]]:
    """A stub, and the service that it is connected to, which gives its requests a minute when its task is cancelled."""
    address = f"unix:{socket}"
    settings = SchedulerSettings(listen=address, workers=(worker,), drain_timeout=60.0, log_level="warning")
    service = asyncio.create_task(serve(settings))
    try:
        async with open_channel(address) as channel:
            stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
            await stub.GetState(scheduler_pb2.GetStateRequest(), wait_for_ready=True, timeout=30)
            await wait_attached(stub)
            yield stub, service
    finally:
        service.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await service


async def open_with_waiting_request(
    scheduler: scheduler_pb2_grpc.SchedulerServiceStub, submit: scheduler_pb2.Submit
) -> GatewayStream:
    """A stream by which a request was taken that waits for the worker, which is gone."""

    async def waits() -> bool:
        return (await state_of(scheduler)).waiting_requests == 1

    stream, _ = await GatewayStream.open(scheduler, grace_period_ms=60_000)
    await stream.submit(submit)
    await until(waits)
    return stream


@pytest.mark.parametrize("durable", [False, True], ids=["plain", "durable"])
async def test_a_scheduler_that_stops_does_not_wait_for_what_nobody_can_read_any_more(socket, worker, durable):
    async with stopping_scheduler(socket, worker.address) as (scheduler, service):
        await worker.stop()
        stream = await open_with_waiting_request(scheduler, make_submit(1, durable=durable))
        service.cancel()
        stream.close()
        _, left = await asyncio.wait([service], timeout=30)
        assert not left


async def test_a_durable_request_can_be_resumed_for_as_long_as_a_gateway_is_connected_to_what_stops(tmp_path, socket):
    address = f"unix:{tmp_path / 'w.sock'}"
    worker, successor = FakeWorker(), FakeWorker()
    await worker.start(address)
    async with stopping_scheduler(socket, address) as (scheduler, service):
        await worker.stop()
        stream = await open_with_waiting_request(scheduler, make_submit(1, durable=True))
        await stream.call.write(scheduler_pb2.ConnectRequest(detach=scheduler_pb2.Detach(handle=1)))
        service.cancel()
        resume = scheduler_pb2.Resume(handle=2, request_id="request-1")
        await stream.call.write(scheduler_pb2.ConnectRequest(resume=resume))
        stream.outputs[2] = []
        await successor.start(address)
        await stream.read_until_over(2)
        assert stream.outputs[2] == expected_tokens(1)
        stream.close()
    await successor.stop()
