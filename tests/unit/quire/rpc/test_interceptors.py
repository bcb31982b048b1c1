"""Waiting until no more calls come."""

import asyncio
from types import SimpleNamespace
from typing import Any

from quire.rpc.interceptors import Arrivals

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
