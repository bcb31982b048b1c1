"""Errors raised in handlers of a real loopback server, as both client APIs see them."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
import pytest

from quire.rpc.channel import open_channel
from quire.rpc.errors import (
    FieldViolation,
    Internal,
    InvalidArgument,
    NotFound,
    QuireError,
    ResourceExhausted,
    Unavailable,
    from_rpc_error,
)
from quire.rpc.server import RpcServer

SERVICE = "quire.test.Echo"
PROBLEMS: dict[bytes, Callable[[], Exception]] = {
    b"invalid": lambda: InvalidArgument(
        "temperature is 101; the greatest value is 100", violations=[FieldViolation("temperature", "is 101")]
    ),
    b"full": lambda: ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_ms=1500),
    b"facts": lambda: NotFound("kein Modell: größer ☂", metadata={"model": "x"}),
    b"long": lambda: InvalidArgument("x" * 100_000, violations=[FieldViolation("f", "y" * 10_000)] * 100),
    b"bug": lambda: RuntimeError("secret"),
}


async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    if request == b"abort":
        await context.abort(grpc.StatusCode.DATA_LOSS, "aborted by hand")
    if request in PROBLEMS:
        problem = PROBLEMS[request]()
        raise problem
    return request


async def unary_stream(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    yield b"first"
    yield await answer(request, context)


async def unary_stream_by_write(request: bytes, context: grpc.aio.ServicerContext) -> None:
    await context.write(b"first")
    await context.write(await answer(request, context))


async def stream_unary(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
    return b"".join([await answer(request, context) async for request in requests])


async def stream_stream(requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for request in requests:
        yield await answer(request, context)


def register(server: grpc.aio.Server) -> None:
    handlers = {
        "UnaryUnary": grpc.unary_unary_rpc_method_handler(answer),
        "UnaryStream": grpc.unary_stream_rpc_method_handler(unary_stream),
        "UnaryStreamByWrite": grpc.unary_stream_rpc_method_handler(unary_stream_by_write),
        "StreamUnary": grpc.stream_unary_rpc_method_handler(stream_unary),
        "StreamStream": grpc.stream_stream_rpc_method_handler(stream_stream),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


async def requests_of(*requests: bytes) -> AsyncIterator[bytes]:
    for request in requests:
        yield request


async def call(channel: grpc.aio.Channel, kind: str, request: bytes) -> list[bytes]:
    """Calls a method of any kind; returns what came."""
    method = f"/{SERVICE}/{kind}"
    if kind == "UnaryUnary":
        return [await channel.unary_unary(method)(request)]
    if kind == "StreamUnary":
        return [await channel.stream_unary(method)(requests_of(b"ok", request))]
    if kind == "StreamStream":
        return [response async for response in channel.stream_stream(method)(requests_of(b"ok", request))]
    return [response async for response in channel.unary_stream(method)(request)]


async def failure_of(channel: grpc.aio.Channel, kind: str, request: bytes) -> QuireError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call(channel, kind, request), 30)
    return from_rpc_error(caught.value)


KINDS = pytest.mark.parametrize(
    "kind", ["UnaryUnary", "UnaryStream", "UnaryStreamByWrite", "StreamUnary", "StreamStream"]
)


@pytest.fixture
async def server() -> AsyncIterator[RpcServer]:
    server = await RpcServer.start("127.0.0.1:0", register, [SERVICE])
    yield server
    await server.stop(0)


@pytest.fixture
async def channel(server: RpcServer) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(server.address) as channel:
        yield channel


@KINDS
async def test_answers_and_errors_of_calls_of_every_kind_arrive_and_unexpected_ones_are_logged_and_not_told(
    channel: grpc.aio.Channel, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    answers = {"UnaryUnary": [b"hi"], "StreamUnary": [b"okhi"], "StreamStream": [b"ok", b"hi"]}
    assert await call(channel, kind, b"hi") == answers.get(kind, [b"first", b"hi"])
    error = await failure_of(channel, kind, b"invalid")
    assert type(error) is InvalidArgument
    assert (error.message, error.reason) == ("temperature is 101; the greatest value is 100", "INVALID_ARGUMENT")
    assert error.violations == (FieldViolation("temperature", "is 101"),)
    assert error.retry_after_ms is None
    error = await failure_of(channel, kind, b"full")
    assert (type(error), error.reason, error.retry_after_ms) == (ResourceExhausted, "QUEUE_FULL", 1500)
    # What a handler aborts with keeps its meaning.
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(channel, kind, b"abort")
    assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.DATA_LOSS, "aborted by hand")
    with caplog.at_level(logging.ERROR):
        error = await failure_of(channel, kind, b"bug")
    assert (type(error), error.reason, "secret" in error.message) == (Internal, "UNEXPECTED", False)
    (record,) = caplog.records
    assert kind in record.getMessage()
    assert record.exc_info is not None
    assert str(record.exc_info[1]) == "secret"


async def test_both_kinds_of_clients_read_any_script_metadata_and_a_huge_error_that_is_cut(server: RpcServer) -> None:
    def call_for(request: bytes) -> QuireError:
        with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
            channel.unary_unary(f"/{SERVICE}/UnaryUnary")(request, timeout=30)
        return from_rpc_error(caught.value)

    async with grpc.aio.insecure_channel(server.address) as channel:
        for request in (b"facts", b"long"):
            for error in (await failure_of(channel, "UnaryUnary", request), await asyncio.to_thread(call_for, request)):
                if request == b"facts":
                    assert (type(error), error.message) == (NotFound, "kein Modell: größer ☂")
                    assert error.metadata == {"model": "x"}
                else:
                    assert (type(error), len(error.violations)) == (InvalidArgument, 5)
                    assert error.message.endswith("xxx...")


async def test_a_refused_connection_and_an_unknown_method_read_as_what_they_are(channel: grpc.aio.Channel) -> None:
    async with open_channel("127.0.0.1:1") as nowhere:
        error = await failure_of(nowhere, "UnaryUnary", b"hi")
    assert (type(error), error.reason) == (Unavailable, "UNAVAILABLE")
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await channel.unary_unary(f"/{SERVICE}/Nothing")(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
