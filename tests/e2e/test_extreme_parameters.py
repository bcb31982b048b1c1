"""Every number that a caller may give, at the ends of its range and at the smallest that single precision holds."""

import asyncio
import json
import math
from dataclasses import replace

import httpx
import pytest

from quire.client import BeamSearch, GenerationOptions
from quire.rpc.errors import InvalidArgument
from tests.support.serving import Served

pytestmark = pytest.mark.extended

PROMPT = "Once upon a time"
SUBNORMAL = 1e-45
LEAST_NORMAL = 1.1754944e-38
DRAWN = GenerationOptions(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True, logprobs=2)
GREEDY = replace(DRAWN, temperature=0.0)
# What leaves nothing but the most likely token.
GREEDY_BY_OTHER_MEANS = [
    {"temperature": SUBNORMAL},
    {"temperature": LEAST_NORMAL},
    {"temperature": 1e-300},
    {"top_p": SUBNORMAL},
    {"top_p": LEAST_NORMAL},
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
    {"beam_search": BeamSearch(beam_width=2, length_penalty=length_penalty), "repetition_penalty": repetition_penalty}
    for length_penalty in (-10.0, 10.0, SUBNORMAL)
    for repetition_penalty in (1e-30, 10.0)
]
TOO_SMALL = [{"repetition_penalty": value} for value in (9e-31, LEAST_NORMAL, SUBNORMAL)]


def name_of(change: dict) -> str:
    return ",".join(f"{name}={value}" for name, value in change.items())


async def outcome(served: Served, options: GenerationOptions) -> tuple[int, ...]:
    """The tokens, all of which have log probabilities that are numbers."""
    (sequence,) = (await served.client.generate(PROMPT, options, timeout_s=60)).sequences
    assert len(sequence.token_ids) == options.max_tokens
    entries = [entry for position in sequence.logprobs for entry in (position.chosen, *position.top)]
    assert all(not math.isnan(entry.logprob) for entry in entries)
    assert sequence.cumulative_logprob is not None
    assert not math.isnan(sequence.cumulative_logprob)
    return sequence.token_ids


@pytest.mark.parametrize("change", GREEDY_BY_OTHER_MEANS, ids=name_of)
async def test_the_smallest_values_leave_the_most_likely_token(served: Served, change):
    assert await outcome(served, replace(DRAWN, **change)) == await outcome(served, GREEDY)


@pytest.mark.parametrize("change", EXTREMES, ids=name_of)
async def test_an_extreme_value_gives_tokens_and_leaves_its_neighbours_alone(served: Served, change):
    alone = await outcome(served, DRAWN)
    extreme, neighbour = await asyncio.gather(outcome(served, replace(DRAWN, **change)), outcome(served, DRAWN))
    assert neighbour == alone
    assert extreme == await outcome(served, replace(DRAWN, **change))


@pytest.mark.parametrize("change", BEAMS, ids=name_of)
async def test_a_beam_search_takes_extreme_values(served: Served, change):
    await outcome(served, GenerationOptions(max_tokens=8, ignore_eos=True, **change))


@pytest.mark.parametrize("change", TOO_SMALL, ids=name_of)
async def test_what_logits_would_overflow_by_is_refused(served: Served, change):
    with pytest.raises(InvalidArgument, match=r"sampling.repetition_penalty is .* it must be in \[1e-30, 10\]"):
        await served.client.generate(PROMPT, replace(DRAWN, **change))


@pytest.mark.parametrize("seed", [-5, -(2**63)])
async def test_a_negative_seed_is_the_one_of_the_same_bits(served: Served, seed):
    body = {"prompt": PROMPT, "temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=f"http://{served.server.http_address}", timeout=60) as http:
        answers = [
            (await http.post("/v1/completions", json=body | {"seed": each})).json()["choices"][0]["text"]
            for each in (seed, seed + 2**64, seed + 1)
        ]
    assert answers[0] == answers[1] != answers[2]


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
