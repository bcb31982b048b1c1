"""The async client against a fake gateway over real gRPC; what both clients share is tested with the sync one."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from quire.client import AsyncClient, ChatMessage, RequestCompleted
from quire.rpc.errors import Cancelled, InvalidArgument, NotFound, Unavailable
from tests.support.fake_gateway import FakeGeneration, start_fake_gateway
from tests.support.processes import until_true


@pytest.fixture
def generation() -> FakeGeneration:
    return FakeGeneration()


@pytest.fixture
async def client(generation: FakeGeneration) -> AsyncIterator[AsyncClient]:
    server = await start_fake_gateway("127.0.0.1:0", generation)
    async with AsyncClient(server.address) as client:
        yield client
    await server.stop(0)


async def test_all_unary_methods_answer(client: AsyncClient) -> None:
    assert (await client.generate("hi")).text == "hi!"
    assert (await client.chat([ChatMessage("user", "hello")])).text == "hello!"
    assert (await client.chat([{"role": "user", "content": "hello"}])).text == "hello!"
    assert (await client.tokenize("hi")).token_ids == (104, 105)
    assert await client.detokenize([104, 105]) == "hi"
    (model,) = await client.list_models()
    assert await client.get_model("fake") == model
    assert (await client.server_info()).gateway_id == "fake"
    await client.cancel("running")
    pin = await client.pin_prefix("hi", time_to_live_ms=5)
    assert (pin.pin_id, pin.time_to_live_ms) == ("pin", 5)
    await client.unpin_prefix("pin")


async def test_streams_give_events_and_text(client: AsyncClient) -> None:
    async with client.generate_stream("one two") as stream:
        events = [event async for event in stream]
    assert len(events) == 4
    assert isinstance(events[-1], RequestCompleted)
    assert stream.completed == events[-1]
    async with client.chat_stream([ChatMessage("user", "a b")]) as stream:
        assert [piece async for piece in stream.text] == ["a ", "b!"]


async def test_leaving_a_stream_early_cancels_the_call(client: AsyncClient, generation: FakeGeneration) -> None:
    async with client.generate_stream("endless") as stream:
        assert await anext(stream.text) == "endless!"
    await asyncio.wait_for(generation.left.wait(), 30)
    assert [event async for event in stream] == []


async def test_closing_a_stream_ends_the_iteration_of_another_task(client: AsyncClient) -> None:
    stream = client.generate_stream("endless")
    first_came = asyncio.Event()

    async def read() -> list[str]:
        pieces = []
        async for piece in stream.text:
            pieces.append(piece)
            first_came.set()
        return pieces

    reader = asyncio.create_task(read())
    await asyncio.wait_for(first_came.wait(), 30)
    await stream.close()
    assert await asyncio.wait_for(reader, 30) == ["endless!"]


async def test_cancelling_the_task_cancels_the_call(client: AsyncClient, generation: FakeGeneration) -> None:
    async def read() -> None:
        async with client.generate_stream("endless") as stream:
            async for _ in stream:
                first_came.set()

    first_came = asyncio.Event()
    reader = asyncio.create_task(read())
    await asyncio.wait_for(first_came.wait(), 30)
    reader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reader
    await asyncio.wait_for(generation.left.wait(), 30)


async def test_a_stream_whose_reader_was_interrupted_does_not_look_complete(client: AsyncClient) -> None:
    stream = client.generate_stream("endless")
    await anext(stream)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await anext(stream)
    with pytest.raises(Unavailable, match="before its last event"):
        await anext(stream)


async def test_errors_are_typed(client: AsyncClient) -> None:
    with pytest.raises(InvalidArgument, match="prompt is bad"):
        await client.generate("bad")
    with pytest.raises(NotFound):
        await client.get_model("other")
    with pytest.raises(NotFound):
        await client.unpin_prefix("other")
    async with client.generate_stream("bad") as stream:
        with pytest.raises(InvalidArgument):
            await anext(stream)


async def test_closing_the_client_cancels_all_its_calls_and_who_waits_is_told(generation: FakeGeneration) -> None:
    server = await start_fake_gateway("127.0.0.1:0", generation)
    client, first_came = AsyncClient(server.address), asyncio.Event()

    async def read() -> None:
        async for _ in client.generate_stream("endless"):
            first_came.set()

    calls = [asyncio.create_task(read()), asyncio.create_task(client.generate("endless"))]
    async with asyncio.timeout(30):
        await first_came.wait()
        await until_true(lambda: len(generation.requests) == 2)
        await client.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Cancelled, Cancelled]
    await asyncio.wait_for(generation.left.wait(), 30)
    await server.stop(0)


async def test_what_was_completed_is_no_error_though_the_client_is_closed(generation: FakeGeneration) -> None:
    server = await start_fake_gateway("127.0.0.1:0", generation)
    client = AsyncClient(server.address)
    stream = client.generate_stream("one")
    while stream.completed is None:
        await anext(stream)
    await client.close()
    assert [event async for event in stream] == []
    await server.stop(0)


@pytest.mark.parametrize("timeout_s", [math.inf, 1e18])
async def test_no_time_is_too_long(client: AsyncClient, timeout_s: float) -> None:
    assert (await client.generate("hi", timeout_s=timeout_s)).text == "hi!"


async def test_a_time_that_is_no_number_is_refused(client: AsyncClient) -> None:
    with pytest.raises(ValueError, match="timeout_s is NaN"):
        await client.generate("hi", timeout_s=math.nan)
