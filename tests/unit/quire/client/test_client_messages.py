"""Values that do not fit a message are refused before they are sent, by field, value and range."""

import re
from collections.abc import Callable
from typing import Any

import pytest

from quire.client import BeamSearch, ChatMessage, EarlyStopping, GenerationOptions
from quire.client.client_messages import (
    filled,
    to_chat_request,
    to_detokenize_request,
    to_generate_request,
    to_pin_request,
    to_tokenize_request,
)
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2, model_pb2, prefix_pb2
from quire.rpc.errors import InvalidArgument

A_STR = "a str that UTF-8 can encode"
A_TOKEN_ID = "a whole number in [0, 4,294,967,295]"
A_OPTIONS, A_SEQUENCE = "a GenerationOptions", "a sequence of ChatMessage"
NO_MESSAGES: list[Any] = ["hello", ("user", "x"), {"role": "user"}, {"role": "user", "content": "x", "style": "Ann"}]
A_CHAT_MESSAGE = 'a ChatMessage, or a mapping of its fields with "role" and "content"'


def generate_request(prompt: Any, options: Any = None) -> generation_pb2.GenerateRequest:
    return to_generate_request(generation_pb2.GenerateRequest(), prompt, options)


def options_request(**options: Any) -> generation_pb2.GenerateRequest:
    return generate_request("hello", GenerationOptions(**options))


def chat_request(messages: Any) -> generation_pb2.ChatRequest:
    return to_chat_request(generation_pb2.ChatRequest(), messages, None, {})


def tokenize_request(text_or_messages: Any) -> generation_pb2.TokenizeRequest:
    return to_tokenize_request(text_or_messages, add_special_tokens=None, model=None)


def pin_request(prefix: Any) -> prefix_pb2.PinPrefixRequest:
    return to_pin_request(prefix, time_to_live_ms=None, model=None)


@pytest.mark.parametrize(
    ("field", "value", "limit"),
    [
        ("seed", -1, "a whole number in [0, 18,446,744,073,709,551,615]"),
        ("seed", 2**64, "a whole number in [0, 18,446,744,073,709,551,615]"),
        ("top_k", -1, A_TOKEN_ID),
        ("max_tokens", 2**32, A_TOKEN_ID),
        ("n", 1.5, A_TOKEN_ID),
        ("stop_token_ids", [1, -1], f"a sequence, each entry {A_TOKEN_ID}"),
        ("temperature", "hot", "a number"),
        ("temperature", {"is": 1}, "a number"),
        ("ignore_eos", "yes", "True or False"),
        ("stop", 5, f"a str or a sequence, each entry {A_STR}"),
        ("bad_words", ["x", None], f"a str or a sequence, each entry {A_STR}"),
        ("stop_token_ids", "2", f"a sequence, each entry {A_TOKEN_ID}"),
        ("logit_bias", 5, f"a mapping, each key {A_TOKEN_ID} and each value a number"),
        ("logit_bias", {"5": 1.0}, f"a mapping, each key {A_TOKEN_ID} and each value a number"),
        ("beam_search", 4, "a BeamSearch"),
    ],
)
def test_an_option_of_a_wrong_type_or_range_is_refused_by_name_value_and_limit(
    field: str, value: Any, limit: str
) -> None:
    with pytest.raises(InvalidArgument) as refused:
        options_request(**{field: value})
    assert refused.value.message == f"{field} is {value!r:.80}; it must be {limit}"
    assert [violation.field for violation in refused.value.violations] == [field]


@pytest.mark.parametrize("early_stopping", [True, "soon", []])
def test_what_is_no_early_stopping_is_refused_by_name_value_and_limit(early_stopping: Any) -> None:
    expected = f"early_stopping is {early_stopping!r}; it must be one of EarlyStopping: false, true, never"
    with pytest.raises(InvalidArgument, match=re.escape(expected)):
        options_request(beam_search=BeamSearch(2, early_stopping=early_stopping))


def test_beams_are_sent_as_they_are_given() -> None:
    for early_stopping in EarlyStopping:
        sampling = options_request(n=2, beam_search=BeamSearch(4, 0.5, early_stopping)).sampling
        name = common_pb2.EarlyStopping.Name(sampling.beam_search.early_stopping)
        assert name == f"EARLY_STOPPING_{early_stopping.name}"
        given = common_pb2.BeamSearchParameters(beam_width=4, length_penalty=0.5)
        given.early_stopping = sampling.beam_search.early_stopping
        assert sampling == common_pb2.SamplingParameters(n=2, beam_search=given)
    # Absent fields stay absent, and 0 is not absent.
    plain = common_pb2.SamplingParameters(beam_search=common_pb2.BeamSearchParameters(beam_width=3))
    assert options_request(beam_search=BeamSearch(3)).sampling == plain
    assert options_request(temperature=0.0).sampling == common_pb2.SamplingParameters(temperature=0.0)
    assert options_request(logprobs=0).output.HasField("logprobs")
    assert generate_request("hello") == generation_pb2.GenerateRequest(text="hello")


def test_one_str_is_one_text() -> None:
    request = options_request(stop="day", bad_words="night")
    assert list(request.stopping.stop) == ["day"]
    assert list(request.sampling.bad_words) == ["night"]


@pytest.mark.parametrize("token_ids", [5, "hello", None, [-1], {1: 2}])
def test_what_are_no_token_ids_are_refused_by_name_value_and_limit(token_ids: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        to_detokenize_request(token_ids, include_special_tokens=None, model=None)
    assert refused.value.message == f"token_ids is {token_ids!r}; it must be a sequence, each entry {A_TOKEN_ID}"


@pytest.mark.parametrize(
    ("make", "values", "name", "limit"),
    [
        (lambda value: generate_request("hello", value), [{"temperature": 0}, "greedy"], "options", A_OPTIONS),
        (generate_request, [5, None, b"text"], "prompt", "a str or a sequence of token ids"),
        (pin_request, [5, None], "prefix", "a str, a sequence of token ids or a sequence of ChatMessage"),
        (tokenize_request, [5, None, b"text"], "text_or_messages", "a str or a sequence of ChatMessage"),
        (chat_request, ["hello", 5, {"role": "user"}, ChatMessage("user", "x")], "messages", A_SEQUENCE),
        (lambda value: chat_request([ChatMessage("user", "x"), value]), NO_MESSAGES, "messages[1]", A_CHAT_MESSAGE),
    ],
)
def test_what_is_of_another_type_is_a_type_error_with_its_place(
    make: Callable[[Any], object], values: list[Any], name: str, limit: str
) -> None:
    for value in values:
        with pytest.raises(TypeError) as refused:
            make(value)
        assert str(refused.value) == f"{name} is {value!r:.80}; it must be {limit}"


def test_a_mapping_of_role_and_content_is_a_message() -> None:
    mapping = {"content": "x", "role": "user"}
    assert chat_request([mapping]) == chat_request([ChatMessage("user", "x")])


@pytest.mark.parametrize("content", [None, 5, {"text": "x"}, "\ud800"])
def test_a_content_that_is_no_text_is_refused_with_its_place(content: Any) -> None:
    for message in (ChatMessage("user", content), {"role": "user", "content": content}):
        with pytest.raises(InvalidArgument) as refused:
            chat_request([message])
        assert refused.value.message == f"messages[0].content is {content!r}; it must be {A_STR}"
        assert refused.value.violations[0].field == "messages[0].content"


def test_an_id_that_is_missing_is_refused_by_name() -> None:
    requests = (generation_pb2.CancelRequest(), model_pb2.GetModelRequest(), prefix_pb2.UnpinPrefixRequest())
    for request, field in zip(requests, ("request_id", "model", "pin_id"), strict=True):
        with pytest.raises(InvalidArgument, match=f"^{field} is None; it must be {A_STR}$"):
            filled(request, **{field: None})
