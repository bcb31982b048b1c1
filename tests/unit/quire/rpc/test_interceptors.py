"""Waiting until no more calls come; what is left of a call that was refused."""

import asyncio
import gc
import weakref
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.rpc.errors import InvalidArgument
from quire.rpc.interceptors import Arrivals, ErrorInterceptor
from tests.support.processes import until_true

CALL: Any = SimpleNamespace(method="/x/Y")


async def no_handler(_: object) -> None:
    return None


async def call(arrivals: Arrivals) -> None:
    await arrivals.intercept_service(no_handler, CALL)


async def test_silence_is_as_long_as_asked_for():
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await Arrivals().wait_for_silence(0.1)
    assert loop.time() - begin >= 0.1


async def test_silence_begins_anew_with_each_call():
    arrivals = Arrivals()
    waiting = asyncio.create_task(arrivals.wait_for_silence(0))
    # Many times the turns of the event loop that silence takes.
    for _ in range(1000):
        await call(arrivals)
        await asyncio.sleep(0)
    assert not waiting.done()
    await waiting


async def test_the_handler_is_the_one_that_would_have_been():
    handler = object()

    async def continuation(details: object) -> object:
        assert details is CALL
        return handler

    assert await Arrivals().intercept_service(continuation, CALL) is handler


class _Request:
    """What a handler holds when it raises."""


async def test_a_refused_call_keeps_nothing_of_its_request(tmp_path):
    held: list[weakref.ref[_Request]] = []

    async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        value = _Request()
        held.append(weakref.ref(value))
        raise InvalidArgument("no")

    server = grpc.aio.server(interceptors=[ErrorInterceptor()])
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler("x", {"Y": grpc.unary_unary_rpc_method_handler(refuse)}),)
    )
    address = f"unix:{tmp_path}/server"
    server.add_insecure_port(address)
    await server.start()
    gc.disable()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await channel.unary_unary("/x/Y")(b"", timeout=60)
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            await until_true(lambda: held[0]() is None, 60)
    finally:
        gc.enable()
        await server.stop(None)
