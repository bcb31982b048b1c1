"""Every number that a caller may give, at the ends of its range and at the smallest that single precision holds."""

import asyncio
import json
import math
from dataclasses import replace

import httpx
import pytest

from quire.client import BeamSearch, GenerationOptions
from tests.support.serving import Served

pytestmark = pytest.mark.extended

PROMPT = "Once upon a time"
SUBNORMAL = 1e-45
LEAST_NORMAL = 1.1754944e-38
DRAWN = GenerationOptions(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
# What leaves nothing but the most likely token.
GREEDY_BY_OTHER_MEANS = [
    *({"temperature": value} for value in (SUBNORMAL, LEAST_NORMAL, 1e-300)),
    *({"top_p": value} for value in (SUBNORMAL, LEAST_NORMAL)),
    {"min_p": 1.0},
]
EXTREMES = [
    {"temperature": 100.0},
    {"temperature": 100.0, "top_p": SUBNORMAL, "min_p": SUBNORMAL, "top_k": 2**32 - 1},
    {"top_p": 1.0, "min_p": SUBNORMAL},
    {"min_p": LEAST_NORMAL},
    *({"repetition_penalty": value, "temperature": temperature} for value in (1e-30, 10.0) for temperature in (0, 1)),
    {"repetition_penalty": 1e-30, "temperature": SUBNORMAL},
    {"repetition_penalty": 1e-30, "presence_penalty": -2.0, "frequency_penalty": -2.0, "temperature": 100.0},
    *({"presence_penalty": value, "frequency_penalty": value} for value in (-2.0, 2.0, SUBNORMAL)),
    *({"logit_bias": {5: value, 6: -value}, "repetition_penalty": 1e-30} for value in (-100.0, 100.0, SUBNORMAL)),
    {"logit_bias": {5: 100.0}, "temperature": SUBNORMAL},
    {"logit_bias": {5: -100.0, 6: -100.0}, "allowed_token_ids": [5, 6], "temperature": SUBNORMAL},
    {"seed": 2**64 - 1},
]
BEAMS = [
    GenerationOptions(
        max_tokens=8, ignore_eos=True, beam_search=BeamSearch(2, length_penalty), repetition_penalty=repetition_penalty
    )
    for length_penalty in (-10.0, 10.0, SUBNORMAL)
    for repetition_penalty in (1e-30, 10.0)
]


async def outcome(served: Served, options: GenerationOptions) -> tuple[int, ...]:
    """The tokens, all of which have log probabilities that are numbers."""
    (sequence,) = (await served.client.generate(PROMPT, options, timeout_s=60)).sequences
    assert len(sequence.token_ids) == options.max_tokens, options
    entries = [entry for position in sequence.logprobs for entry in (position.chosen, *position.top)]
    assert all(not math.isnan(entry.logprob) for entry in entries), options
    assert sequence.cumulative_logprob is not None, options
    assert not math.isnan(sequence.cumulative_logprob), options
    return sequence.token_ids


async def test_extreme_values_give_tokens_that_are_the_same_in_any_company(served: Served) -> None:
    extremes = [replace(DRAWN, **change) for change in (*GREEDY_BY_OTHER_MEANS, *EXTREMES)]
    alone = [await outcome(served, options) for options in (DRAWN, *extremes)]
    together = await asyncio.gather(*(outcome(served, options) for options in (DRAWN, *extremes, *BEAMS)))
    for options, one, other in zip((DRAWN, *extremes), alone, together[: len(alone)], strict=True):
        assert one == other, options
    greedy = await outcome(served, replace(DRAWN, temperature=0.0))
    for options, tokens in zip(extremes[: len(GREEDY_BY_OTHER_MEANS)], alone[1:], strict=False):
        assert tokens == greedy, options


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_log_probabilities_of_what_cannot_be_are_numbers_in_json(served: Served, path):
    prompt = {"prompt": PROMPT, "logprobs": 5}
    if "chat" in path:
        prompt = {"messages": [{"role": "user", "content": PROMPT}], "logprobs": True, "top_logprobs": 5}
    body = {"temperature": SUBNORMAL, "max_tokens": 4, "ignore_eos": True, "allowed_token_ids": [50, 60], **prompt}
    async with httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=60) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    json.loads(answer.text, parse_constant=pytest.fail)
