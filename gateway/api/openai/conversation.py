"""The fields of a conversation: messages, tools and arguments of the chat template, and their conversion."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, Field

from gateway.api import field_rule
from gateway.api.custom_tools import CustomDefinition, check_custom, custom_call, custom_tool
from gateway.api.field_rule import Part, Unread
from gateway.api.fields import TOOL_CHOICES, effort_arguments, make_tool
from gateway.api.generation_fields import ContentPart
from gateway.request.limits import MAX_TEMPLATE_LENGTH
from gateway.request.violations import Violations, shortened
from gateway.types import ChatMessage
from quire.gateway.v1.generation_pb2 import TemplateOptions, Tool, ToolCall, ToolChoice
from quire.rpc.errors import invalid_field

TOOL_TYPES = ("function", "custom")
_KNOWN_TYPES = " or ".join(TOOL_TYPES)
_ASSISTANT = "assistant"
# Roles whose messages may lack content: an answer may have only calls, and an answer or a tool result may be empty.
_MAY_BE_EMPTY = frozenset({_ASSISTANT, "tool", "function"})


class CalledFunction(Part):
    """A called function. `arguments` is a JSON object as text; null or an empty text means no arguments."""

    unread: ClassVar[Unread] = field_rule.CHAT_CALLED

    name: str
    arguments: str | None = None


class CalledCustom(Part):
    name: str
    input: str | None = None


class MessageToolCall(Part):
    """A tool call. `type` is function or custom, with the field of that name."""

    unread: ClassVar[Unread] = field_rule.CHAT_CALL

    id: str
    type: str = "function"
    function: CalledFunction | None = None
    custom: CalledCustom | None = None


class Message(Part):
    """A message. `tool_calls`, `reasoning` and `refusal` belong to an earlier answer; `tool_call_id` names the call
    whose result a message with the role tool is."""

    unread: ClassVar[Unread] = field_rule.CHAT_MESSAGE

    role: str
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[MessageToolCall] | None, Field(fail_fast=True)] = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None


class FunctionDefinition(Part):
    """A function. Calls match the JSON schema `parameters` if `strict` is true or absent; if it is false, only required
    calls do."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class ToolDefinition(Part):
    """A tool. `type` is function or custom, with the field of that name. Tools of other types, which OpenAI's server
    would run, are omitted."""

    unread: ClassVar[Unread] = field_rule.CHAT_TOOL

    type: str
    function: FunctionDefinition | None = None
    custom: CustomDefinition | None = None

    @property
    def is_left_out(self) -> bool:
        return self.type not in TOOL_TYPES

    @property
    def undeclared(self) -> Mapping[str, Any]:
        # Only the type of an omitted tool is read.
        return {} if self.is_left_out else super().undeclared


class FunctionName(Part):
    name: str


class AllowedTools(Part):
    """Some of the tools, by their names; `mode` is auto or required."""

    mode: str
    tools: Annotated[list[ToolDefinition], Field(fail_fast=True)]


class ToolChoiceObject(Part):
    """A tool choice. `type` is function, custom or allowed_tools, with the field of that name."""

    type: str
    function: FunctionName | None = None
    custom: FunctionName | None = None
    allowed_tools: AllowedTools | None = None


class ConversationFields(BaseModel):
    """The fields from which the prompt of a chat is made, in addition to the messages."""

    tools: Annotated[list[ToolDefinition] | None, Field(fail_fast=True)] = None
    chat_template: Annotated[str | None, Field(max_length=MAX_TEMPLATE_LENGTH)] = None
    documents: Annotated[list[dict[str, Any]] | None, Field(fail_fast=True)] = None
    enable_thinking: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: str | None = None


def check_conversation(
    violations: Violations, messages: Sequence[Message], body: ConversationFields, *, is_forced: bool = False
) -> None:
    """Adds violations for messages and tools. `is_forced` is whether the body requires a call."""
    for position, message in enumerate(messages):
        if violations.are_enough:
            return
        _check_message(violations, f"messages[{position}]", message)
    for position, tool in enumerate(body.tools or ()):
        if violations.are_enough:
            return
        path = f"tools[{position}].{tool.type}"
        if not tool.is_left_out and getattr(tool, tool.type) is None:
            violations.add(path, "is missing")
        if tool.type == "custom" and tool.custom is not None:
            check_custom(violations, path, tool.custom, is_forced=is_forced)
    kwargs = body.chat_template_kwargs or {}
    for name in ("documents", "enable_thinking"):
        asked = getattr(body, name)
        if asked is not None and kwargs.get(name, asked) != asked:
            violations.add(name, f"differs from chat_template_kwargs.{name}; set only one of them")


def left_out_tools(body: ConversationFields) -> dict[str, str]:
    """The types of omitted tools, by their paths."""
    tools = body.tools or ()
    return {f"tools[{place}].type": tool.type for place, tool in enumerate(tools) if tool.is_left_out}


def kept_tools(body: ConversationFields) -> list[str]:
    """The paths of the functions and custom tools that the model sees."""
    return [f"tools[{place}].{tool.type}" for place, tool in enumerate(body.tools or ()) if not tool.is_left_out]


def custom_tools(body: ConversationFields) -> list[CustomDefinition]:
    return [tool.custom for tool in body.tools or () if tool.type == "custom" and tool.custom is not None]


def check_tool_choice(violations: Violations, choice: str | ToolChoiceObject | None) -> None:
    match choice:
        case None:
            return
        case str():
            if choice not in TOOL_CHOICES:
                known = ", ".join(TOOL_CHOICES)
                violations.add("tool_choice", f'is "{shortened(choice)}"; it must be {known}, or an object')
        case ToolChoiceObject(type="function" | "custom" | "allowed_tools"):
            if getattr(choice, choice.type) is None:
                violations.add(f"tool_choice.{choice.type}", "is missing")
            elif choice.type == "allowed_tools" and choice.allowed_tools is not None:
                _check_allowed_tools(violations, choice.allowed_tools)
        case _:
            violations.add(
                "tool_choice.type", f'is "{shortened(choice.type)}"; it must be function, custom or allowed_tools'
            )


def _check_allowed_tools(violations: Violations, allowed: AllowedTools) -> None:
    path = "tool_choice.allowed_tools"
    if allowed.mode not in ("auto", "required"):
        violations.add(f"{path}.mode", f'is "{shortened(allowed.mode)}"; it must be auto or required')
    if not allowed.tools:
        violations.add(f"{path}.tools", "is empty; at least one tool is needed")
    for position, tool in enumerate(allowed.tools):
        if violations.are_enough:
            return
        if tool.is_left_out:
            violations.add(f"{path}.tools[{position}].type", f'is "{shortened(tool.type)}"; it must be {_KNOWN_TYPES}')
        elif getattr(tool, tool.type) is None:
            violations.add(f"{path}.tools[{position}].{tool.type}", "is missing")


def chat_message(message: Message) -> ChatMessage:
    return ChatMessage(
        message.role,
        message_text(message),
        message.name or None,
        tool_calls=tuple(map(_call_of, message.tool_calls or ())),
        tool_call_id=message.tool_call_id,
        # vLLM's older or newer name.
        reasoning=(message.reasoning if message.reasoning_content is None else message.reasoning_content) or None,
    )


def message_text(message: Message) -> str:
    """A message's content as one text for the template; each part starts a new line."""
    if isinstance(message.content, list):
        return "\n".join(part.text or part.refusal or "" for part in message.content)
    return message.content or message.refusal or ""


def _call_of(call: MessageToolCall) -> ToolCall:
    if call.custom is not None:
        return custom_call(call.id, call.custom.name, call.custom.input or "")
    assert call.function is not None, "a checked call has one of the two"
    return ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments or "")


def tools_of(fields: ConversationFields) -> list[Tool]:
    """The tools of a checked body, except omitted tools."""
    return [_tool_of(each) for each in fields.tools or () if not each.is_left_out]


def _tool_of(definition: ToolDefinition) -> Tool:
    if definition.type == "custom":
        assert definition.custom is not None
        return custom_tool(definition.custom)
    function = definition.function
    assert function is not None
    return make_tool(function.name, function.description, function.parameters, function.strict)


def tool_choice_of(choice: str | ToolChoiceObject | None) -> ToolChoice | None:
    """The tool choice of a checked body; None if it has none."""
    match choice:
        case str():
            return ToolChoice(mode=TOOL_CHOICES[choice])
        case ToolChoiceObject(type="function", function=FunctionName(name=name)):
            return ToolChoice(name=name)
        case ToolChoiceObject(type="custom", custom=FunctionName(name=name)):
            return ToolChoice(name=name)
        case ToolChoiceObject(allowed_tools=AllowedTools(mode=mode, tools=tools)):
            return ToolChoice(mode=TOOL_CHOICES[mode], allowed=[_tool_of(each).name for each in tools])
    return None


def template_options(body: ConversationFields) -> TemplateOptions:
    """Options of the chat template. Raises InvalidArgument for integers beyond the range of the message's floats."""
    options = TemplateOptions()
    if body.add_generation_prompt is not None:
        options.add_generation_prompt = body.add_generation_prompt
    if body.continue_final_message is not None:
        options.continue_final_message = body.continue_final_message
    own = {"enable_thinking": body.enable_thinking, "documents": body.documents}
    named = {name: value for name, value in own.items() if value is not None}
    if arguments := effort_arguments(body.reasoning_effort) | named | (body.chat_template_kwargs or {}):
        try:
            options.arguments.update(arguments)
        except OverflowError:
            raise invalid_field("chat_template_kwargs", "has an integer of more than 1,024 bits") from None
    return options


def _check_message(violations: Violations, path: str, message: Message) -> None:
    if isinstance(message.content, list):
        for number, part in enumerate(message.content):
            if violations.are_enough:
                return
            _check_part(violations, f"{path}.content[{number}]", part, message.role)
    elif message.content is None and message.role not in _MAY_BE_EMPTY:
        violations.add(f"{path}.content", "is missing; it must be a string or a list of text parts")
    for number, call in enumerate(message.tool_calls or ()):
        if violations.are_enough:
            return
        place = f"{path}.tool_calls[{number}]"
        if call.type not in TOOL_TYPES:
            violations.add(f"{place}.type", f'is "{shortened(call.type)}"; it must be {_KNOWN_TYPES}')
        elif getattr(call, call.type) is None:
            violations.add(f"{place}.{call.type}", "is missing")


def _check_part(violations: Violations, path: str, part: ContentPart, role: str) -> None:
    if part.type != "text" and (part.type, role) != ("refusal", _ASSISTANT):
        violations.add(f"{path}.type", f'is "{shortened(part.type)}"; only "text" is supported')
    elif getattr(part, part.type) is None:
        violations.add(f"{path}.{part.type}", "is missing")
