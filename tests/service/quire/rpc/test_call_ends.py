"""What a server reports of calls that are over."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import cast
from unittest.mock import create_autospec

import grpc
import grpc.aio
import pytest

from quire.rpc.channel import open_channel
from quire.rpc.errors import PermissionDenied
from quire.rpc.interceptors import OTHER_METHODS, CallEnds, ErrorInterceptor
from quire.rpc.server import RpcServer
from tests.service.quire.rpc.test_errors import KINDS, SERVICE, call, failure_of, register
from tests.support.processes import until_true

Ends = Counter[tuple[str, str]]


class Refuses(grpc.aio.ServerInterceptor):
    """Refuses calls that say so, whatever their method."""

    async def intercept_service(self, continuation, handler_call_details):
        if ("refuse", "1") in (handler_call_details.invocation_metadata or ()):
            return grpc.stream_stream_rpc_method_handler(refuse)
        return await continuation(handler_call_details)


async def refuse(messages: object, context: grpc.aio.ServicerContext) -> None:
    raise PermissionDenied("not now", reason="REFUSED")


async def hang(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    await asyncio.Event().wait()
    return b""


async def wait(request: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    yield b"first"
    await asyncio.Event().wait()


@pytest.fixture
def ends() -> Ends:
    return Counter()


@pytest.fixture
async def channel(ends: Ends) -> AsyncIterator[grpc.aio.Channel]:
    methods = [f"{SERVICE}/{kind}" for kind in ("UnaryUnary", "UnaryStream", "UnaryStreamByWrite")]
    methods += [f"{SERVICE}/{kind}" for kind in ("StreamUnary", "StreamStream")]

    def report(method: str, code: grpc.StatusCode) -> None:
        ends[method.removeprefix(f"{SERVICE}/"), code.name] += 1

    server = grpc.aio.server(interceptors=(CallEnds(methods, report), ErrorInterceptor(), Refuses()))
    register(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield channel
    await server.stop(0)


@KINDS
async def test_calls_of_any_kind_end_with_their_status(channel: grpc.aio.Channel, ends: Ends, kind: str) -> None:
    await call(channel, kind, b"hi")
    for problem in (b"invalid", b"bug", b"abort"):
        await failure_of(channel, kind, problem)
    await until_true(lambda: ends.total() == 4)
    assert ends == {(kind, code): 1 for code in ("OK", "INVALID_ARGUMENT", "INTERNAL", "DATA_LOSS")}


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
