"""Whatever a body holds, it becomes options that the validator takes, or a typed error."""

import json

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.openai.body import parse_body
from gateway.openai.errors import error_answer
from gateway.openai.options import chat_options, completion_options, completion_prompts, param_name
from gateway.openai.schemas import ChatBody, CompletionBody
from gateway.requests.limits import Limits, Pool
from gateway.requests.validation import check_request
from quire.rpc.errors import QuireError

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
        body = parse_body(kind, data)
        if isinstance(body, ChatBody):
            requests = [chat_options(body, "id")]
        else:
            requests = [completion_options(body, prompt, "id") for prompt in completion_prompts(body)]
        for request in requests:
            check_request(request, LIMITS, "model")
    except QuireError as error:
        answer = error_answer(error, lambda field: field if body is None else param_name(body, field))
        assert 400 <= answer.status < 500
        json.loads(answer.body)
        assert answer.param is None or not answer.param.startswith(("sampling.", "stopping.", "output."))


@settings(max_examples=300, deadline=None)
@given(bodies(CompletionBody, st.fixed_dictionaries({}, optional={"prompt": VALUES | st.text(max_size=4)})))
def test_any_completion(body):
    answered(CompletionBody, json.dumps(body).encode())


@settings(max_examples=300, deadline=None)
@given(bodies(ChatBody, st.fixed_dictionaries({"messages": MESSAGES})))
def test_any_chat(body):
    answered(ChatBody, json.dumps(body).encode())


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64) | st.text(max_size=32).map(str.encode))
def test_any_bytes(data):
    answered(CompletionBody, data)
