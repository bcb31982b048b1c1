"""Fields of other servers that change the text: each is read, or refused by its name."""

import json
from collections.abc import Awaitable
from typing import Any

import pytest

from gateway.api.anthropic.read_message import MessageBody
from gateway.api.fields import parse
from gateway.api.generation_fields import CompletionBody
from gateway.api.openai.schemas import ChatBody
from gateway.api.other_servers import INSTEAD, UNREAD
from gateway.api.responses.read_response import ResponseBody
from quire.rpc.errors import InvalidArgument
from tests.support.openai_bodies import BODY_LIMITS

HELLO = [{"role": "user", "content": "hello"}]
BODIES: list[tuple[Any, dict[str, Any]]] = [
    (CompletionBody, {"prompt": "a"}),
    (ChatBody, {"messages": HELLO}),
    (ResponseBody, {"input": "a"}),
    (MessageBody, {"messages": HELLO, "max_tokens": 1}),
]
# Fields that completions and chats read and that change no text of another API that ignores them: the request itself,
# how it is served, and what the answer shows of it.
NO_TEXT = {
    *("prompt", "messages", "model", "tools", "tool_choice", "parallel_tool_calls", "temperature", "top_p", "top_k"),
    *("stream", "stream_options", "durable", "priority", "request_id", "nvext", "cache_salt", "prediction", "suffix"),
    *("logprobs", "top_logprobs", "prompt_logprobs", "logprob_token_ids", "return_token_ids", "include_metrics"),
    *("return_tokens_as_token_ids", "include_reasoning", "echo"),
    # Each only changes what another field does.
    *("length_penalty", "early_stopping", "truncation_side", "add_special_tokens", "add_generation_prompt"),
    *("guided_decoding_disable_any_whitespace", "guided_decoding_backend", "reasoning_effort"),
}


async def refused(parsing: Awaitable[Any]) -> dict[str, str]:
    """The fields that a body is refused for, and why."""
    try:
        await parsing
    except InvalidArgument as error:
        return {violation.field: violation.description for violation in error.violations}
    return {}


@pytest.mark.parametrize(("kind", "body"), BODIES, ids=lambda each: getattr(each, "__name__", ""))
async def test_each_is_read_or_refused_by_its_name_unless_its_value_turns_it_off(kind, body):
    unread = {name: values for name, values in UNREAD.items() if name not in kind.model_fields}
    unread = {name: values for name, values in unread.items() if name not in kind.unread.refused}
    assert len(unread) > 70
    for name, values in unread.items():
        found = await refused(parse(kind, json.dumps(body | {name: "certainly"}).encode(), BODY_LIMITS))
        assert found.keys() == {name}
        assert INSTEAD.get(name, "is not supported") in found[name]
        for value in (None, *values):
            assert not await refused(parse(kind, json.dumps(body | {name: value}).encode(), BODY_LIMITS)), (name, value)


async def test_a_number_turns_off_as_an_integer_and_as_a_float_and_true_is_not_one():
    bodies = [{"typical_p": 1.0}, {"mirostat": 0.0}, {"n_cmpl": True}, {"return_full_text": 0}]
    found = [
        await refused(parse(CompletionBody, json.dumps({"prompt": "a"} | each).encode(), BODY_LIMITS))
        for each in bodies
    ]
    assert [[*each] for each in found] == [[], [], ["n_cmpl"], []]


async def test_constraints_and_limits_in_nvext_are_refused_and_hints_are_not():
    nvext = {"guided_json": {}, "ignore_eos": True, "top_k": -1, "agent_hints": {"speculative": True}}
    found = await refused(parse(ChatBody, json.dumps({"messages": HELLO, "nvext": nvext}).encode(), BODY_LIMITS))
    assert found.keys() == {"nvext.guided_json", "nvext.ignore_eos"}
    assert all("in the body itself" in why for why in found.values())


def test_what_completions_and_chats_read_is_refused_elsewhere_or_changes_no_text():
    assert {*CompletionBody.model_fields, *ChatBody.model_fields} - UNREAD.keys() == NO_TEXT
