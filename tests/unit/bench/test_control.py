"""The control path is measured while all clients listen, and not a moment longer."""

import asyncio

import pytest

from bench.control import beside


async def never() -> None:
    await asyncio.get_running_loop().create_future()


async def refused() -> None:
    raise ValueError("max_tokens is 33,100; at most 32,760 fit")


async def test_work_whose_listeners_are_refused_ends_with_their_error() -> None:
    # What waits until all of them run would wait for ever.
    async with asyncio.timeout(30):
        with pytest.raises(ValueError, match="at most 32,760 fit"):
            await beside(never(), [never(), refused()])


async def test_a_listener_that_ends_while_it_is_needed_is_an_error() -> None:
    async with asyncio.timeout(30):
        with pytest.raises(RuntimeError, match="a client's stream ended"):
            await beside(never(), [asyncio.sleep(0), never()])


async def test_listeners_end_with_the_work() -> None:
    ended: list[str] = []

    async def listen() -> None:
        try:
            await never()
        finally:
            ended.append("listener")

    async def work() -> int:
        await asyncio.sleep(0)
        return 7

    async with asyncio.timeout(30):
        assert await beside(work(), [listen(), listen()]) == 7
    assert ended == ["listener"] * 2


async def test_the_error_of_the_work_is_its_own() -> None:
    async with asyncio.timeout(30):
        with pytest.raises(ValueError, match="33,100"):
            await beside(refused(), [never()])
