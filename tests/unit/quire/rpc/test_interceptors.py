"""Waiting for a pause between calls."""

import asyncio
from types import SimpleNamespace
from typing import Any

from quire.rpc.interceptors import Arrivals

CALL: Any = SimpleNamespace(method="/x/Y")


async def no_handler(_: object) -> None:
    return None


async def call_every(arrivals: Arrivals, pause_s: float) -> None:
    while True:
        await arrivals.intercept_service(no_handler, CALL)
        await asyncio.sleep(pause_s)


async def test_where_no_call_comes_there_is_a_pause():
    assert await Arrivals().wait_for_a_pause(5)


async def test_while_calls_come_without_a_pause_it_waits_for_so_long():
    arrivals = Arrivals()
    calling = asyncio.create_task(call_every(arrivals, 0))
    assert not await arrivals.wait_for_a_pause(0.05)
    calling.cancel()


async def test_a_pause_between_calls_is_found():
    arrivals = Arrivals()
    calling = asyncio.create_task(call_every(arrivals, 0.05))
    assert await arrivals.wait_for_a_pause(5)
    assert not calling.done()
    calling.cancel()


async def test_the_handler_is_the_one_that_would_have_been():
    handler = object()

    async def continuation(details: object) -> object:
        assert details is CALL
        return handler

    assert await Arrivals().intercept_service(continuation, CALL) is handler
