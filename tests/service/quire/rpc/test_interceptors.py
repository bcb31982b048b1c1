"""How requests are read: bytes that are no message are the caller's fault, and a server that stopped ends a stream."""

import asyncio
from collections.abc import AsyncIterator

import grpc
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


async def test_a_stream_of_requests_ends_where_the_server_stopped() -> None:
    """What a handler left running may read on then, and gRPC's error for that is no fault of the handler."""
    has_begun, has_stopped = asyncio.Event(), asyncio.Event()
    reading: list[asyncio.Task[list[bytes]]] = []

    async def read_late(requests: AsyncIterator[bytes]) -> list[bytes]:
        has_begun.set()
        await has_stopped.wait()
        return [request async for request in requests]

    async def handler(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> None:
        reading.append(asyncio.create_task(read_late(requests)))
        await asyncio.shield(reading[0])

    handlers = {"Read": grpc.stream_stream_rpc_method_handler(handler)}
    generic = grpc.method_handlers_generic_handler("quire.test.Late", handlers)
    server = await RpcServer.start("127.0.0.1:0", lambda server: server.add_generic_rpc_handlers((generic,)), [])
    async with open_channel(server.address) as channel:
        call = channel.stream_stream("/quire.test.Late/Read")(timeout=30)
        await call.write(b"first")
        await asyncio.wait_for(has_begun.wait(), 30)
        await server.stop(0)
        has_stopped.set()
        assert await asyncio.wait_for(reading[0], 30) == []
