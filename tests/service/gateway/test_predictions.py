"""A prediction reaches the replicas that draft, from every API that takes one, and its usage is returned."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError

from quire.client import AsyncClient, GenerationOptions
from quire.messages.arrays import decode_int32
from tests.support.fake_scheduler import FakeScheduler, scripted
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.parameters import row_sampling
from tests.support.rig import EOS, SPEECH, TEXT, TOKENIZER

PREDICTION: Any = {"type": "content", "content": TEXT}
DRAFTS = {"drafted_tokens": 9, "accepted_draft_tokens": 6}
CHAT: Any = {"model": "quire-tiny", "messages": [{"role": "user", "content": "hello"}]}


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler(drafts=DRAFTS, rule=scripted([*SPEECH, EOS])) as running:
        yield running


@pytest.fixture
async def gateway(scheduler: FakeScheduler, model: str) -> AsyncIterator[RunningGateway]:
    async with running_gateway(scheduler, model=model, served_model_name="quire-tiny") as running:
        yield running


@pytest_asyncio.fixture
async def openai(gateway: RunningGateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway.http_url}/v1", api_key="unused", max_retries=0) as client:
        yield client


def predicted(scheduler: FakeScheduler) -> list[int]:
    (submit,) = scheduler.submits
    scheduler.submits.clear()
    return decode_int32(row_sampling(submit).predicted_token_ids, "predicted_token_ids").tolist()


async def test_each_api_sends_the_tokens_of_the_prediction(gateway, openai, scheduler) -> None:
    await openai.chat.completions.create(**CHAT, prediction=PREDICTION)
    assert predicted(scheduler) == SPEECH
    parts: Any = [{"type": "text", "text": TEXT[:9]}, {"type": "text", "text": TEXT[9:]}]
    await openai.chat.completions.create(**CHAT, prediction={"type": "content", "content": parts})
    assert predicted(scheduler) == SPEECH
    await openai.completions.create(model="quire-tiny", prompt="hello", extra_body={"prediction": PREDICTION})
    assert predicted(scheduler) == SPEECH
    await openai.responses.create(model="quire-tiny", input="hello", extra_body={"prediction": PREDICTION})
    assert predicted(scheduler) == SPEECH
    async with AsyncClient(gateway.gateway.grpc_address) as client:
        await client.generate("hello", GenerationOptions(prediction=TEXT))
        assert predicted(scheduler) == SPEECH
        await client.generate("hello", GenerationOptions(prediction=""))
    assert predicted(scheduler) == []


async def test_usage_says_what_came_of_it(gateway, openai) -> None:
    answer = await openai.chat.completions.create(**CHAT, prediction=PREDICTION)
    assert answer.usage is not None
    stream = await openai.chat.completions.create(
        **CHAT, prediction=PREDICTION, stream=True, stream_options={"include_usage": True}
    )
    last = [chunk async for chunk in stream][-1].usage
    for usage in (answer.usage, last):
        details = usage.completion_tokens_details
        assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (len(SPEECH), 0)
    response = (await gateway.http.post("/v1/responses", json={"input": "hello", "prediction": PREDICTION})).json()
    assert response["usage"]["output_tokens_details"]["accepted_prediction_tokens"] == len(SPEECH)
    async with AsyncClient(gateway.gateway.grpc_address) as client:
        usage = (await client.generate("hello", GenerationOptions(prediction=TEXT))).usage
    assert usage.accepted_prediction_tokens == len(SPEECH)
    assert {name: getattr(usage, name) for name in DRAFTS} == DRAFTS


@pytest.mark.parametrize(
    ("prediction", "param", "message"),
    [
        ({"type": "text", "content": "a"}, "prediction.type", "content"),
        ({"type": "content", "content": 5}, "prediction.content", "a string or a list of text parts"),
        ({"type": "content", "content": [{"type": "text"}]}, "prediction.content", "has a part without text"),
        ({"type": "content", "content": "a word of some length " * 20000}, "prediction.content", "bytes; the max is"),
    ],
)
async def test_a_prediction_that_is_none_is_refused_by_name(openai, prediction, param, message) -> None:
    with pytest.raises(BadRequestError, match=message) as raised:
        await openai.chat.completions.create(**CHAT, prediction=prediction)
    assert raised.value.param == param


async def test_copies_of_a_long_prediction_are_bounded(openai) -> None:
    fields = {"prediction": {"type": "content", "content": "abcdefgh " * 600}}
    with pytest.raises(BadRequestError, match="for each of 1,000 prompts"):
        await openai.completions.create(model="quire-tiny", prompt=["hello"] * 1000, extra_body=fields, max_tokens=1)


async def test_a_replica_that_does_not_draft_gets_no_prediction(model) -> None:
    """Its release may refuse the field."""
    async with (
        FakeScheduler(max_drafts=0, rule=scripted([*SPEECH, EOS])) as scheduler,
        running_gateway(scheduler, model=model, served_model_name="quire-tiny") as gateway,
    ):
        answer = (await gateway.http.post("/v1/chat/completions", json=CHAT | {"prediction": PREDICTION})).json()
        assert answer["choices"][0]["message"]["content"] == TEXT
        details = answer["usage"]["completion_tokens_details"]
        assert details["accepted_prediction_tokens"] == len(SPEECH)
        assert predicted(scheduler) == []


def test_the_text_is_the_tokens() -> None:
    assert TOKENIZER.decode(SPEECH) == TEXT
