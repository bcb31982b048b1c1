"""Whatever a body holds, it becomes options that the validator takes, or a typed error."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.answers import OPENAI, error_answer
from gateway.api.body import BodyLimits, load_json
from gateway.api.openai.read import chat_options, completion_options, completion_prompts, param_name
from gateway.api.openai.schemas import ChatBody, CompletionBody
from gateway.request.counting import EntryLimits
from gateway.request.limits import Limits, Pool
from gateway.request.validation import check_request
from quire.rpc.errors import QuireError
from tests.support.openai_bodies import parse

LIMITS = Limits(
    pools=(Pool(num_blocks=16, block_size=4),),
    vocab_size=100,
    max_model_len=64,
    max_prompt_tokens=63,
    longest_token_bytes=10,
    max_message_bytes=10_000,
    max_logprobs=5,
    max_stop_strings=4,
    max_stop_string_bytes=20,
    max_stop_token_ids=8,
    max_chat_messages=8,
    max_n=8,
    max_call_sequences=1024,
)
SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-2, 9), st.floats(), st.text(max_size=8), st.just("never")
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4) | st.just("5"), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", ""]), "content": st.text(max_size=5) | VALUES}, optional={"name": VALUES}
    ),
    max_size=3,
)


def bodies(kind, required):
    names = [*kind.model_fields, "tools", "suffix", "what"]
    return st.builds(
        lambda fields, given: fields | given, st.dictionaries(st.sampled_from(names), VALUES, max_size=4), required
    )


def answered(kind, data: bytes) -> None:
    body = None
    try:
        body = parse(kind, data)
        if isinstance(body, ChatBody):
            requests = [chat_options(body, "id")]
        else:
            requests = [completion_options(body, prompt, "id") for prompt in completion_prompts(body)]
        for request in requests:
            check_request(request, LIMITS, "model")
    except QuireError as error:
        answer = error_answer(error, lambda field: field if body is None else param_name(body, field))
        assert 400 <= answer.status < 500
        json.loads(OPENAI.error_body(answer))
        assert answer.param is None or not answer.param.startswith(("sampling.", "stopping.", "output."))


@given(bodies(CompletionBody, st.fixed_dictionaries({}, optional={"prompt": VALUES | st.text(max_size=4)})))
def test_any_completion(body):
    answered(CompletionBody, json.dumps(body).encode())


@given(bodies(ChatBody, st.fixed_dictionaries({"messages": MESSAGES})))
def test_any_chat(body):
    answered(ChatBody, json.dumps(body).encode())


def test_too_many_messages_are_refused_before_they_are_looked_at():
    with pytest.raises(QuireError) as caught:
        parse(ChatBody, json.dumps({"messages": [{"role": 5}] * 11}).encode(), BodyLimits(1 << 22, EntryLimits(10)))
    assert caught.value.message == "messages has 11 entries; the max is 10"


class _Limits(EntryLimits):
    """`max_messages` is the maximum number of all strings, lists and objects."""

    @property
    def max_values(self) -> int:
        return self.max_messages


def num_values(value: Any) -> int:
    """Strings, names among them, lists and objects."""
    match value:
        case str():
            return 1
        case list():
            return 1 + sum(map(num_values, value))
        case dict():
            return 1 + sum(1 + num_values(each) for each in value.values())
    return 0


TEXTS = st.text(st.sampled_from('ab"\\[{]},\u00e9'), max_size=8)
NESTED = st.recursive(
    st.none() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXTS, inner, max_size=5),
    max_leaves=30,
)


@settings(deadline=None)
@given(value=NESTED, ensure_ascii=st.booleans())
async def test_strings_lists_and_objects_of_a_body_are_counted_before_they_are_made(value, ensure_ascii):
    data = json.dumps(value, ensure_ascii=ensure_ascii).encode()
    number = num_values(value)
    assert await load_json(data, BodyLimits(1 << 22, _Limits(number))) == value
    if number:
        with pytest.raises(QuireError, match=f"has more than {number - 1:,} strings, lists and objects"):
            await load_json(data, BodyLimits(1 << 22, _Limits(number - 1)))
