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
