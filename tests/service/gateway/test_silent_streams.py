"""Streams that wait for a token: their headers are sent, and HTTP streams send keepalive comments."""

import asyncio
import contextlib

import pytest
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

from tests.support.gateway_process import collect, comments_after_each_piece, running_gateway, stream_request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]
BODIES = {
    CHAT: {"messages": USER, "max_tokens": 4},
    COMPLETIONS: {"prompt": ["hello", "world"], "max_tokens": 4},
    "/v1/responses": {"input": "hello", "max_output_tokens": 4},
    "/v1/messages": {"messages": USER, "max_tokens": 4},
}
COMMENT = ": keep-alive"
SHORT_S = 0.1


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch):
    """A short wait for a refusal before headers are sent."""
    monkeypatch.setattr("gateway.api.answers.REFUSAL_S", SHORT_S)
    monkeypatch.setattr("gateway.api.grpc.servicers.REFUSAL_S", SHORT_S)


@contextlib.asynccontextmanager
async def lines_of(scheduler, path, body=None, **settings):
    """The lines of a stream, once its headers have come."""
    async with (
        running_gateway(scheduler, **settings) as gateway,
        gateway.http.stream("POST", path, json=(body or BODIES[path]) | {"stream": True}) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
        yield response.aiter_lines()


@pytest.mark.parametrize("path", BODIES)
async def test_headers_come_before_the_first_token_and_comments_while_nothing_comes(scheduler, path):
    scheduler.emits.clear()
    async with lines_of(scheduler, path, sse_keepalive=SHORT_S) as lines:
        silent = []
        while silent.count(COMMENT) < 3:
            silent.append(await anext(lines))
        # The first events of these APIs have no generated text.
        assert (
            any(silent) if path in ("/v1/responses", "/v1/messages") else silent == [COMMENT, "", COMMENT, "", COMMENT]
        )
        scheduler.emits.set()
        rest = [line async for line in lines if line not in ("", COMMENT)]
    assert all(line.startswith(("data: ", "event: ")) for line in rest)
    assert any(each in rest[-1] for each in ("[DONE]", "response.incomplete", "message_stop"))


@pytest.mark.parametrize("interval_s", [0.0, 60.0], ids=["off", "longer than between tokens"])
async def test_a_stream_without_silence_or_without_keepalive_has_no_comments(scheduler, interval_s):
    scheduler.step_delay_s = SHORT_S / 10
    scheduler.emits.clear()
    body = BODIES[CHAT] | {"max_tokens": 30}
    async with lines_of(scheduler, CHAT, body, sse_keepalive=interval_s) as lines:
        reading = asyncio.ensure_future(anext(lines))
        done, _ = await asyncio.wait([reading], timeout=3 * SHORT_S)
        assert not done
        scheduler.emits.set()
        assert COMMENT not in [await reading, *[line async for line in lines]]


async def test_a_stream_that_no_scheduler_takes_keeps_its_status(scheduler):
    async with running_gateway(scheduler, connect_timeout=10 * SHORT_S, failover_delay=0.0) as gateway:
        await scheduler.stop()
        answer = await gateway.http.post(CHAT, json=BODIES[CHAT] | {"stream": True})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_scheduler")


async def test_headers_of_grpc_streams_come_before_their_first_token_or_request(scheduler, gateway):
    scheduler.emits.clear()
    call = gateway.generation.GenerateStream(stream_request())
    assert await asyncio.wait_for(call.initial_metadata(), 30) is not None
    assert scheduler.live
    scheduler.emits.set()
    assert len((await collect(call)).token_ids) == 8
    of_kserve = gateway.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    assert await asyncio.wait_for(of_kserve.initial_metadata(), 30) is not None
    of_kserve.cancel()


@pytest.fixture
def comments(monkeypatch) -> list[bytes]:
    return comments_after_each_piece(monkeypatch)


async def _completion(client, more):
    stream = await client.completions.create(model="", prompt="hello", max_tokens=4, stream=True, extra_body=more)
    return "".join([chunk.choices[0].text async for chunk in stream])


async def _chat(client, more):
    stream = await client.chat.completions.create(model="", messages=USER, max_tokens=4, stream=True, extra_body=more)
    return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])


async def _response(client, more):
    stream = await client.responses.create(model="", input="hello", max_output_tokens=16, stream=True, extra_body=more)
    return "".join([event.delta async for event in stream if event.type == "response.output_text.delta"])


async def _message(client, more):
    asked = {"model": "quire-tiny", "messages": USER, "max_tokens": 4}
    async with client.messages.stream(**asked, extra_body=more) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        assert [block.text for block in (await stream.get_final_message()).content] == [text]
    return text


ALL = (_completion, _chat, _response, _message)


@pytest.mark.parametrize(
    ("read", "more"),
    [*((read, more) for read in ALL for more in ({}, {"durable": True})), (_response, {"background": True})],
)
async def test_clients_read_over_comments_wherever_they_are(comments, gateway, read, more):
    """OpenAI's client never forgets an id, and takes a block without data for an event with empty data."""
    options = {"api_key": "none", "max_retries": 0}
    if read is _message:
        client = AsyncAnthropic(base_url=gateway.http_url, **options)
    else:
        client = AsyncOpenAI(base_url=f"{gateway.http_url}/v1", **options)
    async with client:
        assert len(await read(client, more)) > 3
    assert len(comments) > 3
    assert {each.count(b"\n") for each in comments} == {1 if more else 2}
