"""Conversations of chats: what messages, tools and template options become, and how errors name them."""

import json

import pytest
from google.protobuf.json_format import MessageToDict

from gateway.api.openai.schemas import ChatBody, chat_names, chat_options
from gateway.text.chat import ChatTemplate
from gateway.types import ChatMessage, ChatPrompt
from quire.gateway.v1.generation_pb2 import (
    TOOL_CHOICE_MODE_AUTO,
    TOOL_CHOICE_MODE_REQUIRED,
    TemplateOptions,
    Tool,
    ToolCall,
    ToolChoice,
)
from quire.rpc.errors import InvalidArgument
from tests.support.openai_bodies import parse

HELLO = [{"role": "user", "content": "hello"}]


def prompt(**fields) -> ChatPrompt:
    found = chat_options(parse(ChatBody, {"messages": HELLO} | fields), "id").prompt
    assert isinstance(found, ChatPrompt)
    return found


def test_messages_keep_what_agents_send_back():
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    found = prompt(
        messages=[
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "n"},
            {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "r", "refusal": None},
            {"role": "assistant", "reasoning": "s"},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
            {"role": "tool", "content": "7", "tool_call_id": "c"},
        ]
    )
    assert found.messages == [
        ChatMessage("system", "a\nb", "n"),
        ChatMessage("assistant", "", tool_calls=(ToolCall(id="c", name="f", arguments='{"a": 1}'),), reasoning="r"),
        ChatMessage("assistant", "", reasoning="s"),
        ChatMessage("assistant", "No."),
        ChatMessage("tool", "7", tool_call_id="c"),
    ]


def test_tools_and_their_choice():
    function = {"name": "f", "description": "d", "parameters": {"type": "object"}, "strict": True}
    tools = [{"type": "function", "function": function}, {"type": "function", "function": {"name": "g"}}]
    found = prompt(tools=tools, tool_choice="required", parallel_tool_calls=False)
    assert found.tools == [Tool(name="f", description="d", parameters='{"type":"object"}', strict=True), Tool(name="g")]
    assert found.tool_choice == ToolChoice(mode=TOOL_CHOICE_MODE_REQUIRED)
    assert not found.parallel_tool_calls
    named = prompt(tools=tools, tool_choice={"type": "function", "function": {"name": "g"}})
    assert named.tool_choice == ToolChoice(name="g")
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    some = prompt(tools=tools, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
    assert some.tool_choice == ToolChoice(mode=TOOL_CHOICE_MODE_AUTO, allowed=["g"])
    assert prompt(tools=tools).tool_choice is None


def test_what_the_template_gets():
    assert prompt().template_options == TemplateOptions()
    options = prompt(
        chat_template_kwargs={"budget": 7, "deep": {"a": [True]}}, reasoning_effort="low", add_generation_prompt=False
    ).template_options
    assert options is not None
    arguments = {"budget": 7, "deep": {"a": [True]}, "reasoning_effort": "low"}
    assert MessageToDict(options.arguments) == arguments
    assert not options.add_generation_prompt
    without = prompt(reasoning_effort="none").template_options
    assert without is not None
    assert MessageToDict(without.arguments) == {"reasoning_effort": "none", "enable_thinking": False}
    asked = prompt(reasoning_effort="none", chat_template_kwargs={"enable_thinking": True}).template_options
    assert asked is not None
    assert MessageToDict(asked.arguments) == {"reasoning_effort": "none", "enable_thinking": True}


def test_the_template_gets_arguments_in_the_order_and_with_the_numbers_of_the_body():
    document = {"title": "b", "text": "a", "id": 2**60 + 1, "score": 1.0, "a": None}
    asked = prompt(documents=[document], chat_template_kwargs={"tool": {"name": "x", "description": "d", "at": {}}})
    template = ChatTemplate("{{ documents[0] | tojson }}{{ tool | tojson }}", {})
    expected = json.dumps(document) + '{"name": "x", "description": "d", "at": {}}'
    assert template.render(asked) == expected


def test_errors_name_the_fields_as_they_came():
    function = {"type": "function", "function": {"name": "f"}}
    tools = [function, function, {"type": "web_search"}, function]
    calls = [{"id": name, "type": "function", "function": {"name": "f"}} for name in "ab"]
    messages = [*HELLO, *HELLO, {"role": "assistant", "tool_calls": calls}]
    body = parse(ChatBody, {"messages": messages, "tools": tools})
    for field, name in {
        "tools[2].parameters": "tools[3].function.parameters",
        "tools[0].name": "tools[0].function.name",
        "tools": "tools",
        "messages[2].tool_calls[1].arguments": "messages[2].tool_calls[1].function.arguments",
        "messages[2].tool_call_id": "messages[2].tool_call_id",
        "tool_choice.name": "tool_choice.function.name",
        "tool_choice.allowed[1]": "tool_choice.allowed_tools.tools[1]",
        "template_options.arguments": "chat_template_kwargs",
        "template_options.arguments.a[b]": "chat_template_kwargs.a[b]",
        "template_options.continue_final_message": "continue_final_message",
    }.items():
        assert chat_names(body)(field) == name


def test_an_integer_that_no_template_can_get_is_refused():
    with pytest.raises(InvalidArgument) as caught:
        prompt(chat_template_kwargs={"deep": {"a": [10**400]}})
    assert [each.field for each in caught.value.violations] == ["chat_template_kwargs"]


def test_what_a_client_has_added_to_an_answer_has_no_effect():
    function = {"name": "f", "arguments": '{"a": 1}', "parsed_arguments": {"a": 1}}
    call = {"id": "c", "type": "function", "index": 1, "function": function}
    (found,) = prompt(messages=[{"role": "assistant", "content": "1", "parsed": 1, "tool_calls": [call]}]).messages
    assert found == ChatMessage("assistant", "1", tool_calls=(ToolCall(id="c", name="f", arguments='{"a": 1}'),))
