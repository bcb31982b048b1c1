"""Reading requests: invalid messages are the caller's fault, and a server that stopped ends a stream."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

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


async def read_later_message(channel: grpc.aio.Channel) -> None:
    call = channel.stream_stream("/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo")(timeout=30)
    await call.write(b"\x3a\x00")
    assert await call.read()
    await call.write(DAMAGED)
    await call.read()


@pytest.mark.parametrize(
    ("call", "message_name"),
    [
        (
            lambda channel: channel.unary_unary("/grpc.health.v1.Health/Check")(DAMAGED, timeout=30),
            "grpc.health.v1.HealthCheckRequest",
        ),
        (
            lambda channel: channel.unary_stream("/grpc.health.v1.Health/Watch")(DAMAGED, timeout=30).read(),
            "grpc.health.v1.HealthCheckRequest",
        ),
        (read_later_message, "grpc.reflection.v1alpha.ServerReflectionRequest"),
    ],
    ids=["a unary call", "a call that answers a stream", "a later message of a stream"],
)
async def test_bytes_that_are_no_message_are_the_callers_fault(
    channel: grpc.aio.Channel, call: Callable[[grpc.aio.Channel], Awaitable[object]], message_name: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel)
    refusal = from_rpc_error(caught.value)
    assert isinstance(refusal, InvalidArgument)
    assert refusal.reason == "MALFORMED_MESSAGE"
    assert [violation.field for violation in refusal.violations] == [message_name]


async def test_a_stream_of_requests_ends_where_the_server_stopped() -> None:
    """A task that a handler left running may still read then; gRPC's error for that is no fault of the handler."""
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
