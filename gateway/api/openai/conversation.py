"""The fields of a chat's conversation: messages, tools and arguments of the chat template, and their conversion."""

from collections.abc import Sequence
from typing import Annotated, Any

from pydantic import BaseModel, Field

from gateway.api.fields import TOOL_CHOICES, Strict, effort_arguments, make_tool
from gateway.request.violations import Violations, shortened
from gateway.types import ChatMessage
from quire.gateway.v1.generation_pb2 import TemplateOptions, Tool, ToolCall, ToolChoice
from quire.rpc.errors import invalid_field

_UNSUPPORTED = "is not supported by this version"
# `cache_control` is for prompt caches; Quire finds common prefixes by itself. The others are what OpenAI's client adds
# to answers, which are sent back: the index that a call had in a stream, and parsed content and arguments.
_HINTS = frozenset({"cache_control", "index", "parsed", "parsed_arguments"})
# Values with which other fields have no effect.
_SILENT = (None, [], "", {})
_ANSWER = "assistant"


class ContentPart(Strict):
    type: str
    text: str | None = None


class CalledFunction(Strict):
    """`arguments` is the text of a JSON object."""

    name: str
    arguments: str


class MessageToolCall(Strict):
    id: str
    type: str = "function"
    function: CalledFunction


class Message(Strict):
    """`tool_calls` and `reasoning` belong to an earlier answer; `tool_call_id` names the call whose result a message of
    the role tool is."""

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall] | None, Field(fail_fast=True)] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class FunctionDefinition(Strict):
    """`parameters` is a JSON schema. With `strict`, or without it, calls match the schema; false leaves calls that the
    model makes by itself unconstrained."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Strict):
    type: str
    function: FunctionDefinition | None = None


class FunctionName(Strict):
    name: str


class AllowedTools(Strict):
    """Some of the tools, by their names; `mode` is auto or required."""

    mode: str
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)]


class ToolChoiceObject(Strict):
    """`type` is function or allowed_tools, each with the field of that name."""

    type: str
    function: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ConversationFields(BaseModel):
    """The fields besides the messages from which the prompt of a chat is made."""

    tools: Annotated[list[ToolDefinition] | None, Field(fail_fast=True)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None


def check_conversation(violations: Violations, messages: Sequence[Message], body: ConversationFields) -> None:
    for position, message in enumerate(messages):
        if violations.are_enough:
            return
        _check_message(violations, f"messages[{position}]", message)
    for position, tool in enumerate(body.tools or ()):
        if violations.are_enough:
            return
        _check_tool(violations, f"tools[{position}]", tool)


def check_tool_choice(violations: Violations, choice: str | ToolChoiceObject | None) -> None:
    match choice:
        case None:
            return
        case str():
            if choice not in TOOL_CHOICES:
                known = ", ".join(TOOL_CHOICES)
                violations.add("tool_choice", f'is "{shortened(choice)}"; it must be {known}, or an object')
        case ToolChoiceObject(type="function" | "allowed_tools"):
            _check_unknown(violations, "tool_choice", choice)
            if getattr(choice, choice.type) is None:
                violations.add(f"tool_choice.{choice.type}", "is missing")
            elif choice.type == "allowed_tools" and choice.allowed_tools is not None:
                _check_allowed_tools(violations, choice.allowed_tools)
        case _:
            violations.add("tool_choice.type", f'is "{shortened(choice.type)}"; it must be function or allowed_tools')


def _check_allowed_tools(violations: Violations, allowed: AllowedTools) -> None:
    path = "tool_choice.allowed_tools"
    _check_unknown(violations, path, allowed)
    if allowed.mode not in ("auto", "required"):
        violations.add(f"{path}.mode", f'is "{shortened(allowed.mode)}"; it must be auto or required')
    if not allowed.tools:
        violations.add(f"{path}.tools", "is empty; at least one tool is needed")
    for position, tool in enumerate(allowed.tools):
        if violations.are_enough:
            return
        _check_tool(violations, f"{path}.tools[{position}]", tool)


def chat_message(message: Message) -> ChatMessage:
    return ChatMessage(
        message.role,
        message_text(message),
        message.name or None,
        tool_calls=tuple(
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments)
            for call in message.tool_calls or ()
        ),
        tool_call_id=message.tool_call_id,
        reasoning=_reasoning(message) or None,
    )


def message_text(message: Message) -> str:
    """A message's content as one text for the template; each part begins a new line."""
    if isinstance(message.content, list):
        return "\n".join(part.text or "" for part in message.content)
    return message.content or ""


def tool_of(definition: ToolDefinition) -> Tool:
    """A tool of a checked body."""
    function = definition.function
    assert function is not None
    return make_tool(function.name, function.description, function.parameters, function.strict)


def tool_choice_of(choice: str | ToolChoiceObject | None) -> ToolChoice | None:
    """The choice of a checked body; None if it has none."""
    match choice:
        case str():
            return ToolChoice(mode=TOOL_CHOICES[choice])
        case ToolChoiceObject(type="function", function=FunctionName(name=name)):
            return ToolChoice(name=name)
        case ToolChoiceObject(allowed_tools=AllowedTools(mode=mode, tools=tools)):
            return ToolChoice(mode=TOOL_CHOICES[mode], allowed=[tool_of(each).name for each in tools])
    return None


def template_options(body: ConversationFields) -> TemplateOptions:
    """Raises InvalidArgument for an integer beyond all floats, as which arguments travel."""
    options = TemplateOptions()
    if body.add_generation_prompt is not None:
        options.add_generation_prompt = body.add_generation_prompt
    if body.continue_final_message is not None:
        options.continue_final_message = body.continue_final_message
    if arguments := effort_arguments(body.reasoning_effort) | (body.chat_template_kwargs or {}):
        try:
            options.arguments.update(arguments)
        except OverflowError:
            raise invalid_field("chat_template_kwargs", "has an integer of more than 1,024 bits") from None
    return options


def _check_message(violations: Violations, path: str, message: Message) -> None:
    _check_unknown(violations, path, message)
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            if violations.are_enough:
                return
            _check_part(violations, f"{path}.content[{number}]", part)
    elif message.content is None and not (message.role == _ANSWER and (message.tool_calls or _reasoning(message))):
        violations.add(f"{path}.content", "is missing; it must be a string or a list of text parts")
    for number, call in enumerate(message.tool_calls or ()):
        if violations.are_enough:
            return
        if call.type != "function":
            violations.add(f"{path}.tool_calls[{number}].type", f'is "{shortened(call.type)}"; it must be function')
        _check_unknown(violations, f"{path}.tool_calls[{number}]", call)
        _check_unknown(violations, f"{path}.tool_calls[{number}].function", call.function)


def _check_part(violations: Violations, path: str, part: ContentPart) -> None:
    if part.type != "text":
        violations.add(f"{path}.type", f'is "{shortened(part.type)}"; only "text" is supported')
        return
    _check_unknown(violations, path, part)
    if part.text is None:
        violations.add(f"{path}.text", "is missing")


def _check_tool(violations: Violations, path: str, tool: ToolDefinition) -> None:
    if tool.type != "function":
        violations.add(f"{path}.type", f'is "{shortened(tool.type)}"; only "function" is supported')
        return
    _check_unknown(violations, path, tool)
    if tool.function is None:
        violations.add(f"{path}.function", "is missing")
    else:
        _check_unknown(violations, f"{path}.function", tool.function)


def _check_unknown(violations: Violations, path: str, part: BaseModel) -> None:
    for name, value in (part.model_extra or {}).items():
        if value not in _SILENT and name not in _HINTS:
            violations.add(f"{path}.{name[:80]}", _UNSUPPORTED)


def _reasoning(message: Message) -> str | None:
    """vLLM's name and the newer one."""
    return message.reasoning_content if message.reasoning_content is not None else message.reasoning
