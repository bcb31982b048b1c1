"""Conversion of message bodies to requests, and refused fields."""

import json

import pytest

from gateway.api.anthropic.read_message import MessageBody, conversation_of, names_of, options_of, prompt_of
from gateway.api.fields import parse
from gateway.types import ChatMessage, ChatPrompt, RequestOptions
from quire.common.v1.common_pb2 import Constraint
from quire.gateway.v1.generation_pb2 import Tool, ToolCall, ToolChoice, ToolChoiceMode
from quire.rpc.errors import InvalidArgument
from tests.support.openai_bodies import BODY_LIMITS, STRICT_LIMITS

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"name": "look", "description": "Looks.", "input_schema": {"type": "object"}}


def chat_of(options: RequestOptions) -> ChatPrompt:
    assert isinstance(options.prompt, ChatPrompt)
    return options.prompt


async def read(limits=BODY_LIMITS, **fields):
    data = json.dumps({"messages": HELLO, "max_tokens": 8} | fields).encode()
    return await parse(MessageBody, data, limits)


async def options(**fields):
    body = await read(**fields)
    return options_of(body, prompt_of(body, conversation_of(body), is_told_to_think=True), "msg_1")


async def test_blocks_are_a_conversation():
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Where?", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Say it."},
        {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "abc"},
            {"type": "text", "text": "I look."},
            {"type": "tool_use", "id": "t1", "name": "look", "input": {"at": 1}},
            {"type": "tool_use", "id": "t2", "name": "look", "input": {}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "here"}]},
            {"type": "tool_result", "tool_use_id": "t2", "is_error": True},
            {"type": "text", "text": "And?"}]},
    ]  # fmt: skip
    body = await read(messages=messages, system=[{"type": "text", "text": "Be kind."}])
    conversation = conversation_of(body)
    calls = (ToolCall(id="t1", name="look", arguments='{"at":1}'), ToolCall(id="t2", name="look", arguments="{}"))
    assert conversation.prompt == [
        ChatMessage("system", "Be kind."),
        ChatMessage("user", "Where?\nSay it."),
        ChatMessage("assistant", "I look.", tool_calls=calls, reasoning="hm"),
        ChatMessage("tool", "here", tool_call_id="t1"),
        ChatMessage("tool", "", tool_call_id="t2"),
        ChatMessage("user", "And?"),
    ]
    paths = [names_of(body, conversation)(f"messages[{position}].content") for position in range(6)]
    assert paths == ["system", "messages[0]", "messages[2]", "messages[3]", "messages[3]", "messages[3]"]


async def test_parameters_become_those_of_the_contract():
    made = await options(
        temperature=0.5, top_p=0.25, top_k=3, stop_sequences=["x"], tools=[TOOL | {"strict": False}],
        tool_choice={"type": "any", "disable_parallel_tool_use": True}, thinking={"type": "disabled"},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip
    assert (made.sampling.temperature, made.sampling.top_p, made.sampling.top_k) == (0.5, 0.25, 3)
    assert (made.stopping.max_tokens, list(made.stopping.stop)) == (8, ["x"])
    prompt = chat_of(made)
    assert list(prompt.tools) == [Tool(name="look", description="Looks.", parameters='{"type":"object"}', strict=False)]
    assert prompt.tool_choice == ToolChoice(mode=ToolChoiceMode.TOOL_CHOICE_MODE_REQUIRED)
    assert not prompt.parallel_tool_calls
    assert chat_of(await options(tools=[TOOL], tool_choice={"type": "auto"})).parallel_tool_calls
    assert prompt.response_format == Constraint(json_schema='{"type":"object"}')
    assert dict(prompt.template_options.arguments) == {"enable_thinking": False, "reasoning_effort": "low"}


async def test_the_model_sees_the_tools_of_the_end_of_the_conversation():
    deferred = [TOOL | {"name": name, "defer_loading": True} for name in ("found", "added", "hidden")]
    results = [{"type": "tool_result", "tool_use_id": "t", "content": [
        {"type": "text", "text": "Found:"}, {"type": "tool_reference", "tool_name": "found"},
        {"type": "tool_reference", "tool_name": "unknown"}]}]  # fmt: skip
    changes = [
        {"type": "tool_addition", "tool": {"type": "tool_reference", "name": "added"}},
        {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "look"}},
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": TOOL | {"name": "new"}}},
    ]
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]}
    messages = [*HELLO, called, {"role": "user", "content": results}, {"role": "system", "content": changes}]
    prompt = chat_of(await options(tools=[TOOL, *deferred], messages=messages))
    assert [tool.name for tool in prompt.tools] == ["found", "added", "new"]
    assert [(each.role, each.content) for each in prompt.messages] == [
        ("user", "hello"), ("assistant", ""), ("tool", "Found:\nfound\nunknown"),
    ]  # fmt: skip
    assert [tool.name for tool in chat_of(await options(tools=[TOOL, *deferred])).tools] == ["look"]


async def test_a_last_message_of_the_assistant_is_continued():
    made = await options(messages=[*HELLO, {"role": "assistant", "content": "The answer is"}])
    assert chat_of(made).template_options.continue_final_message
    assert not chat_of(made).template_options.add_generation_prompt
    assert not chat_of(await options()).template_options.ListFields()


@pytest.mark.parametrize(
    ("thinking", "is_told", "arguments"),
    [
        ("enabled", True, {"enable_thinking": True}),
        ("enabled", False, {}),
        ("disabled", False, {"enable_thinking": False}),
        ("adaptive", True, {}),
    ],
)
async def test_a_model_is_told_to_think_where_its_template_hears_it(thinking, is_told, arguments):
    body = await read(thinking={"type": thinking})
    prompt = prompt_of(body, conversation_of(body), is_told_to_think=is_told)
    assert dict(prompt.template_options.arguments) == arguments


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0].type"),

        ({"messages": [{"role": "user", "content": [{"type": "thinking", "thinking": ""}]}]},
         "messages[0].content[0].type"),


        ({"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a",
          "content": [{"type": "image"}]}]}]}, "messages[0].content[0].content[0].type"),

        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools[0].type"),
        ({"tools": [{"name": "a"}]}, "tools[0].input_schema"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"tool_choice": {"type": "tool", "name": "other"}, "tools": [TOOL]}, "tool_choice.name"),

        ({"thinking": {"type": "between_tools"}}, "thinking.type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format.type"),
        ({"container": "c"}, "container"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"mcp_servers": [{}]}, "mcp_servers"),
        ({"invented": 1}, "invented"),
        ({"messages": [{"role": "user", "content": 3}]}, "messages[0].content"),
        ({"messages": [{"role": "system", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "user", "content": [
            {"type": "tool_removal", "tool": {"type": "tool_reference", "name": "a"}}]}]},
         "messages[0].content[0].type"),
        ({"tools": [TOOL | {"defer_loading": True}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_refused_by_its_name(fields, param):
    with pytest.raises(InvalidArgument) as raised:
        await read(STRICT_LIMITS, **fields)
    assert raised.value.violations[0].field == param


async def test_names_of_the_validator_are_those_of_the_body():
    tools = [TOOL, TOOL | {"name": "listen"}]
    body = await read(thinking={"type": "enabled", "budget_tokens": 1024}, tools=tools)
    conversation = conversation_of(body)
    names = {
        "stopping.max_tokens": "max_tokens",
        "stopping.stop[2]": "stop_sequences[2]",
        "stopping.stop": "stop_sequences",
        "sampling.top_k": "top_k",
        "tools[1].parameters": "tools[1].input_schema",
        "response_format.json_schema": "output_config.format",
        "template_options.arguments.enable_thinking": "thinking",
        "template_options.arguments.reasoning_effort": "output_config.effort",
        "tools[1].parameters.type": "tools[1].input_schema.type",
        "tool_choice.mode": "tool_choice.type",
        "messages": "messages",
    }
    assert {field: names_of(body, conversation)(field) for field in names} == names


async def test_hints_are_accepted():
    await options(context_management={"edits": []}, invented=1, tools=[{"type": "web_search_20250305", "name": "w"}])
    await options(
        metadata={"user_id": "me"}, service_tier="auto", mcp_servers=[],
        thinking={"type": "adaptive", "display": "updates"},
        cache_control={"type": "ephemeral"}, tools=[TOOL | {"eager_input_streaming": True, "type": "custom"}],
    )  # fmt: skip
