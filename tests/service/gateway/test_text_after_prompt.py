"""Answers of a tokenizer whose decoder drops the first space: prompt and answer are the text of all tokens."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from tests.support.fake_scheduler import FakeScheduler, scripted
from tests.support.fronts import FRONTS
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.tokenizers import byte_fallback, id_of, write_model_directory
from tests.support.two_gateways import two_gateways

TOKENIZER = byte_fallback()
THE, CAT = id_of(TOKENIZER, "▁the"), id_of(TOKENIZER, "▁cat")
ANSWER = " the cat the cat"
SMILE = [id_of(TOKENIZER, f"<0x{byte:02X}>") for byte in "😀".encode()]
TEMPLATE = """{%- for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor -%}
{%- if add_generation_prompt %}[assistant]{% endif %}"""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def spaced(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The directory of a model with such a tokenizer."""
    directory = tmp_path_factory.mktemp("spaced") / "model"
    return str(write_model_directory(directory, TOKENIZER, chat_template__jinja=TEMPLATE))


@pytest.fixture
async def scheduler() -> AsyncIterator[FakeScheduler]:
    async with FakeScheduler(vocab_size=TOKENIZER.get_vocab_size(), rule=scripted([THE, CAT])) as fake:
        yield fake


@pytest.fixture
async def gateway(scheduler: FakeScheduler, spaced: str) -> AsyncIterator[RunningGateway]:
    async with running_gateway(scheduler, model=spaced, served_model_name="quire-tiny") as running:
        yield running


async def texts_of(gateway: RunningGateway, path: str = COMPLETIONS, **body: object) -> list[str]:
    answer = (await gateway.http.post(path, json={"max_tokens": 4} | body)).json()
    return [each["text"] if path == COMPLETIONS else each["message"]["content"] for each in answer["choices"]]


async def test_completions_begin_with_the_space_of_their_first_token(gateway):
    for prompt in ("hello", TOKENIZER.encode("hello").ids):
        assert await texts_of(gateway, prompt=prompt) == [ANSWER]
        assert await texts_of(gateway, prompt=prompt, echo=True) == ["hello" + ANSWER]
        assert await texts_of(gateway, prompt=prompt, stop=[" the"]) == [""]
        assert await texts_of(gateway, prompt=prompt, stop=["cat"], include_stop_str_in_output=True) == [" the cat"]
    assert await texts_of(gateway, prompt=[1]) == [ANSWER.lstrip()]


@pytest.mark.parametrize("prediction", [ANSWER, ANSWER[1:]], ids=["with its space", "without it"])
async def test_an_answer_that_is_sent_back_as_a_prediction_is_right(gateway, prediction):
    body = {"prompt": "hello", "max_tokens": 4, "prediction": {"type": "content", "content": prediction}}
    usage = (await gateway.http.post(COMPLETIONS, json=body)).json()["usage"]
    assert usage["completion_tokens_details"]["accepted_prediction_tokens"] == 4


async def test_log_probabilities_are_where_their_tokens_are_in_the_text(gateway):
    body = {"prompt": "hello", "max_tokens": 2, "logprobs": 1, "echo": True}
    (choice,) = (await gateway.http.post(COMPLETIONS, json=body)).json()["choices"]
    offsets, tokens = choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"]
    assert (choice["text"], tokens[-2:], offsets[-2:]) == ("hello the cat", [" the", " cat"], [5, 9])


async def test_chats_go_on_from_the_last_message(gateway):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "hello"}]
    assert await texts_of(gateway, CHAT, messages=messages) == [ANSWER]
    more = {"continue_final_message": True, "add_generation_prompt": False}
    assert await texts_of(gateway, CHAT, messages=messages, **more) == [ANSWER]
    assert await texts_of(gateway, CHAT, messages=messages, echo=True, **more) == ["hello" + ANSWER]


@pytest.mark.parametrize("kind", FRONTS, ids=lambda kind: kind.name)
@pytest.mark.parametrize("streams", [False, True])
async def test_every_front_keeps_the_space(gateway, kind, streams):
    answer = await kind(gateway).ask(streams=streams, max_tokens=4)
    assert answer.text == ANSWER


@pytest.mark.parametrize("num_bytes", [1, 3])
async def test_a_character_that_the_prompt_begins_is_of_the_answer(scheduler, gateway, num_bytes):
    scheduler.rule = scripted([*SMILE[num_bytes:], THE])
    prompt, max_tokens = [*TOKENIZER.encode("a").ids, *SMILE[:num_bytes]], 5 - num_bytes
    assert await texts_of(gateway, prompt=prompt, max_tokens=max_tokens) == ["😀 the"]
    assert await texts_of(gateway, prompt=prompt, max_tokens=max_tokens, echo=True) == ["a😀 the"]
    # No later token will complete the character.
    assert (await texts_of(gateway, prompt=prompt, max_tokens=0, echo=True))[0].rstrip(
        "\N{REPLACEMENT CHARACTER}"
    ) == "a"


async def test_another_gateway_that_takes_a_stream_over_knows_the_prompt(tmp_path, spaced):
    settings = {"model": spaced, "served_model_name": "quire-tiny", "script": (THE, CAT)}
    body = {"prompt": "hello", "echo": True, "max_tokens": 6, "stream": True, "durable": True, "request_id": "mine"}
    async with two_gateways(tmp_path, **settings) as gateways, asyncio.timeout(60):
        whole = (await gateways.first.http.post(COMPLETIONS, json=body)).text
        assert '"hello the"' in whole
        rest = await gateways.second.http.post(COMPLETIONS, json={}, headers={"last-event-id": "mine:0"})
        assert rest.text == whole.partition("\n\n")[2]
