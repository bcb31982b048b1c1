"""A pinned system prompt through all processes: it is there under pressure, and answers are the same."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from quire.client import ChatMessage, GenerationOptions, PinnedPrefix
from quire.rpc.errors import NotFound
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended

BLOCK_SIZE, NUM_BLOCKS = 16, 64
# Longer than any test, on however busy a machine.
TIME_TO_LIVE_MS = 600_000
SYSTEM = ChatMessage(
    "system",
    "You are a kind old fox who lives in a hollow tree at the edge of a wood. You answer in short words, you never "
    "tell a lie, and you end each answer with a wish for a good day. When you do not know a thing, you say so.",
)
SHORT = GenerationOptions(temperature=0.0, max_tokens=8)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served() -> AsyncIterator[Served]:
    async with serving(num_gpu_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, pin_quota=0.5, dtype="float32") as running:
        yield running


@pytest_asyncio.fixture
async def pin(served: Served) -> AsyncIterator[PinnedPrefix]:
    """Ended after the test where the test has not done so: a pin counts as in use."""
    pinned = await served.client.pin_prefix([SYSTEM], time_to_live_ms=TIME_TO_LIVE_MS)
    yield pinned
    if await num_pinned(served):
        await served.client.unpin_prefix(pinned.pin_id)


async def num_pinned(served: Served) -> int:
    return (await served.state()).gpu_pool.pinned_blocks


async def cached_tokens(served: Served, question: str) -> int:
    """How many tokens of a conversation under the system prompt were there before it was asked. Each test asks its own
    questions, which begin differently."""
    answer = await served.client.chat([SYSTEM, ChatMessage("user", question)], SHORT)
    return answer.usage.cached_tokens


async def fill_the_pool(served: Served) -> None:
    """Hands out every block that nobody holds, more than once."""
    options = GenerationOptions(temperature=0.0, max_tokens=200, ignore_eos=True)
    await asyncio.gather(*(served.client.generate(f"{index} wolves", options) for index in range(8)))


async def test_an_answer_is_the_same_with_a_pin_and_without(served: Served) -> None:
    messages = [SYSTEM, ChatMessage("user", "Is Paris in France?")]
    without = await served.client.chat(messages, SHORT)
    await fill_the_pool(served)
    pinned = await served.client.pin_prefix([SYSTEM])
    assert (await served.client.chat(messages, SHORT)).text == without.text
    await served.client.unpin_prefix(pinned.pin_id)


async def test_pressure_evicts_the_prefix_only_once_it_is_unpinned(served: Served, pin: PinnedPrefix) -> None:
    await fill_the_pool(served)
    assert await cached_tokens(served, "Where do you live?") == pin.pinned_tokens
    await served.client.unpin_prefix(pin.pin_id)
    assert await num_pinned(served) == 0
    assert await cached_tokens(served, "What do you eat?") >= pin.pinned_tokens
    await fill_the_pool(served)
    assert await cached_tokens(served, "When do you sleep?") == 0
    with pytest.raises(NotFound):
        await served.client.unpin_prefix(pin.pin_id)
