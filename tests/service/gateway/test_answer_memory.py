"""Answers that take too much memory: the call that holds most ends with a clear error, and others continue."""

import asyncio

import pytest

from tests.support.gateway_process import running_gateway

COMPLETIONS = "/v1/completions"
LARGE = {"prompt": ["a", "b", "c", "d"], "logprobs": 20, "min_tokens": 900}


@pytest.fixture
async def small_gateway(scheduler):
    async with running_gateway(scheduler, max_answer_bytes=200_000) as gateway:
        yield gateway


async def post(gateway, **fields):
    return await gateway.http.post(COMPLETIONS, json=fields)


async def test_an_answer_that_is_asked_to_be_too_large_is_refused_with_the_way_out(small_gateway, scheduler):
    response = await post(small_gateway, **LARGE, max_tokens=900)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "logprobs"
    assert "one that is not streamed may take at most 195.3 KiB" in error["message"]
    assert "stream the answer, or ask for fewer" in error["message"]
    streamed = await post(small_gateway, **LARGE, max_tokens=900, stream=True)
    assert streamed.status_code == 200
    assert streamed.text.count('"finish_reason":"length"') == 4


async def test_an_answer_that_grows_too_large_ends_alone_and_its_requests_are_aborted(small_gateway, scheduler):
    # Without max_tokens the room left in the context does not predict the length of the answer.
    scheduler.tokens_per_step = 8
    others = [post(small_gateway, prompt="hello", max_tokens=200, logprobs=5) for _ in range(3)]
    body = {"messages": [{"role": "user", "content": "x"}], "n": 1, "logprobs": True, "top_logprobs": 20}
    large, *answers = await asyncio.gather(small_gateway.http.post("/v1/chat/completions", json=body), *others)
    assert large.status_code == 400
    assert "more than 195.3 KiB (--max-answer-bytes); stream the answer" in large.json()["error"]["message"]
    assert [len(answer.json()["choices"][0]["logprobs"]["tokens"]) for answer in answers] == [200] * 3
    await scheduler.until(lambda: len(scheduler.aborted) == 1)
    # The memory of the refused answer is free again.
    assert (await post(small_gateway, prompt="hello", max_tokens=200, logprobs=20)).status_code == 200
