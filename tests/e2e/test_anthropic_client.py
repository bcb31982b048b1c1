"""Anthropic's own Python client against all processes."""

from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.support.serving import Served

if TYPE_CHECKING:
    from anthropic import AsyncAnthropic

pytestmark = pytest.mark.extended

MODEL = "quire-tiny"
CAPITAL: Any = [{"role": "user", "content": "What is the capital of France?"}]
CITY: Any = {
    "name": "remember",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


@pytest_asyncio.fixture(loop_scope="session")
async def client(served: Served):
    # Two seconds of imports, which only the process that runs these tests needs.
    from anthropic import AsyncAnthropic

    url = f"http://{served.server.http_address}"
    async with AsyncAnthropic(base_url=url, api_key="unused", max_retries=0, timeout=60) as running:
        yield running


async def test_a_message_and_the_same_as_a_stream(client: "AsyncAnthropic"):
    message = await client.messages.create(model=MODEL, max_tokens=50, messages=CAPITAL)
    (block,) = message.content
    assert block.type == "text"
    assert block.text == "The capital of France is Paris."
    async with client.messages.stream(model=MODEL, max_tokens=50, messages=CAPITAL) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        streamed = await stream.get_final_message()
    assert text == block.text
    assert streamed.stop_reason == message.stop_reason == "end_turn"
    counted = await client.messages.count_tokens(model=MODEL, messages=CAPITAL)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


async def test_a_forced_call_and_its_result(client: "AsyncAnthropic"):
    asked: Any = {"model": MODEL, "max_tokens": 300, "tools": [CITY], "tool_choice": {"type": "any"}}
    message = await client.messages.create(messages=CAPITAL, **asked)
    calls = [block for block in message.content if block.type == "tool_use"]
    assert message.stop_reason == "tool_use"
    assert calls
    assert all(call.input in ({"city": "Paris"}, {"city": "Rome"}) for call in calls)
    async with client.messages.stream(messages=CAPITAL, **asked) as stream:
        streamed = await stream.get_final_message()
    assert [block.input for block in streamed.content if block.type == "tool_use"] == [call.input for call in calls]
    results: Any = [{"type": "tool_result", "tool_use_id": call.id, "content": "done"} for call in calls]
    turns: Any = [*CAPITAL, {"role": "assistant", "content": message.content}, {"role": "user", "content": results}]
    answer = await client.messages.create(model=MODEL, max_tokens=20, messages=turns, tools=[CITY])
    assert answer.usage.output_tokens > 0
