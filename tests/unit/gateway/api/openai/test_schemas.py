"""Checks of request bodies: JSON, its size, types, and unsupported fields."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.api.body import BodyLimits, load_json
from gateway.api.generation_fields import CompletionBody
from gateway.api.openai.schemas import ChatBody, TokenizeBody
from gateway.request.counting import EntryLimits
from quire.rpc.errors import InvalidArgument, QuireError
from tests.support.openai_bodies import BODY_LIMITS, parse

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}
CALLED = {"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": None}}]}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


LARK = {"type": "custom", "custom": {"name": "g", "format": {"type": "grammar", "syntax": "lark", "definition": "a"}}}


def refusal(kind, data: bytes | dict, limits: BodyLimits = BODY_LIMITS) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        parse(kind, data, limits)
    return caught.value


def completion(**fields) -> CompletionBody:
    return parse(CompletionBody, {"prompt": "hello"} | fields)


def chat(**fields) -> ChatBody:
    return parse(ChatBody, {"messages": HELLO} | fields)


@pytest.mark.parametrize("data", [b"{", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b"[" * 100_000])
def test_what_is_not_json_is_refused(data):
    error = refusal(CompletionBody, data)
    assert error.reason == "MALFORMED_MESSAGE"
    assert error.message.startswith("the body is not valid JSON: ")


@pytest.mark.parametrize(
    ("field", "value", "path", "expected"),
    [
        ("prompt", 7, "prompt", "must be a string, a list"),
        ("prompt", [1, "a"], "prompt", "must be a string, a list"),
        ("max_tokens", 7.5, "max_tokens", "must be an integer"),
        ("temperature", float("nan"), "temperature", "must be a finite number"),
        ("stop", 7, "stop", "must be a string or a list of strings"),
        ("stream", "yes", "stream", "must be true or false"),
        ("stream_options", [], "stream_options", "must be an object"),
        ("stream_options", {"include_usage": 1}, "stream_options.include_usage", "must be true or false"),
        ("logit_bias", {"a": 1}, "logit_bias[a]", "must be a token id"),
        ("logit_bias", {"9" * 5000: 1}, f"logit_bias[{'9' * 77}...]", "must be a token id"),
        ("logit_bias", {"5": "much"}, "logit_bias[5]", "must be a number"),
        ("early_stopping", "soon", "early_stopping", 'must be true, false or "never"'),
    ],
)
def test_a_field_of_the_wrong_type_is_named(field, value, path, expected):
    error = refusal(CompletionBody, {"prompt": "hello", field: value})
    assert error.violations[0].field == path
    assert expected in error.message


@pytest.mark.parametrize(
    ("messages", "path"),
    [
        (None, "messages"),
        ([7], "messages[0]"),
        ([{"content": "hello"}], "messages[0].role"),
        ([{"role": "user", "content": 7}], "messages[0].content"),
        ([{"role": "assistant", "content": None, "tool_calls": [{}]}], "messages[0].tool_calls[0].id"),
        ([{"role": "user", "content": None, "tool_calls": [CALL]}], "messages[0].content"),
        ([{"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}], "messages[0].tool_calls[0].custom"),
        (
            [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}],
            "messages[0].tool_calls[0].function.arguments",
        ),
        ([*HELLO, {"role": "user", "content": "x", "name": 7}], "messages[1].name"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "No."}]}], "messages[0].content[0].type"),
        ([{"role": "assistant", "content": [{"type": "refusal"}]}], "messages[0].content[0].refusal"),
    ],
)
def test_a_message_that_is_no_text_is_refused(messages, path):
    assert refusal(ChatBody, {"messages": messages}).violations[0].field == path


def test_null_is_as_good_as_absent():
    fields = {name: None for name in CompletionBody.model_fields if name != "prompt"}
    assert completion(**fields, tools=None, anything=None).n is None


@pytest.mark.parametrize(
    ("field", "value"), [("modalities", ["text", "audio"]), ("prompt_embeds", "a"), ("guided_whitespace_pattern", " ")]
)
def test_what_is_not_done_here_is_refused_and_never_ignored(field, value):
    error = refusal(ChatBody, {"messages": HELLO, field: value})
    assert [violation.field for violation in error.violations] == [field]
    assert error.message == f"{field} is not supported by this version"


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low", "modalities": ["text"], "response_format": {"type": "text"}},
        {"store": True, "service_tier": "auto", "tools": [], "tool_choice": "none", "parallel_tool_calls": True},
        {"continue_final_message": False, "spaces_between_special_tokens": True, "top_logprobs": 0},
        {"length_penalty": 1.0, "early_stopping": False},
        {"store": False, "service_tier": "flex", "metadata": {"a": "b"}, "user": "u"},
        {"stream": True, "stream_options": {"include_obfuscation": False}},
        {"stream_options": {}},
        {"max_tokens": 5, "max_completion_tokens": 6},
        {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
        {"functions": [{"name": "f"}], "function_call": "none"},
        {"tools": [TOOL, {"type": "web_search", "search_context_size": "low"}]},
        {"tools": [TOOL | {"more": 1}], "stream": True, "stream_options": {"include_tokens": True}},
        {"messages": [*HELLO, {"role": "assistant", "content": None}, *HELLO]},
        {"messages": [*HELLO, CALLED, {"role": "tool", "tool_call_id": "c", "content": None}]},
        {"messages": [{"role": "assistant", "content": "a", "provider_specific_fields": {"refusal": None}}, *HELLO]},
        {"messages": [HELLO[0] | dict.fromkeys(("id", "timestamp", "metadata", "phase", "reasoning_details"), "a")]},
        {"guided_json": {"type": "object"}, "structured_outputs": {"json": {"type": "object"}}},
        {"stream": True, "prompt_logprobs": 1, "vllm_xargs": {"a": 1}},
        {"messages": [HELLO[0] | {"cache_control": {"type": "ephemeral"}}]},
        {"messages": [HELLO[0] | {"content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}]},
    ],
)
def test_a_hint_without_effect_is_accepted(fields):
    chat(**fields)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom"}]}, "tools[0].custom"),
        ({"tools": [LARK], "tool_choice": "required"}, "tools[0].custom.format.syntax"),
        ({"tools": [TOOL], "enable_thinking": True, "chat_template_kwargs": {"enable_thinking": 0}}, "enable_thinking"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "allowed_tools"}}, "tool_choice.allowed_tools"),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [TOOL]}}},
            "tool_choice.allowed_tools.mode",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        (
            {"tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{"type": "mcp"}]}}},
            "tool_choice.allowed_tools.tools[0].type",
        ),
        ({"tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({"tools": [TOOL], "tool_choice": 7}, "tool_choice"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"functions": [{"name": "f"}], "tool_choice": "none"}, "functions"),
        ({"logits_processors": [1], "": "none"}, "logits_processors"),
        ({"early_stopping": True}, "early_stopping"),
        ({"early_stopping": "never"}, "early_stopping"),
        ({"top_logprobs": 2, "logprobs": False}, "top_logprobs"),
        ({"add_special_tokens": True}, "add_special_tokens"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream_options": {"include_usage": False}, "stream": False}, "stream_options"),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice.type"),
        ({"tool_choice": {"type": "custom"}}, "tool_choice.custom"),
        ({"length_penalty": 2.0}, "length_penalty"),
        ({"priority": 2**70}, "priority"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields, param):
    assert refusal(ChatBody, {"messages": HELLO} | fields).violations[0].field == param


def test_a_byte_order_mark_before_a_body_says_nothing():
    assert parse(CompletionBody, b'\xef\xbb\xbf{"prompt": "a"}').prompt == "a"


def test_special_tokens_cannot_be_added_to_a_conversation_that_is_tokenized():
    body = {"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}
    with pytest.raises(InvalidArgument, match="add_special_tokens is true"):
        parse(TokenizeBody, body)


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (ChatBody, {"messages": [{"role": "user", "content": [{"type": "x"}] * 1000}]}),
        (ChatBody, {"messages": [{"role": "user", "content": "a", "audio": {"id": "x"}}] * 1000}),
    ],
)
def test_of_what_is_not_supported_no_more_is_named_than_somebody_reads(kind, body):
    with pytest.raises(InvalidArgument) as raised:
        parse(kind, body)
    assert len(raised.value.violations) == 16


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


def test_a_body_of_very_many_fields_is_refused_for_their_number():
    data = json.dumps({f"k{number}": None for number in range(2000)}).encode()
    with pytest.raises(QuireError) as caught:
        parse(CompletionBody, data)
    assert "2,000 fields; the max is 1,024" in caught.value.message
