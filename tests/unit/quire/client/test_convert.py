"""Values that no message can hold are refused before they are sent, by field, value and range."""

import re
from typing import Any

import pytest

from quire.client import BeamSearch, ChatMessage, GenerationOptions
from quire.client.convert import (
    GenerationFields,
    to_cancel_request,
    to_chat_request,
    to_detokenize_request,
    to_generate_request,
    to_get_model_request,
    to_tokenize_request,
    to_unpin_request,
)
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import InvalidArgument

UNSET: GenerationFields = {"model": None, "request_id": None, "priority": None}
A_STR = "a str that UTF-8 can encode"
A_TOKEN_ID = "a whole number in [0, 4,294,967,295]"
A_CHAT_MESSAGE = 'a ChatMessage, or a mapping of its fields with "role" and "content"'


def options_request(**options: Any) -> generation_pb2.GenerateRequest:
    return to_generate_request(generation_pb2.GenerateRequest(), "hello", GenerationOptions(**options), **UNSET)


def chat_request(messages: Any) -> generation_pb2.ChatRequest:
    return to_chat_request(generation_pb2.ChatRequest(), messages, None, **UNSET)


def detokenize_request(token_ids: Any) -> generation_pb2.DetokenizeRequest:
    return to_detokenize_request(token_ids, include_special_tokens=None, model=None)


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
        pytest.param("temperature", 10**400, "a number", id="beyond floats"),
        ("temperature", {"is": 1}, "a number"),
        ("ignore_eos", "yes", "True or False"),
        ("stop", 5, f"a str or a sequence, each entry {A_STR}"),
        ("stop", {"day": 1}, f"a str or a sequence, each entry {A_STR}"),
        ("bad_words", ["x", None], f"a str or a sequence, each entry {A_STR}"),
        ("stop_token_ids", 2, f"a sequence, each entry {A_TOKEN_ID}"),
        ("stop_token_ids", "2", f"a sequence, each entry {A_TOKEN_ID}"),
        ("stop_token_ids", b"2", f"a sequence, each entry {A_TOKEN_ID}"),
        ("logit_bias", 5, f"a mapping, each key {A_TOKEN_ID} and each value a number"),
        ("logit_bias", [5], f"a mapping, each key {A_TOKEN_ID} and each value a number"),
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


def test_one_str_is_one_text() -> None:
    request = options_request(stop="day", bad_words="night")
    assert list(request.stopping.stop) == ["day"]
    assert list(request.sampling.bad_words) == ["night"]


@pytest.mark.parametrize("options", [{"temperature": 0}, "greedy"])
def test_what_are_no_options_are_a_type_error(options: Any) -> None:
    with pytest.raises(TypeError) as refused:
        to_generate_request(generation_pb2.GenerateRequest(), "hello", options, **UNSET)
    assert str(refused.value) == f"options is {options!r}; it must be a GenerationOptions"


@pytest.mark.parametrize("token_ids", [5, "hello", None, [-1], {1: 2}])
def test_what_are_no_token_ids_are_refused_by_name_value_and_limit(token_ids: Any) -> None:
    with pytest.raises(InvalidArgument) as refused:
        detokenize_request(token_ids)
    assert refused.value.message == f"token_ids is {token_ids!r}; it must be a sequence, each entry {A_TOKEN_ID}"


def test_a_mapping_of_role_and_content_is_a_message() -> None:
    mapping = {"content": "x", "role": "user"}
    assert chat_request([mapping]) == chat_request([ChatMessage("user", "x")])


@pytest.mark.parametrize("messages", ["hello", 5, None, {"role": "user", "content": "x"}, ChatMessage("user", "x")])
def test_what_are_no_messages_are_a_type_error(messages: Any) -> None:
    with pytest.raises(TypeError) as refused:
        chat_request(messages)
    assert str(refused.value) == f"messages is {messages!r:.80}; it must be a sequence of ChatMessage"


@pytest.mark.parametrize("text_or_messages", [5, None, b"text"])
def test_what_is_neither_text_nor_messages_is_a_type_error(text_or_messages: Any) -> None:
    with pytest.raises(TypeError) as refused:
        to_tokenize_request(text_or_messages, add_special_tokens=None, model=None)
    limit = "a str or a sequence of ChatMessage"
    assert str(refused.value) == f"text_or_messages is {text_or_messages!r}; it must be {limit}"


@pytest.mark.parametrize(
    "entry", ["hello", 5, None, ("user", "x"), {"role": "user"}, {"role": "user", "content": "x", "style": "Ann"}]
)
def test_what_is_no_message_is_a_type_error_with_its_place(entry: Any) -> None:
    with pytest.raises(TypeError) as refused:
        chat_request([ChatMessage("user", "x"), entry])
    assert str(refused.value) == f"messages[1] is {entry!r}; it must be {A_CHAT_MESSAGE}"


@pytest.mark.parametrize("content", [None, 5, ["x"], {"text": "x"}, "\ud800"])
def test_a_content_that_is_no_text_is_refused_with_its_place(content: Any) -> None:
    for message in (ChatMessage("user", content), {"role": "user", "content": content}):
        with pytest.raises(InvalidArgument) as refused:
            chat_request([message])
        assert refused.value.message == f"messages[0].content is {content!r}; it must be {A_STR}"
        assert refused.value.violations[0].field == "messages[0].content"


@pytest.mark.parametrize(
    ("call", "field"),
    [(to_cancel_request, "request_id"), (to_get_model_request, "model"), (to_unpin_request, "pin_id")],
)
def test_an_id_that_is_missing_is_refused_by_name(call: Any, field: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{field} is None; it must be {A_STR}$"):
        call(None)
