"""Readers of a response in the background, with a store that answers when the test says so."""

import asyncio
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.api.responses import background
from gateway.api.responses.background import BackgroundResponses
from gateway.api.responses.background_store import CANCELLED, IN_PROGRESS
from gateway.auth.caller import Access, Caller, set_caller
from gateway.auth.quota import Account, Limits
from quire.rpc.errors import Unavailable


class SlowStore:
    """Holds each look of a reader."""

    def __init__(self) -> None:
        self.looks: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()

    async def run(self, *arguments: Any) -> Any:
        look: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.looks.put_nowait(look)
        return await look

    pieces = remove = run


class RecordingStore:
    """Answers when the test says so: each method by its name."""

    def __init__(self) -> None:
        self.arguments: dict[str, tuple[Any, ...]] = {}
        self._asked = asyncio.Queue[tuple[str, asyncio.Future[Any]]]()

    async def run(self, method: str, *arguments: Any) -> Any:
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.arguments[method] = arguments
        self._asked.put_nowait((method, answer))
        return await answer

    def __getattr__(self, name: str) -> str:
        return name

    async def asked(self, method: str) -> asyncio.Future[Any]:
        name, answer = await asyncio.wait_for(self._asked.get(), 10)
        assert name == method
        return answer

    async def answer(self, method: str, value: object) -> None:
        (await self.asked(method)).set_result(value)


@pytest.mark.parametrize("num_others", [0, 1])
async def test_a_change_during_a_look_wakes_its_reader_whoever_looks_then(monkeypatch, num_others):
    monkeypatch.setattr(background, "RENEW_S", 600.0)
    store = SlowStore()
    responses = BackgroundResponses(*(cast(Any, each) for each in (None, store, None, None)))

    async def read() -> list[bytes]:
        return [piece async for piece in responses.events("tenant", "resp_1", -1)]

    readers = [asyncio.create_task(read())]
    first = await store.looks.get()
    # It notifies all readers of a change.
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


def ready_models() -> Any:
    return SimpleNamespace(is_draining=False, has_replica=True, default=SimpleNamespace(arriving=nullcontext))


async def test_what_is_taken_over_in_the_moment_of_the_stop_is_given_up():
    """Otherwise it would run on, and keep its lease, for as long as the gateway drains."""
    store, row = RecordingStore(), SimpleNamespace(tenant="tenant", id="resp_1")
    responses = BackgroundResponses(*(cast(Any, each) for each in (ready_models(), store, None, None)))
    looking = asyncio.create_task(responses._look_after())
    await store.answer("renew", {})
    taken = await store.asked("take")
    await responses.stop_runs()
    taken.set_result([row])
    await store.answer("give_up", None)
    await looking
    assert store.arguments["give_up"] == (["resp_1"],)
    assert not responses._runs


async def test_what_begins_in_the_moment_of_the_stop_is_refused():
    store = RecordingStore()
    responses = BackgroundResponses(*(cast(Any, each) for each in (ready_models(), store, None, None)))
    set_caller(Caller("tenant", Access(), Account(Limits(), lambda: 0.0)))
    call: Any = SimpleNamespace(id="resp_1", seed=1, kept=lambda: b"", first_state=dict)
    beginning = asyncio.create_task(responses.begin(call))
    added = await store.asked("add")
    await responses.stop_runs()
    added.set_result(None)
    await store.answer("remove", True)
    with pytest.raises(Unavailable) as refused:
        await beginning
    assert (refused.value.reason, responses._runs) == ("DRAINING", {})


async def test_a_response_that_is_cancelled_before_its_first_step_is_refused(monkeypatch):
    def cancelled(task: asyncio.Task[None]) -> asyncio.Task[None]:
        task.cancel()
        return task

    store = RecordingStore()
    responses = BackgroundResponses(*(cast(Any, each) for each in (ready_models(), store, None, None)))
    set_caller(Caller("tenant", Access(), Account(Limits(), lambda: 0.0)))
    call: Any = SimpleNamespace(id="resp_1", seed=1, kept=lambda: b"", first_state=dict)
    started = responses._start
    # Cancelled as it is started, so that its task never runs.
    monkeypatch.setattr(responses, "_start", lambda run, work: cancelled(started(run, work)))
    beginning = asyncio.create_task(responses.begin(call))
    await store.answer("add", None)
    await store.answer("remove", True)
    with pytest.raises(Unavailable):
        async with asyncio.timeout(5):
            await beginning
