"""The embedded model through all processes: what a user sees."""

import asyncio

from quire.client import ChatMessage, GenerationOptions
from tests.support.serving import Served

SAMPLED = GenerationOptions(temperature=1.0, top_p=0.95, seed=11, max_tokens=40)
PROMPTS = ("Once upon a time", "Question: What is the capital of France?\nAnswer:", "A", "The little dragon " * 20)


async def test_a_seed_gives_the_same_tokens_alone_and_in_a_crowd(served: Served):
    alone = [await served.client.generate(prompt, SAMPLED) for prompt in PROMPTS]
    crowd = await asyncio.gather(
        *(served.client.generate(prompt, SAMPLED) for prompt in PROMPTS),
        *(served.client.generate(f"{i} little stories", GenerationOptions(max_tokens=30)) for i in range(30)),
    )
    assert [each.text for each in crowd[: len(PROMPTS)]] == [each.text for each in alone]


async def test_a_follow_up_turn_hits_the_cache(served: Served):
    """That this changes no token is shown in test_mixed_batch.py."""
    question = ChatMessage("user", "Tell me a story about a fox named Pip.")
    options = GenerationOptions(temperature=0.0)
    first = await served.client.chat([question], options)
    turn = [question, ChatMessage("assistant", first.text), ChatMessage("user", "What is 2 plus 3?")]
    history = first.usage.prompt_tokens + first.usage.generated_tokens
    assert (await served.client.chat(turn, options)).usage.cached_tokens >= history - 2 * 16
