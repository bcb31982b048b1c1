"""Both clients against a fake gateway over real gRPC: their requests, their results, and how calls end."""

import asyncio
import math
from collections.abc import AsyncIterator

import pytest

from quire.client import (
    AsyncClient,
    AsyncStream,
    ChatMessage,
    Client,
    FinishReason,
    Logprob,
    PositionLogprobs,
    RequestCompleted,
    SequenceFinished,
    TokenChunk,
)
from quire.rpc.errors import Cancelled, DeadlineExceeded, InvalidArgument, NotFound, Unavailable
from tests.support.either_client import EitherClient
from tests.support.fake_gateway import FakeGeneration, start_fake_gateway
from tests.support.processes import until_true

MESSAGES = [ChatMessage("system", "be kind"), {"role": "user", "content": "hello"}]


@pytest.fixture
def generation() -> FakeGeneration:
    return FakeGeneration()


@pytest.fixture
async def address(generation: FakeGeneration) -> AsyncIterator[str]:
    server = await start_fake_gateway("127.0.0.1:0", generation)
    yield server.address
    await server.stop(0)


@pytest.fixture(params=[Client, AsyncClient])
async def client(request: pytest.FixtureRequest, address: str) -> AsyncIterator[EitherClient]:
    client = EitherClient(request.param(address))
    yield client
    await client.close()


async def test_generate_answers_with_all_fields(client: EitherClient) -> None:
    answer = await client.call("generate", "two words", request_id="mine")
    assert (answer.text, answer.request_id, answer.model) == ("two words!", "mine", "fake")
    (sequence,) = answer.sequences
    assert sequence.token_ids == (1, 2)
    assert sequence.finish_reason is FinishReason.STOP
    assert (sequence.stop_token_id, sequence.stop_string, sequence.cumulative_logprob) == (2, None, None)
    assert sequence.logprobs == (PositionLogprobs(Logprob(1, -0.5, 1), (Logprob(1, -0.5, 1),)),)
    assert (answer.usage.prompt_tokens, answer.usage.decode_ms) == (3, 1.5)
    assert (await client.call("generate", [7, 8])).text == "7 8!"


async def test_a_stream_gives_chunks_then_finished_then_completed(client: EitherClient) -> None:
    stream = client.client.generate_stream("one two")
    first, second, finished, completed = await client.read(stream)
    assert isinstance(first, TokenChunk)
    assert isinstance(second, TokenChunk)
    assert (first.text, second.text, second.offset, second.token_ids) == ("one ", "two!", 1, (1,))
    assert finished == SequenceFinished(0, 2, FinishReason.LENGTH, None, None, None)
    assert isinstance(completed, RequestCompleted)
    assert stream.completed == completed
    assert await client.read(client.client.generate_stream("a b c").text) == ["a ", "b ", "c!"]


async def test_tokenize_and_detokenize_are_inverse(client: EitherClient) -> None:
    tokenization = await client.call("tokenize", "hi")
    assert (tokenization.token_ids, tokenization.tokens) == ((104, 105), ("h", "i"))
    assert await client.call("detokenize", tokenization.token_ids) == "hi"
    assert (await client.call("tokenize", MESSAGES)).token_ids == tuple(b"be kind hello")


async def test_a_timeout_is_deadline_exceeded_no_time_is_too_long_and_nan_is_none(client: EitherClient) -> None:
    with pytest.raises(DeadlineExceeded):
        await client.events("endless", timeout_s=0.2)
    for timeout_s in (math.inf, 1e18):
        assert (await client.call("generate", "hi", timeout_s=timeout_s)).text == "hi!"
    with pytest.raises(ValueError, match="timeout_s is NaN"):
        await client.call("generate", "hi", timeout_s=math.nan)


async def test_leaving_a_stream_early_cancels_the_call(client: EitherClient, generation: FakeGeneration) -> None:
    stream = client.client.generate_stream("endless")
    if isinstance(stream, AsyncStream):
        async with stream:
            assert await client.next(stream.text) == "endless!"
    else:
        with stream:
            assert await client.next(stream.text) == "endless!"
    await asyncio.wait_for(generation.left.wait(), 30)
    assert await client.read(stream) == []


@pytest.mark.parametrize("how", ["events", "text", "never read"])
async def test_a_stream_that_is_forgotten_without_being_closed_cancels_its_call(
    client: EitherClient, generation: FakeGeneration, how: str
) -> None:
    """grpc.aio 1.80 cancels by itself, 1.83 and later do not."""

    async def forget() -> None:
        stream = client.client.generate_stream("endless")
        if how == "never read":
            await asyncio.wait_for(generation.called.wait(), 30)
        else:
            await client.next(stream if how == "events" else stream.text)

    await forget()
    await asyncio.wait_for(generation.left.wait(), 30)


async def test_a_task_that_is_cancelled_as_the_headers_come_cancels_the_call(
    address: str, generation: FakeGeneration
) -> None:
    async with AsyncClient(address) as client:
        stream = client.generate_stream("endless")
        stream._call._preparation.add_done_callback(lambda _: reading.cancel())
        reading = asyncio.create_task(anext(stream))
        await asyncio.wait([reading])
        assert reading.cancelled()
        await asyncio.wait_for(generation.left.wait(), 30)


async def test_closing_the_client_cancels_all_its_calls_and_who_waits_is_told(
    client: EitherClient, generation: FakeGeneration
) -> None:
    stream = client.client.generate_stream("endless")
    await client.next(stream)
    calls = [asyncio.create_task(client.read(stream)), asyncio.create_task(client.call("generate", "endless"))]
    async with asyncio.timeout(30):
        await until_true(lambda: len(generation.requests) == 2)
        await client.close()
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [Cancelled, Cancelled]
    assert str(outcomes[0]) == "the client was closed"
    await asyncio.wait_for(generation.left.wait(), 30)


async def test_other_calls_and_their_errors(client: EitherClient) -> None:
    (model,) = await client.call("list_models")
    assert await client.call("get_model", "fake") == model
    assert (await client.call("chat", MESSAGES)).text == "hello!"
    assert await client.read(client.client.chat_stream(MESSAGES).text) == ["hello!"]
    assert (await client.call("pin_prefix", [7, 8])).time_to_live_ms == 300_000
    await client.call("cancel", "running")
    for method in ("get_model", "cancel", "unpin_prefix"):
        with pytest.raises(NotFound):
            await client.call(method, "other")
    with pytest.raises(InvalidArgument, match="prompt is bad") as caught:
        await client.events("bad")
    assert caught.value.violations[0].field == "text"
    for method in ("generate", "pin_prefix"):
        with pytest.raises(TypeError):
            await client.call(method, 5)
        with pytest.raises(InvalidArgument, match="ids"):
            await client.call(method, [-1])
        with pytest.raises(InvalidArgument, match="text"):
            await client.call(method, "\ud800")


async def test_a_stream_whose_reader_was_interrupted_does_not_look_complete(address: str) -> None:
    async with AsyncClient(address) as client:
        stream = client.generate_stream("endless")
        await anext(stream)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(stream)
        with pytest.raises(Unavailable, match="before its last event"):
            await anext(stream)


async def test_what_was_completed_is_no_error_though_the_client_is_closed(client: EitherClient) -> None:
    stream = client.client.generate_stream("one")
    while stream.completed is None:
        await client.next(stream)
    await client.close()
    assert await client.read(stream) == []
