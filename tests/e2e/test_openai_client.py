"""OpenAI's own Python client against all processes."""

from typing import Any

from openai import AsyncOpenAI

MODEL = "quire-tiny"
CAPITAL: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]


async def test_a_chat_its_chunks_and_what_the_helper_puts_together_say_the_same(openai_client: AsyncOpenAI):
    chats = openai_client.chat.completions
    answer = await chats.create(model=MODEL, messages=CAPITAL, user="someone")
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "The capital of France is Paris.")
    assert choice.finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.id.startswith("chatcmpl-")
    assert answer._request_id == answer.id
    chunks = [
        chunk
        async for chunk in await chats.create(
            model=MODEL, messages=CAPITAL, stream=True, stream_options={"include_usage": True}
        )
    ]
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == "The capital of France is Paris."
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert not chunks[-1].choices
    assert chunks[-1].usage.completion_tokens > 5
    async with chats.stream(model=MODEL, messages=CAPITAL, n=2, logprobs=True) as stream:
        kinds = {event.type async for event in stream}
        answer = await stream.get_final_completion()
    assert {"chunk", "content.delta", "content.done"} <= kinds
    assert [choice.message.content for choice in answer.choices] == ["The capital of France is Paris."] * 2
    assert len(answer.choices[0].logprobs.content or ()) > 5
