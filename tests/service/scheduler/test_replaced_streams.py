"""A gateway that opens another stream has one stream from then on, whatever still arrives by the first."""

import asyncio
import contextlib

import grpc.aio

from tests.support.scheduler_process import GatewayStream, expected_tokens, make_submit, state_of, wait_nothing_in_use


async def assert_ends(stream: GatewayStream) -> None:
    async with asyncio.timeout(5):
        while await stream.call.read() is not grpc.aio.EOF:
            pass
        assert await stream.call.code() is grpc.StatusCode.OK


async def test_a_stream_that_is_replaced_ends_though_its_gateway_does_not_close_it(scheduler):
    first, _ = await GatewayStream.open(scheduler, "gateway-a", grace_period_ms=60_000)
    second, _ = await GatewayStream.open(scheduler, "gateway-a", grace_period_ms=60_000)
    await assert_ends(first)
    assert (await state_of(scheduler)).connected_gateways == 1
    second.close()


async def test_what_arrives_by_a_replaced_stream_is_not_taken(scheduler, worker):
    first, _ = await GatewayStream.open(scheduler, "gateway-a")
    second, _ = await GatewayStream.open(scheduler, "gateway-a")
    # It may have ended already.
    with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
        for handle in range(20):
            await first.submit(make_submit(handle, max_tokens=900))
    await assert_ends(first)
    await wait_nothing_in_use(scheduler)
    assert worker.num_steps == 0
    await second.submit(make_submit(7))
    await second.read_until_over(7)
    assert second.outputs[7] == expected_tokens(7)
    second.close()
