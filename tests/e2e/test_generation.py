"""The embedded model through all processes: what a user sees."""

import asyncio
from collections.abc import AsyncIterator

import pytest_asyncio

from quire.client import ChatMessage, GenerationOptions
from tests.support.serving import Served, serving

SAMPLED = GenerationOptions(temperature=1.0, top_p=0.95, seed=11, max_tokens=40)
PROMPTS = ("Once upon a time", "Question: What is the capital of France?\nAnswer:", "A", "The little dragon " * 20)


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(served: Served):
    alone = [await served.client.generate(prompt, SAMPLED) for prompt in PROMPTS]
    crowd = await asyncio.gather(
        *(served.client.generate(prompt, SAMPLED) for prompt in PROMPTS),
        *(served.client.generate(f"{i} little stories", GenerationOptions(max_tokens=30)) for i in range(30)),
    )
    assert [each.text for each in crowd[: len(PROMPTS)]] == [each.text for each in alone]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def chunked() -> AsyncIterator[Served]:
    """Another server, which computes prompts in small chunks and has nothing in its cache."""
    async with serving(max_num_batched_tokens=16, max_num_seqs=16, num_gpu_blocks=256, dtype="float32") as running:
        yield running


async def test_the_size_of_prefill_chunks_changes_no_token(served: Served, chunked: Served):
    expected = [await served.client.generate(prompt, SAMPLED) for prompt in PROMPTS]
    got = await asyncio.gather(*(chunked.client.generate(prompt, SAMPLED) for prompt in PROMPTS))
    assert [each.sequences[0].token_ids for each in got] == [each.sequences[0].token_ids for each in expected]


async def test_a_follow_up_turn_hits_the_cache_and_says_the_same_as_without(served: Served, chunked: Served):
    question = ChatMessage("user", "Tell me a story about a fox named Pip.")
    options = GenerationOptions(temperature=0.0)
    first = await served.client.chat([question], options)
    turn = [question, ChatMessage("assistant", first.text), ChatMessage("user", "What is 2 plus 3?")]
    follow_up = await served.client.chat(turn, options)
    history = first.usage.prompt_tokens + first.usage.generated_tokens
    assert follow_up.usage.cached_tokens >= history - 2 * 16
    without = await chunked.client.chat(turn, options)
    assert without.usage.cached_tokens == 0
    assert without.text == follow_up.text
