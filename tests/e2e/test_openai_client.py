"""OpenAI's own Python client against all processes."""

from typing import Any

import pytest_asyncio
from openai import AsyncOpenAI

from tests.support.serving import Served

MODEL = "quire-tiny"
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


@pytest_asyncio.fixture(loop_scope="session")
async def client(served: Served):
    async with AsyncOpenAI(base_url=f"{url_of(served)}/v1", api_key="unused", max_retries=0, timeout=60) as running:
        yield running


def url_of(served: Served) -> str:
    return f"http://{served.server.http_address}"


async def test_a_chat_its_chunks_and_what_the_helper_puts_together_say_the_same(client: AsyncOpenAI):
    answer = await client.chat.completions.create(model=MODEL, messages=CAPITAL, user="someone")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "The capital of France is Paris.")
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id == answer.id
    chunks = [
        chunk
        async for chunk in await client.chat.completions.create(
            model=MODEL, messages=CAPITAL, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens > 5
    async with client.chat.completions.stream(model=MODEL, messages=CAPITAL, n=2, logprobs=True) as stream:
        kinds = {event.type async for event in stream}
        answer = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.message.content for choice in answer.choices] == ["The capital of France is Paris."] * 2
    assert len(answer.choices[0].logprobs.content or ()) > 5
