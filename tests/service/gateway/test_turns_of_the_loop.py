"""No call of one caller blocks the gateway's event loop for long, since all callers share it.

A turn should take at most 20 ms. The tests allow more, since shared processors take longer for the same work. Without
the tested measures, each of these calls blocks the loop for a hundred milliseconds to minutes. `test_sweep.py` has the
calls that are refused for the length of one list or text.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from tests.support.fake_scheduler import FakeScheduler
from tests.support.measured_gateway import MeasuredGateway, measured_gateway
from tests.support.processes import until_true

LONGEST_TURN_MS = 150
PATIENCE_S = 250
NUM_PROMPTS = 1024
STOPS = [letter * 999 + "." for letter in "abcd"]
PARAMETERS = {
    "bad_words": [f"word {number} and what follows it" for number in range(128)],
    "logit_bias": {str(token_id): 1 for token_id in range(1024)},
    "allowed_token_ids": list(range(2000)),
}


@dataclass(frozen=True)
class Rig:
    gateway: MeasuredGateway
    scheduler: FakeScheduler
    http: httpx.AsyncClient
    generation: generation_pb2_grpc.GenerationServiceStub

    async def complete(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json=body)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def rig() -> AsyncIterator[Rig]:
    async with (
        FakeScheduler(max_model_len=60_000) as scheduler,
        measured_gateway(scheduler) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=None) as http,
        grpc.aio.insecure_channel(gateway.grpc_address) as channel,
    ):
        yield Rig(gateway, scheduler, http, generation_pb2_grpc.GenerationServiceStub(channel))


async def too_many_sequences_are_refused(rig: Rig) -> None:
    response = await rig.complete(prompt=["hello"] * NUM_PROMPTS, n=128, stop=STOPS)
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "n")
    for part in ("n is 128", "1,024 prompts", "131,072 sequences", "at most 1,024", "send fewer prompts"):
        assert part in error["message"]
    assert "stop has 4,000 bytes" in error["message"]


async def a_thousand_prompts_with_long_stop_strings(rig: Rig, *, stream: bool) -> None:
    response = await rig.complete(prompt=["hello"] * NUM_PROMPTS, stop=STOPS, max_tokens=2, stream=stream)
    assert response.status_code == 200
    assert response.text.count('"finish_reason":"length"') == NUM_PROMPTS
    assert len({submit.sampling.seed for submit in rig.scheduler.submits[-NUM_PROMPTS:]}) == NUM_PROMPTS


async def a_call_is_given_up(rig: Rig, num_submits: int, **body: Any) -> None:
    with rig.scheduler.standing_still():
        before = len(rig.scheduler.submits)
        calling = asyncio.create_task(rig.complete(**body))
        await until_true(lambda: len(rig.scheduler.submits) - before >= num_submits, PATIENCE_S)
        # This call comes after the first one, so that the work for its echo has been done.
        assert (await rig.http.get("/v1/models")).status_code == 200
        calling.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await calling
        await until_true(lambda: not rig.scheduler.live, PATIENCE_S)


async def a_long_text_is_tokenized(rig: Rig) -> None:
    text = "a b " * 100_000
    answer = (await rig.http.post("/tokenize", json={"prompt": text, "return_token_strs": True})).json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 200_000
    tokenized = await rig.generation.Tokenize(generation_pb2.TokenizeRequest(text=text))
    assert list(tokenized.token_ids) == answer["tokens"]


async def a_long_output_comes_at_once(rig: Rig) -> None:
    """A long output comes at once if, for example, a stream is resumed."""
    rig.scheduler.tokens_per_step = 40_000
    try:
        stopping: Any = {"max_tokens": 40_000, "ignore_eos": True, "stop": STOPS}
        request = generation_pb2.GenerateRequest(text="hello", stopping=stopping)
        answer = await rig.generation.Generate(request)
    finally:
        rig.scheduler.tokens_per_step = 1
    assert len(answer.sequences[0].token_ids) == 40_000


async def an_answer_with_many_log_probabilities(rig: Rig) -> None:
    rig.scheduler.tokens_per_step = 10_000
    try:
        request = generation_pb2.GenerateRequest(text="hello", output=common_pb2.OutputOptions(logprobs=20))
        request.stopping.CopyFrom(common_pb2.StoppingParameters(max_tokens=6000, ignore_eos=True))
        answer = await rig.generation.Generate(request)
    finally:
        rig.scheduler.tokens_per_step = 1
    assert len(answer.sequences[0].logprobs) == 6000


async def a_thousand_requests_go_on_when_their_scheduler_is_back(rig: Rig) -> None:
    with rig.scheduler.standing_still():
        calling = asyncio.create_task(rig.complete(prompt=["hello there " * 100] * NUM_PROMPTS, max_tokens=2))
        await until_true(lambda: len(rig.scheduler.live) == NUM_PROMPTS, PATIENCE_S)
        before = len(rig.scheduler.submits)
        rig.scheduler.break_streams()
        await until_true(lambda: len(rig.scheduler.submits) - before >= NUM_PROMPTS, PATIENCE_S)
    assert (await calling).status_code == 200


def deep_object() -> Any:
    value: Any = list(range(65))
    for _ in range(90):
        value = {f"k{number}": number for number in range(650)} | {"below": value}
    return value


async def a_response_shows_a_deep_schema(rig: Rig) -> None:
    schema = {"type": "object", "default": deep_object()}
    body = {"input": "hi", "max_output_tokens": 1, "text": {"format": {"type": "json_schema", "schema": schema}}}
    answer = await rig.http.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text


async def a_large_schema_beside_tools(rig: Rig) -> None:
    kinds = [{"type": "object", "properties": {f"p{number}": {"type": "integer"}}} for number in range(12_500)]
    schema = {"anyOf": kinds}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    body = {"messages": [{"role": "user", "content": "hi"}], "tools": [tool]}
    body |= {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
    answer = await rig.http.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["param"] == "response_format.json_schema.schema", answer.text


async def many_structural_tags_are_refused(rig: Rig) -> None:
    structures = [{"begin": "a", "schema": {}, "end": ""}] * 2600
    tags = {"type": "structural_tag", "structures": structures, "triggers": ["b"] * 16_000}
    answer = await rig.complete(prompt="hi", structural_tag=json.dumps(tags))
    assert answer.json()["error"]["param"] == "structural_tag.structures", answer.text


CALLS: dict[str, Callable[[Rig], Awaitable[None]]] = {
    "too many sequences": too_many_sequences_are_refused,
    "many prompts": partial(a_thousand_prompts_with_long_stop_strings, stream=False),
    "many prompts in a stream": partial(a_thousand_prompts_with_long_stop_strings, stream=True),
    "many parameters": partial(
        a_call_is_given_up, num_submits=100, prompt=["hello there " * 100] * NUM_PROMPTS, **PARAMETERS
    ),
    "a long echo": partial(a_call_is_given_up, num_submits=1, prompt=[[7] * 50_000], n=128, echo=True),
    "a long text": a_long_text_is_tokenized,
    "a long output": a_long_output_comes_at_once,
    "many log probabilities": an_answer_with_many_log_probabilities,
    "a deep schema": a_response_shows_a_deep_schema,
    "a large schema": a_large_schema_beside_tools,
    "structural tags": many_structural_tags_are_refused,
    "a lost scheduler": a_thousand_requests_go_on_when_their_scheduler_is_back,
}


# The last call takes as long as all others together.
@pytest.mark.parametrize("name", [*list(CALLS)[:-1], pytest.param(list(CALLS)[-1], marks=pytest.mark.extended)])
async def test_no_call_keeps_the_event_loop(rig, name):
    await rig.gateway.assert_short_turns(name, lambda: CALLS[name](rig), LONGEST_TURN_MS)
