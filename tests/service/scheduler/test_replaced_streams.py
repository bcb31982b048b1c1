"""A gateway that opens another stream has one stream from then on, whatever still arrives by the first."""

import asyncio
import contextlib
import re

import grpc.aio

from quire.scheduler.v1 import scheduler_pb2_grpc
from tests.support.metrics import read_metrics
from tests.support.ports import free_port
from tests.support.scheduler_process import (
    GatewayStream,
    expected_tokens,
    make_submit,
    resubmit,
    running_scheduler,
    state_of,
    until,
    wait_attached,
    wait_nothing_in_use,
)


async def assert_ends(stream: GatewayStream) -> None:
    await stream.read_to_end()
    assert await stream.call.code() is grpc.StatusCode.OK


async def until_waiting(scheduler: scheduler_pb2_grpc.SchedulerServiceStub, num_requests: int) -> None:
    async def waits() -> bool:
        return (await state_of(scheduler)).waiting_requests == num_requests

    await until(waits)


async def outcomes(port: int) -> dict[str, float]:
    """How many requests ended, by outcome."""
    total = re.compile(r'quire_scheduler_requests_total\{outcome="(\w+)"\}')
    metrics = await read_metrics(port)
    return {found[1]: value for name, value in metrics.items() if (found := total.fullmatch(name))}


async def test_a_stream_that_is_replaced_ends_though_its_gateway_does_not_close_it(scheduler):
    first, _ = await GatewayStream.open(scheduler, "gateway-a", grace_period_ms=60_000)
    second, _ = await GatewayStream.open(scheduler, "gateway-a", grace_period_ms=60_000)
    await assert_ends(first)
    assert (await state_of(scheduler)).connected_gateways == 1
    second.close()


async def test_what_arrives_by_a_replaced_stream_is_not_taken(scheduler, worker):
    first, _ = await GatewayStream.open(scheduler, "gateway-a")
    second, _ = await GatewayStream.open(scheduler, "gateway-a")
    # It may have ended already, or end while it is written to: then grpc calls its status INTERNAL, whatever the
    # server said.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for handle in range(20):
            await first.submit(make_submit(handle, max_tokens=900))
    with contextlib.suppress(grpc.aio.AioRpcError):
        await first.read_to_end()
    assert first.call.done()
    await wait_nothing_in_use(scheduler)
    assert worker.num_steps == 0
    await second.submit(make_submit(7))
    await second.read_until_over(7)
    assert second.outputs[7] == expected_tokens(7)
    second.close()


async def test_what_is_submitted_again_goes_on_and_what_is_left_behind_is_aborted(worker, tmp_path):
    port = free_port()
    async with running_scheduler(str(tmp_path / "s.sock"), worker.address, metrics_port=port) as scheduler:
        await wait_attached(scheduler)
        first, _ = await GatewayStream.open(scheduler, "gateway-a", grace_period_ms=60_000)
        # Without a worker nothing ends by itself.
        await worker.stop()
        for handle in (1, 2):
            await first.submit(make_submit(handle))
        await until_waiting(scheduler, 2)
        first.close()
        second, _ = await GatewayStream.open(scheduler, "gateway-a")
        await second.submit(resubmit(first, 1))
        await second.end_unread()
        await until_waiting(scheduler, 1)
        assert (await outcomes(port)) == {"aborted": 1, "completed": 0, "failed": 0}
        second.close()
        await wait_nothing_in_use(scheduler)
        assert (await outcomes(port)) == {"aborted": 2, "completed": 0, "failed": 0}
