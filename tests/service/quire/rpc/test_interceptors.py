"""Bytes that are no message are the caller's fault, on methods of any kind and of any service."""

from collections.abc import AsyncIterator

import grpc.aio
import pytest
import pytest_asyncio

from quire.rpc.channel import open_channel
from quire.rpc.errors import InvalidArgument, from_rpc_error
from quire.rpc.server import RpcServer

DAMAGED = b"\x0a\x7fshort"


@pytest_asyncio.fixture
async def channel() -> AsyncIterator[grpc.aio.Channel]:
    server = await RpcServer.start("127.0.0.1:0", lambda _: None, [])
    async with open_channel(server.address) as channel:
        yield channel
    await server.stop(0)


def check(error: grpc.aio.AioRpcError, message_name: str) -> None:
    refusal = from_rpc_error(error)
    assert isinstance(refusal, InvalidArgument)
    assert refusal.reason == "MALFORMED_MESSAGE"
    assert [violation.field for violation in refusal.violations] == [message_name]


async def test_of_a_unary_call(channel: grpc.aio.Channel) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary("/grpc.health.v1.Health/Check")(DAMAGED, timeout=30)
    check(caught.value, "grpc.health.v1.HealthCheckRequest")


async def test_of_a_call_that_answers_a_stream(channel: grpc.aio.Channel) -> None:
    call = channel.unary_stream("/grpc.health.v1.Health/Watch")(DAMAGED, timeout=30)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    check(caught.value, "grpc.health.v1.HealthCheckRequest")


async def test_of_a_later_message_of_a_stream(channel: grpc.aio.Channel) -> None:
    path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    call = channel.stream_stream(path)(timeout=30)
    await call.write(b"\x3a\x00")
    assert await call.read()
    await call.write(DAMAGED)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()
    check(caught.value, "grpc.reflection.v1alpha.ServerReflectionRequest")
