"""Readers of a response in the background, with a store that answers when the test says so."""

import asyncio
from typing import Any, cast

import pytest

from gateway.api.responses import background
from gateway.api.responses.background import BackgroundResponses
from gateway.api.responses.background_store import CANCELLED, IN_PROGRESS


class SlowStore:
    """Holds each look of a reader."""

    def __init__(self) -> None:
        self.looks: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()

    async def run(self, *arguments: Any) -> Any:
        look: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.looks.put_nowait(look)
        return await look

    pieces = remove = run


@pytest.mark.parametrize("num_others", [0, 1])
async def test_a_change_during_a_look_wakes_its_reader_whoever_looks_then(monkeypatch, num_others):
    monkeypatch.setattr(background, "_RENEW_S", 600.0)
    store = SlowStore()
    responses = BackgroundResponses(*(cast(Any, each) for each in (None, store, None, None)))

    async def read() -> list[bytes]:
        return [piece async for piece in responses.events("tenant", "resp_1", -1)]

    readers = [asyncio.create_task(read())]
    first = await store.looks.get()
    # It tells all readers of a change.
    removing = asyncio.create_task(responses.remove("tenant", "resp_1"))
    (await store.looks.get()).set_result(True)
    await removing
    readers += [asyncio.create_task(read()) for _ in range(num_others)]
    others = [await store.looks.get() for _ in range(num_others)]
    first.set_result((IN_PROGRESS, []))
    async with asyncio.timeout(5):
        others.append(await store.looks.get())
    for look in others:
        look.set_result((CANCELLED, []))
    assert await asyncio.gather(*readers) == [[]] * len(readers)
