"""Waiting until no more calls come; memory of a refused call."""

import asyncio
import gc
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest

from quire.rpc.channel import open_channel
from quire.rpc.errors import InvalidArgument
from quire.rpc.interceptors import Arrivals, abort_with
from quire.rpc.server import RpcServer
from tests.support.processes import until_true

CALL: Any = SimpleNamespace(method="/x/Y")


async def no_handler(_: object) -> None:
    return None


async def call(arrivals: Arrivals) -> None:
    await arrivals.intercept_service(no_handler, CALL)


async def test_silence_begins_anew_with_each_call_and_is_as_long_as_asked_for():
    arrivals, loop = Arrivals(), asyncio.get_running_loop()
    waiting = asyncio.create_task(arrivals.wait_for_silence(0))
    # Many times the turns of the event loop that silence takes.
    for _ in range(1000):
        await call(arrivals)
        await asyncio.sleep(0)
    assert not waiting.done()
    await waiting
    begin = loop.time()
    await Arrivals().wait_for_silence(0.1)
    assert loop.time() - begin >= 0.1


@pytest.mark.parametrize("error", [InvalidArgument("no"), grpc.aio.InternalError("a write failed")])
async def test_a_client_that_leaves_while_its_error_is_written_is_no_fault_of_the_server(error, caplog):
    async def abort(*_: object) -> None:
        raise grpc.aio.InternalError('Failed "execute_batch"')

    context: Any = SimpleNamespace(abort=abort)
    with pytest.raises(asyncio.CancelledError):
        await abort_with(error, context, "/x/Y")
    assert not caplog.records


async def _refuse_one(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
    raise InvalidArgument(f"{len(request)} bytes")


async def _refuse_first(requests: Any, context: grpc.aio.ServicerContext) -> bytes:
    async for request in requests:
        raise InvalidArgument(f"{len(request)} bytes")
    return b""


async def _refuse_first_by_stream(requests: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
    async for request in requests:
        yield b""
        raise InvalidArgument(f"{len(request)} bytes")


@pytest.mark.parametrize(
    ("make_handler", "refuse"),
    [
        (grpc.unary_unary_rpc_method_handler, _refuse_one),
        (grpc.stream_stream_rpc_method_handler, _refuse_first_by_stream),
        (grpc.stream_stream_rpc_method_handler, _refuse_first),
    ],
)
async def test_a_refused_call_keeps_nothing_of_its_request(make_handler: Any, refuse: Any, tmp_path: Path) -> None:
    """Garbage collection is disabled, since a few large requests do not trigger it."""

    def register(server: grpc.aio.Server) -> None:
        handler = make_handler(refuse, request_deserializer=bytes)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("x", {"Y": handler}),))

    size, count = 1 << 20, 10
    server = await RpcServer.start(f"unix:{tmp_path}/server", register, [], on_call_end=lambda *_: None)
    gc.disable()
    tracemalloc.start()
    try:
        async with open_channel(server.address) as channel:
            for _ in range(count):
                caller = channel.stream_stream("/x/Y")(iter([bytes(size)]), timeout=60)
                with pytest.raises(grpc.aio.AioRpcError, match=f"{size} bytes"):
                    _ = [answer async for answer in caller]
                del caller
            await until_true(lambda: tracemalloc.get_traced_memory()[0] < 2 * size, 20)
    finally:
        tracemalloc.stop()
        gc.enable()
        await server.stop(0)
