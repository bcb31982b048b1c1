"""Errors raised in handlers of a real loopback server, as both client APIs see them and as the server reports them."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import cast
from unittest.mock import create_autospec

import grpc
import grpc.aio
import pytest

from quire.rpc.channel import open_channel
from quire.rpc.errors import (
    FieldViolation,
    Internal,
    InvalidArgument,
    PermissionDenied,
    QuireError,
    ResourceExhausted,
    from_rpc_error,
)
from quire.rpc.interceptors import OTHER_METHODS, CallEnds, ErrorInterceptor
from quire.rpc.server import RpcServer
from tests.support.processes import until_true

SERVICE = "quire.test.Echo"
PROBLEMS: dict[bytes, Callable[[], Exception]] = {
    b"invalid": lambda: InvalidArgument(
        "temperature is 101; the greatest value is 100", violations=[FieldViolation("temperature", "is 101")]
    ),
    b"full": lambda: ResourceExhausted("the queue is full", reason="QUEUE_FULL", retry_after_ms=1500),
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
    """Calls a method of any kind; returns its answer."""
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


KINDS = ("UnaryUnary", "UnaryStream", "UnaryStreamByWrite", "StreamUnary", "StreamStream")
Ends = Counter[tuple[str, str]]


class Refuses(grpc.aio.ServerInterceptor):
    """Refuses calls whose request says so, whatever their method."""

    async def intercept_service(self, continuation, handler_call_details):
        if ("refuse", "1") in (handler_call_details.invocation_metadata or ()):
            return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(handler_call_details)


async def refuse(messages: object, context: grpc.aio.ServicerContext) -> None:
    raise PermissionDenied("not now", reason="REFUSED")


@pytest.fixture
def ends() -> Ends:
    return Counter()


@pytest.fixture
async def address(ends: Ends) -> AsyncIterator[str]:
    def report(method: str, code: grpc.StatusCode) -> None:
        ends[method.removeprefix(f"{SERVICE}/"), code.name] += 1

    methods = [f"{SERVICE}/{kind}" for kind in KINDS]
    server = grpc.aio.server(interceptors=(CallEnds(methods, report), ErrorInterceptor(), Refuses()))
    register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture
async def channel(address: str) -> AsyncIterator[grpc.aio.Channel]:
    async with open_channel(address) as channel:
        yield channel


@pytest.mark.parametrize("kind", KINDS)
async def test_answers_and_errors_of_calls_of_every_kind_arrive_and_unexpected_ones_are_logged_and_not_told(
    channel: grpc.aio.Channel, ends: Ends, kind: str, caplog: pytest.LogCaptureFixture
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
    # A status with which a handler aborts keeps its meaning.
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
    await until_true(lambda: ends.total() == 5)
    codes = ("OK", "INVALID_ARGUMENT", "RESOURCE_EXHAUSTED", "INTERNAL", "DATA_LOSS")
    assert ends == {(kind, code): 1 for code in codes}


async def hang(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    await asyncio.Event().wait()
    return b""


@pytest.mark.parametrize(
    ("time_remaining", "code"), [(None, "CANCELLED"), (3.5, "CANCELLED"), (0, "DEADLINE_EXCEEDED")]
)
async def test_a_call_that_ends_early_was_cancelled_or_had_its_time(time_remaining: float | None, code: str) -> None:
    """gRPC cancels the task of a call in both cases."""
    reported: list[str] = []
    interceptor = CallEnds(["S/Hang"], lambda method, status: reported.append(f"{method} {status.name}"))
    context = create_autospec(grpc.aio.ServicerContext, instance=True)
    context.time_remaining.return_value = time_remaining

    async def known(_: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler:
        return grpc.unary_unary_rpc_method_handler(hang)

    handler = await interceptor.intercept_service(
        known, cast(grpc.HandlerCallDetails, SimpleNamespace(method="/S/Hang"))
    )
    running = asyncio.create_task(handler.unary_unary(b"", context))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert reported == [f"S/Hang {code}"]


async def test_methods_that_clients_make_up_are_one(channel: grpc.aio.Channel, ends: Ends) -> None:
    for number in range(3):
        for metadata in ((), (("refuse", "1"),)):
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary(f"/{SERVICE}{number}/Made")(b"", metadata=metadata)
    with pytest.raises(grpc.aio.AioRpcError):
        await channel.unary_unary(f"/{SERVICE}/UnaryUnary")(b"", metadata=(("refuse", "1"),))
    await until_true(lambda: ends.total() == 7)
    assert ends == {
        (OTHER_METHODS, "UNIMPLEMENTED"): 3,
        (OTHER_METHODS, "PERMISSION_DENIED"): 3,
        ("UnaryUnary", "PERMISSION_DENIED"): 1,
    }


async def test_health_is_not_reported_and_reflection_is() -> None:
    ends: Ends = Counter()
    server = await RpcServer.start(
        "127.0.0.1:0", lambda _: None, [], on_call_end=lambda method, code: ends.update({(method, code.name): 1})
    )
    method = "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
    async with open_channel(server.address) as channel:
        await channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        call = channel.stream_stream(f"/{method}")()
        await call.done_writing()
        assert [answer async for answer in call] == []
    await server.stop(0)
    assert ends == {(method, "OK"): 1}
