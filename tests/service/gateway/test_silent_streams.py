"""Streams that wait for a token: their headers go out, and those over HTTP say that they are alive."""

import asyncio
import json

import httpx
import openai
import pytest
from google.rpc import code_pb2

from tests.support.gateway_process import collect, running_gateway, stream_request

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODIES = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, "stream": True},
    COMPLETIONS: {"prompt": ["hello", "world"], "max_tokens": 4, "stream": True},
}
COMMENT = ": keep-alive"
SHORT_S = 0.1
EOS = 2


def wait_for_refusals(monkeypatch, wait_s):
    monkeypatch.setattr("gateway.api.answers.REFUSAL_S", wait_s)
    monkeypatch.setattr("gateway.api.grpc.servicers.REFUSAL_S", wait_s)


@pytest.fixture(autouse=True)
def _short_wait(monkeypatch):
    wait_for_refusals(monkeypatch, SHORT_S)


@pytest.fixture
def _long_wait(_short_wait, monkeypatch):
    """For a refusal that comes, however long this process stands still."""
    wait_for_refusals(monkeypatch, 60.0)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_headers_come_before_the_first_token_and_comments_while_nothing_comes(scheduler, path):
    scheduler.emits.clear()
    async with (
        running_gateway(scheduler, sse_keepalive=SHORT_S) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=30) as http,
        http.stream("POST", path, json=BODIES[path]) as response,
    ):
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["x-request-id"]
        lines = response.aiter_lines()
        silent = [await anext(lines) for _ in range(6)]
        assert silent == [COMMENT, ""] * 3
        scheduler.emits.set()
        rest = [line async for line in lines if line not in ("", COMMENT)]
    assert rest[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in rest)


async def test_comments_come_after_one_of_several_prompts_has_ended(scheduler):
    scheduler.step_delay_s = 60
    scheduler.rule = lambda prompt, position: EOS if len(prompt) < 5 else 100
    async with (
        running_gateway(scheduler, sse_keepalive=SHORT_S) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=30) as http,
        http.stream("POST", COMPLETIONS, json=BODIES[COMPLETIONS] | {"prompt": ["a", "word " * 20]}) as response,
    ):
        before = []
        async for line in response.aiter_lines():
            if line == COMMENT:
                break
            before.append(line)
    assert '"finish_reason":"stop"' in "".join(before)


async def test_comments_are_nothing_to_the_client_of_openai(scheduler):
    scheduler.step_delay_s = 2 * SHORT_S
    async with (
        running_gateway(scheduler, sse_keepalive=SHORT_S / 2) as gateway,
        openai.AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key="none", max_retries=0) as client,
    ):
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model="quire-tiny", messages=[{"role": "user", "content": "hello"}], max_tokens=4, stream=True
            )
        ]
    assert chunks[-1].choices[0].finish_reason == "length"


async def test_a_stream_without_keepalive_sends_its_headers_and_no_comment(scheduler):
    scheduler.emits.clear()
    async with (
        running_gateway(scheduler, sse_keepalive=0.0) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=30) as http,
        http.stream("POST", CHAT, json=BODIES[CHAT]) as response,
    ):
        reading = asyncio.ensure_future(anext(response.aiter_lines()))
        done, _ = await asyncio.wait([reading], timeout=3 * SHORT_S)
        assert not done
        scheduler.emits.set()
        assert (await reading).startswith("data: ")


async def test_a_stream_of_tokens_has_no_comments(scheduler):
    scheduler.step_delay_s = SHORT_S / 10
    async with (
        running_gateway(scheduler, sse_keepalive=60.0) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=30) as http,
    ):
        answer = await http.post(CHAT, json=BODIES[CHAT] | {"max_tokens": 30})
    assert COMMENT not in answer.text


async def test_a_failure_behind_the_headers_is_the_last_event(scheduler, gateway):
    scheduler.emits.clear()
    async with (
        httpx.AsyncClient(base_url=gateway.http_url, timeout=30) as http,
        http.stream("POST", CHAT, json=BODIES[CHAT]) as response,
    ):
        assert response.status_code == 200
        (handle,) = scheduler.live
        scheduler.fail(handle, code=code_pb2.INTERNAL, reason="WORKER_LOST", message="lost")
        (line,) = [line async for line in response.aiter_lines() if line]
    assert json.loads(line.removeprefix("data: "))["error"]["code"] == "worker_lost"


async def test_a_stream_that_no_scheduler_takes_keeps_its_status(scheduler):
    async with running_gateway(scheduler, connect_timeout=10 * SHORT_S, failover_delay=0.0) as gateway:
        await scheduler.stop()
        async with httpx.AsyncClient(base_url=gateway.http_url, timeout=30) as http:
            answer = await http.post(CHAT, json=BODIES[CHAT])
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_scheduler")


async def test_headers_of_a_grpc_stream_come_before_its_first_token(scheduler, gateway):
    scheduler.emits.clear()
    call = gateway.generation.GenerateStream(stream_request())
    assert await asyncio.wait_for(call.initial_metadata(), 30) is not None
    assert scheduler.live
    scheduler.emits.set()
    assert len((await collect(call)).token_ids) == 8


async def test_headers_of_a_kserve_stream_come_before_its_first_request(gateway):
    call = gateway.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
    assert await asyncio.wait_for(call.initial_metadata(), 30) is not None
    call.cancel()
