"""Programs over one cached prefix, against all processes: the chosen answers, and the cost of a conversation."""

import dataclasses

import pytest

from quire.client import GenerationOptions
from quire.programs import Program
from tests.support.serving import Served

DOCUMENT = "Once upon a time there was a shy fox who lived in a hollow tree by the river, and each day " * 4
BEGUN = "Once upon a time there was a shy"
GREEDY = GenerationOptions(temperature=0, max_tokens=8)
BLOCK = 16


async def test_the_most_likely_choice_is_selected_over_a_cached_prefix(served: Served):
    choices = [" fox", " stone", " seven"]
    async with Program(served.client, DOCUMENT, GREEDY) as program:
        branch = program.branch().append(BEGUN)
        chosen = await branch.select(choices, "animal")
        assert chosen == branch["animal"] == " fox"
        assert branch.prompt == f"{DOCUMENT}{BEGUN} fox"
        # Each choice computes little more than its own tokens.
        assert program.costs.prompt_tokens - program.costs.cached_tokens < len(choices) * 2 * BLOCK

    # Same scores as over the whole prompt, without the cache.
    options = dataclasses.replace(GREEDY, max_tokens=1, prompt_logprobs=0)
    whole = await served.client.generate(f"{DOCUMENT}{BEGUN} fox", options)
    assert whole.usage.cached_tokens == 0
    part = await served.client.generate(
        f"{DOCUMENT}{BEGUN} fox", dataclasses.replace(options, prompt_logprobs_start=len(whole.prompt_logprobs) - 20)
    )
    assert part.usage.cached_tokens > 0
    assert len(part.prompt_logprobs) == 21
    for one, other in zip(part.prompt_logprobs, whole.prompt_logprobs[-21:], strict=True):
        assert one.chosen.token_id == other.chosen.token_id
        assert one.chosen.logprob == pytest.approx(other.chosen.logprob, abs=1e-4)
