"""Conversion of response bodies to requests, and refused fields."""

import json

import pytest

from gateway.api.fields import parse
from gateway.api.responses.read_response import ResponseBody, conversation_of, names_of, options_of
from gateway.types import ChatMessage, ChatPrompt, RequestOptions
from quire.common.v1.common_pb2 import Constraint
from quire.gateway.v1.generation_pb2 import Tool, ToolCall, ToolChoice, ToolChoiceMode
from quire.rpc.errors import InvalidArgument
from tests.support.openai_bodies import BODY_LIMITS, STRICT_LIMITS

TOOL = {"type": "function", "name": "look", "description": "Looks.", "parameters": {"type": "object"}, "strict": True}


def chat_of(options: RequestOptions) -> ChatPrompt:
    assert isinstance(options.prompt, ChatPrompt)
    return options.prompt


async def read(limits=BODY_LIMITS, **fields):
    return await parse(ResponseBody, json.dumps({"input": "hello"} | fields).encode(), limits)


async def options(**fields):
    body = await read(**fields)
    return options_of(body, conversation_of(body, ()).prompt, "resp_1")


async def refusal(**fields) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as raised:
        await read(STRICT_LIMITS, **fields)
    return raised.value


async def test_items_are_a_conversation():
    items = [
        {"role": "developer", "content": "Be kind."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
         "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}]},
        {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "look", "arguments": "{}",
         "status": "completed"},
        {"type": "function_call_output", "call_id": "call_1", "output": "here"},
        {"type": "reasoning", "id": "rs_2", "summary": [{"type": "summary_text", "text": "so"}],
         "encrypted_content": None},
        {"role": "assistant", "content": "Here."},
        {"role": "user", "content": "Thanks."},
    ]  # fmt: skip
    body = await read(input=items)
    conversation = conversation_of(body, ())
    assert conversation.prompt == [
        ChatMessage("system", "Be kind."),
        ChatMessage("user", "Where?"),
        ChatMessage(
            "assistant", "I look.", tool_calls=(ToolCall(id="call_1", name="look", arguments="{}"),), reasoning="hm"
        ),
        ChatMessage("tool", "here", tool_call_id="call_1"),
        ChatMessage("assistant", "Here.", reasoning="so"),
        ChatMessage("user", "Thanks."),
    ]
    assert names_of(body, conversation)("messages[3].content") == "input[5]"
    assert names_of(body, conversation)("messages") == "input"


async def test_parameters_become_those_of_the_contract():
    made = await options(
        temperature=0.5, top_p=0.25, max_output_tokens=7, include=["message.output_text.logprobs"], top_logprobs=2,
        tools=[TOOL], tool_choice={"type": "function", "name": "look"}, parallel_tool_calls=False, model="",
        reasoning={"effort": "low", "summary": "auto"}, text={"format": {"type": "json_schema", "name": "n",
        "schema": {"type": "object"}, "strict": True}, "verbosity": "low"},
    )  # fmt: skip
    assert (made.sampling.temperature, made.sampling.top_p, made.stopping.max_tokens) == (0.5, 0.25, 7)
    assert (made.output.logprobs, made.model) == (2, None)
    prompt = chat_of(made)
    assert list(prompt.tools) == [Tool(name="look", description="Looks.", parameters='{"type":"object"}', strict=True)]
    assert prompt.tool_choice == ToolChoice(name="look")
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "look"}]}
    some = chat_of(await options(tools=[TOOL], tool_choice=allowed))
    assert some.tool_choice == ToolChoice(mode=ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED, allowed=["look"])
    assert not prompt.parallel_tool_calls
    assert prompt.response_format == Constraint(json_schema='{"type":"object"}')
    assert dict(prompt.template_options.arguments) == {"reasoning_effort": "low"}


async def test_hints_and_values_that_change_nothing_are_accepted():
    made = await options(
        user="me", metadata={"a": "b"}, service_tier="auto", prompt_cache_key="k", safety_identifier="s",
        background=False, truncation="disabled", store=False, stream_options={"include_obfuscation": False},
        include=["reasoning.encrypted_content"], max_tool_calls=3, conversation=None, tool_choice="auto",
        text={"format": {"type": "text"}},
    )  # fmt: skip
    assert chat_of(made).response_format is None
    assert not made.output.HasField("logprobs")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "web_search_call"}]}, "input[0].type"),
        ({"input": [{"type": "function_call", "name": "a", "arguments": "{}"}]}, "input[0].call_id"),
        ({"input": [{"role": "user", "content": "a", "bad": 1}]}, "input[0].bad"),
        ({"background": True, "store": False}, "store"),
        ({"background": True, "include": ["message.output_text.logprobs"]}, "include"),
        ({"background": True, "stream": True, "durable": True}, "durable"),
        ({"durable": True}, "durable"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"truncation": "some"}, "truncation"),
        ({"reasoning": {"effort": "x" * 65}}, "reasoning.effort"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tools": [TOOL | {"defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tool_choice": "any"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "other"}, "tools": [TOOL]}, "tool_choice.name"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "none", "tools": [TOOL]}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "tools": [TOOL]}}, "tool_choice.mode"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "mcp"}]}}, "tool_choice"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"temperature": "hot"}, "temperature"),
        ({"invented": 1}, "invented"),
        ({"input": None}, "input"),
        ({"include": ["reasoning.encrypted_content"] * 33}, "include"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice.tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "mcp"}}, "tool_choice.type"),
        ({"metadata": {str(each): "" for each in range(17)}}, "metadata"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
    ],
)
async def test_what_is_wrong_is_refused_by_its_name(fields, param):
    error = await refusal(**fields)
    assert error.violations[0].field == param
    assert param in error.message


async def test_too_many_items_and_parts_are_refused_before_they_are_validated():
    items = [{"role": "user", "content": "a"}]
    assert "the max is 10,000" in (await refusal(input=items * 10_001)).message
    parts = [{"type": "input_text", "text": ""}] * 9000
    assert "the max is 8,192" in (await refusal(input=[{"role": "user", "content": parts}])).message
