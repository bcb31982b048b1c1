"""Streams that wait for a token: their headers go out, and those over HTTP say that they are alive."""

import asyncio
import contextlib
import json

import httpx
import openai
import pytest
from google.rpc import code_pb2

from tests.support.gateway_process import collect, running_gateway, stream_request

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
EOS = 2


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch):
    """For a refusal, before headers go out."""
    monkeypatch.setattr("gateway.api.answers.REFUSAL_S", SHORT_S)
    monkeypatch.setattr("gateway.api.grpc.servicers.REFUSAL_S", SHORT_S)


@contextlib.asynccontextmanager
async def lines_of(scheduler, path, body=None, **settings):
    """The lines of a stream, whose headers have come."""
    async with (
        running_gateway(scheduler, **settings) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=30) as http,
        http.stream("POST", path, json=(body or BODIES[path]) | {"stream": True}) as response,
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
        # The first events of these APIs have nothing that was generated.
        assert (
            any(silent) if path in ("/v1/responses", "/v1/messages") else silent == [COMMENT, "", COMMENT, "", COMMENT]
        )
        scheduler.emits.set()
        rest = [line async for line in lines if line not in ("", COMMENT)]
    assert all(line.startswith(("data: ", "event: ")) for line in rest)
    assert any(each in rest[-1] for each in ("[DONE]", "response.incomplete", "message_stop"))


async def test_comments_come_after_one_of_several_prompts_has_ended(scheduler):
    scheduler.step_delay_s = 60
    scheduler.rule = lambda prompt, position: EOS if len(prompt) < 5 else 100
    body = BODIES[COMPLETIONS] | {"prompt": ["a", "word " * 20]}
    before = []
    async with lines_of(scheduler, COMPLETIONS, body, sse_keepalive=SHORT_S) as lines:
        while (line := await anext(lines)) != COMMENT:
            before.append(line)
    assert '"finish_reason":"stop"' in "".join(before)


async def test_comments_are_nothing_to_the_client_of_openai(scheduler):
    scheduler.step_delay_s = 2 * SHORT_S
    async with (
        running_gateway(scheduler, sse_keepalive=SHORT_S / 2) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key="none", max_retries=0) as client,
    ):
        asked = {"model": "quire-tiny", "messages": USER, "max_tokens": 4, "stream": True}
        chunks = [chunk async for chunk in await client.chat.completions.create(**asked)]
    assert chunks[-1].choices[0].finish_reason == "length"


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


async def test_a_failure_behind_the_headers_is_the_last_event(scheduler):
    scheduler.emits.clear()
    async with lines_of(scheduler, CHAT) as lines:
        (handle,) = scheduler.live
        scheduler.fail(handle, code=code_pb2.INTERNAL, reason="WORKER_LOST", message="lost")
        (line,) = [line async for line in lines if line]
    assert json.loads(line.removeprefix("data: "))["error"]["code"] == "worker_lost"


async def test_a_stream_that_no_scheduler_takes_keeps_its_status(scheduler):
    async with running_gateway(scheduler, connect_timeout=10 * SHORT_S, failover_delay=0.0) as gateway:
        await scheduler.stop()
        async with httpx.AsyncClient(base_url=gateway.http_url, timeout=30) as http:
            answer = await http.post(CHAT, json=BODIES[CHAT] | {"stream": True})
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
