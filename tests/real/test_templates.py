"""Chat templates of public models: prompts equal the output of transformers, or are refused with the reason."""

import json
from collections.abc import Sequence
from typing import Any, cast

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from gateway.text.chat import ChatTemplate
from gateway.types import ChatMessage, ChatPrompt
from quire.gateway.v1.generation_pb2 import TemplateOptions, Tool, ToolCall
from quire.rpc.errors import InvalidArgument
from quire.runtime.settings import ConfigurationError
from tests.real.models import chat_template_files

pytestmark = pytest.mark.real

NUM_TEMPLATES, NUM_PARTS, NUM_SAMPLED = 786, 8, 90
SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}

# Quire renders their tools. transformers does not: they read `dict.from_keys`, and its stand-in for `dict` has none.
ONLY_OURS = {"ai-sage-GigaChat3.1-Audio-10B-A1.8B"}

USER, OTHER = ChatMessage("user", "Hello there"), ChatMessage("user", "And then?")
SYSTEM, ASSISTANT = ChatMessage("system", "Be brief."), ChatMessage("assistant", "Hi. What is it?")
WEATHER = Tool(
    name="get_weather",
    description="The weather of a place, in °C",
    parameters='{"type": "object", "properties": {"city": {"type": "string", "description": "Its name"}, '
    '"days": {"type": "integer"}}, "required": ["city"]}',
)
SEARCH = Tool(
    name="search",
    description="Finds documents",
    parameters='{"type": "object", "properties": {"query": {"type": "array", "items": {"enum": ["ä", "<b>", "\\"q"]}}, '
    '"options": {"type": "object", "properties": {"limit": {"type": ["integer", "null"]}}}}}',
)
CALL = ToolCall(id="abcdefghi", name="get_weather", arguments='{"city": "Zürich \\"7\\"", "days": 2}')
SECOND = ToolCall(id="bcdefghij", name="search", arguments='{"query": ["<b>"], "options": {"limit": null}}')
EMPTY = ToolCall(id="cdefghijk", name="search", arguments="{}")
RESULT = ChatMessage("tool", '{"temperature": 21.5}', tool_call_id="abcdefghi")
CALLS = [USER, ChatMessage("assistant", "", tool_calls=[CALL]), RESULT]


def told(*messages: ChatMessage, tools: Sequence[Tool] = (), **options: Any) -> ChatPrompt:
    return ChatPrompt(messages, tools=tools, template_options=TemplateOptions(**options) if options else None)


CONVERSATIONS = {
    "a user": told(USER),
    "a system message": told(SYSTEM, USER),
    "a developer message": told(ChatMessage("developer", "Be brief."), USER),
    "turns": told(USER, ASSISTANT, OTHER),
    "turns after a system message": told(SYSTEM, USER, ASSISTANT, OTHER, ASSISTANT, USER),
    "no generation prompt": told(USER, ASSISTANT, OTHER, add_generation_prompt=False),
    "an answer at the end": told(USER, ASSISTANT),
    "a continued answer": told(USER, ChatMessage("assistant", "The answer is"), continue_final_message=True),
    "a continued space": told(SYSTEM, USER, ChatMessage("assistant", "It is "), continue_final_message=True),
    "other scripts": told(SYSTEM, ChatMessage("user", "Zoë 你好 👩‍👩‍👧 שלום e\u0301 \u00a0\u2028 &<>'\"")),
    "space": told(ChatMessage("user", "\n  a\n\n\tb  \n"), ChatMessage("assistant", " c \n"), OTHER),
    "marks": told(ChatMessage("user", "{{ 7 * 7 }} <|im_end|> [/INST] </think> {% if x %}"), ASSISTANT, OTHER),
    "an empty question": told(ChatMessage("user", "")),
    "an empty system message": told(ChatMessage("system", ""), USER),
    "an empty answer": told(USER, ChatMessage("assistant", ""), OTHER),
    "two questions": told(USER, OTHER),
    "a name": told(ChatMessage("user", "Hello", name="ann"), ASSISTANT, OTHER),
    "a tool": told(USER, tools=[WEATHER]),
    "tools and a system message": told(SYSTEM, USER, tools=[WEATHER, SEARCH]),
    "a result": told(*CALLS, tools=[WEATHER]),
    "a result, an answer and a question": told(SYSTEM, *CALLS, ASSISTANT, OTHER, tools=[WEATHER, SEARCH]),
    "two calls with a text": told(
        USER,
        ChatMessage("assistant", "I look.", tool_calls=[CALL, SECOND]),
        *(RESULT, ChatMessage("tool", "none ü", tool_call_id="bcdefghij")),
        tools=[WEATHER, SEARCH],
    ),
    "a call without arguments": told(
        *(USER, ChatMessage("assistant", "", tool_calls=[EMPTY])),
        ChatMessage("tool", "", tool_call_id="cdefghijk"),
        tools=[SEARCH],
    ),
    "reasoning": told(USER, ChatMessage("assistant", "Hi.", reasoning="They greet.\nI greet."), OTHER),
    "reasoning before a call": told(
        USER, ChatMessage("assistant", "", reasoning="I look.", tool_calls=[CALL]), RESULT, tools=[WEATHER]
    ),
}


def rendered_by_transformers(source: str, prompt: ChatPrompt, in_parts: bool) -> list[str]:
    """All renderings that the template accepts: contents as texts or as parts, arguments as objects and as texts."""
    options = prompt.template_options or TemplateOptions()
    continues = options.continue_final_message
    begins = options.add_generation_prompt if options.HasField("add_generation_prompt") else not continues
    tools = [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": json.loads(tool.parameters),
            },
        }
        for tool in prompt.tools
    ]
    found: list[str] = []
    calls = {call.id: call.name for message in prompt.messages for call in message.tool_calls}
    for in_texts, is_named in ((False, False), (True, False), (False, True)):
        if is_named and found:
            # A result has its tool's name only where the template refuses it without one.
            break
        messages = [_message(message, source, in_parts, in_texts) for message in prompt.messages]
        for each in messages if is_named else ():
            if each["role"] == "tool":
                each["name"] = calls[each["tool_call_id"]]
        try:
            rendered: Any = cast(Any, render_jinja_template)(
                [messages],
                tools or None,
                chat_template=source,
                add_generation_prompt=begins,
                continue_final_message=continues,
                **SPECIAL_TOKENS,
            )
        except Exception:
            continue
        found += rendered[0]
    return found


def _message(message: ChatMessage, source: str, in_parts: bool, in_texts: bool) -> dict[str, Any]:
    role = "system" if message.role == "developer" and "developer" not in source else message.role
    fields: dict[str, Any] = {
        "role": role,
        "content": [{"type": "text", "text": message.content}] if in_parts else message.content,
    }
    for name in ("name", "tool_call_id"):
        if (value := getattr(message, name)) is not None:
            fields[name] = value
    if message.reasoning:
        fields |= {"reasoning_content": message.reasoning, "reasoning": message.reasoning}
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {
                    "name": call.name,
                    "arguments": call.arguments if in_texts else json.loads(call.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return fields


def _has_lost_calls(prompt: ChatPrompt, expected: list[str], text: str) -> bool:
    """Whether `text` has all calls, and each of transformers' prompts lacks one: of a template that leaves calls out or
    refuses them, all or all but the first one of a message."""
    names = [call.name for message in prompt.messages for call in message.tool_calls]
    has_all = bool(names) and all(name in text for name in names)
    return has_all and all(any(each.count(name) < text.count(name) for name in names) for each in expected)


def differences(name: str, source: str) -> list[str]:
    """Differences between the prompts of all conversations and transformers' prompts."""
    plain, in_parts = (rendered_by_transformers(source, CONVERSATIONS["a user"], each) for each in (False, True))
    # Some templates for images leave out a text that is not a part.
    takes_parts = not any(USER.content in text for text in plain) and any(USER.content in text for text in in_parts)
    try:
        template = ChatTemplate(source, SPECIAL_TOKENS)
    except ConfigurationError as error:
        return [f"{name}: {error}"] if plain or in_parts else []
    wrong: list[str] = []
    for title, prompt in CONVERSATIONS.items():
        expected = rendered_by_transformers(source, prompt, takes_parts)
        try:
            text = template.render(prompt)
        except InvalidArgument as error:
            lacks = ("tools" not in template.variables and prompt.tools) or "tool_calls" not in source
            if expected and not (error.reason == "NO_TOOLS" and lacks):
                wrong.append(f"{name}, {title}: refused ({error}), but transformers renders {expected[0]!r:.200}")
            continue
        if text not in expected and (expected or name not in ONLY_OURS) and not _has_lost_calls(prompt, expected, text):
            shown = next((f"{each!r:.300}" for each in expected), "refuses it")
            wrong.append(f"{name}, {title}: {text!r:.300}; transformers: {shown}")
    return wrong


@pytest.mark.parametrize("part", [*range(NUM_PARTS), pytest.param(None, marks=pytest.mark.extended, id="sample")])
def test_prompts_equal_those_of_transformers(part: int | None) -> None:
    files = list(chat_template_files().items())
    assert (len(files), len(CONVERSATIONS)) == (NUM_TEMPLATES, 25)
    chosen = files[:: len(files) // NUM_SAMPLED] if part is None else files[part::NUM_PARTS]
    wrong = [line for name, file in chosen for line in differences(name, file.read_text(encoding="utf-8"))]
    assert not wrong, f"{len(wrong)} prompts:\n" + "\n".join(wrong[:40])
