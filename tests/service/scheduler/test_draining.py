"""A scheduler that drains says so, and goes on saying it: gateways send new requests elsewhere."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.fake_worker import FakeWorker
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
async def health_of(socket: str) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    async with open_channel(f"unix:{socket}") as channel:
        yield health_pb2_grpc.HealthStub(channel)


async def start_draining(scheduler: scheduler_pb2_grpc.SchedulerServiceStub) -> asyncio.Task[int]:
    """Returns once it drains; the task ends with the number of requests that were left."""

    async def drain() -> int:
        return (await scheduler.Drain(scheduler_pb2.DrainRequest(timeout_ms=10_000), timeout=15)).remaining_requests

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
    async with asyncio.timeout(5):
        while not stream.readiness:
            await stream.read()


async def test_every_gateway_is_told_at_once_and_what_runs_ends_in_full(scheduler):
    busy, _ = await GatewayStream.open(scheduler, "gateway-a")
    idle, _ = await GatewayStream.open(scheduler, "gateway-b")
    await busy.submit(make_submit(1, max_tokens=900))
    await busy.read()
    draining = await start_draining(scheduler)
    await read_until_told(idle)
    await busy.read_until_over(1)
    assert busy.readiness == idle.readiness == [False]
    assert busy.outputs[1] == expected_tokens(1, max_tokens=900)
    assert await draining == 0
    busy.close()
    idle.close()


async def test_health_says_that_it_does_not_serve(scheduler, socket):
    async with health_of(socket) as health:
        watch = health.Watch(health_pb2.HealthCheckRequest(), timeout=10)
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
        assert (await health.Check(health_pb2.HealthCheckRequest(), timeout=5)).status == _NOT_SERVING
        stream.close()
    await successor.stop()


async def test_a_gateway_that_says_hello_as_draining_begins_is_told_after_its_welcome(scheduler):
    call = scheduler.Connect()
    # The call is there before another one is answered.
    await state_of(scheduler)
    await (await start_draining(scheduler))
    hello = scheduler_pb2.Hello(gateway_id="gateway-a")
    await call.write(scheduler_pb2.ConnectRequest(hello=hello))
    stream = GatewayStream(call)
    assert (await call.read()).HasField("welcome")
    await read_until_told(stream)
    assert stream.readiness == [False]
    stream.close()
