"""The fields and types of request bodies, their conversion to requests of the generator, and the names of its fields in
the bodies. The validator checks ranges, and `field_rule` has the fields that are not read. docs/openai.md lists all
fields.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, cast

from pydantic import BaseModel, Field, TypeAdapter

from gateway.api import field_rule
from gateway.api.constraint_fields import check_constraints, constraint_of
from gateway.api.custom_tools import CustomDefinition, check_custom, custom_call, custom_tool
from gateway.api.field_rule import FieldRule, Part, Unread
from gateway.api.fields import AT_FIRST_USE, TOOL_CHOICES, Names, effort_arguments, make_tool, numbered
from gateway.api.generation_fields import (
    Body,
    CompletionBody,
    ContentPart,
    GenerationBody,
    ListOf,
    check_generation,
    generation_options,
    names_of,
)
from gateway.request.limits import MAX_TEMPLATE_LENGTH
from gateway.request.violations import Violations, shortened
from gateway.types import ChatMessage, ChatPrompt, Clamp, Prompt, RequestOptions, TextPrompt, TokenPrompt
from quire.gateway.v1.generation_pb2 import TemplateOptions, Tool, ToolCall, ToolChoice
from quire.rpc.errors import invalid_field

TOOL_TYPES = ("function", "custom")
_KNOWN_TYPES = " or ".join(TOOL_TYPES)
_ASSISTANT = "assistant"
# Roles whose messages may lack content: an answer may have only calls, and an answer or a tool result may be empty.
_MAY_BE_EMPTY = frozenset({_ASSISTANT, "tool", "function"})
_NO_SPECIAL_TOKENS = "add_special_tokens", "is true; in a chat only the chat template writes special tokens"


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


_MESSAGES = TypeAdapter(list[Message], config=AT_FIRST_USE)


class ChatBody(GenerationBody, ConversationFields):
    api: ClassVar[str] = "chat"
    unread: ClassVar[Unread] = field_rule.CHAT
    entries = _MESSAGES
    union_types: ClassVar[Mapping[str, str]] = {
        **Body.union_types,
        "tool_choice": 'a string, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}',
    }

    messages: ListOf[Message]
    tool_choice: str | ToolChoiceObject | None = None
    parallel_tool_calls: bool | None = None
    echo: bool | None = None
    include_reasoning: bool | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None

    @property
    def undeclared(self) -> Mapping[str, Any]:
        fields = super().undeclared
        # With function_call none, functions have no effect.
        is_silent = fields.get("function_call") == "none"
        return {name: value for name, value in fields.items() if name != "functions"} if is_silent else fields

    @property
    def requires_call(self) -> bool:
        """Whether the answer must be a call."""
        choice = self.tool_choice
        if isinstance(choice, ToolChoiceObject):
            return choice.allowed_tools is None or choice.allowed_tools.mode == "required"
        return choice == "required"

    def check(self, violations: Violations, rule: FieldRule) -> None:
        check_generation(violations, self)
        if self.top_logprobs and not self.logprobs:
            violations.add("top_logprobs", "is set; it has an effect only if logprobs is true")
        check_tool_choice(violations, self.tool_choice)
        check_constraints(violations, self)
        check_conversation(violations, self.messages, self, is_forced=self.requires_call)
        if self.add_special_tokens:
            violations.add(*_NO_SPECIAL_TOKENS)
        rule.leave_out(violations, self.api, left_out_tools(self))


class TokenizeBody(Body, ConversationFields):
    """Either a prompt or messages."""

    api: ClassVar[str] = "tokens"
    entries = _MESSAGES

    prompt: str | None = None
    messages: ListOf[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self, violations: Violations, rule: FieldRule) -> None:
        check_conversation(violations, self.messages or [], self)
        if self.messages is not None and self.add_special_tokens:
            violations.add(*_NO_SPECIAL_TOKENS)
        rule.leave_out(violations, self.api, left_out_tools(self))


class DetokenizeBody(Body):
    api: ClassVar[str] = "tokens"

    tokens: ListOf[int]


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


def _template_arguments(body: ConversationFields) -> dict[str, Any]:
    own = {"enable_thinking": body.enable_thinking, "documents": body.documents}
    named = {name: value for name, value in own.items() if value is not None}
    return effort_arguments(body.reasoning_effort) | named | (body.chat_template_kwargs or {})


def template_options(body: ConversationFields) -> TemplateOptions:
    """Options of the chat template. Raises InvalidArgument for integers beyond the range of the message's floats."""
    options = TemplateOptions()
    if body.add_generation_prompt is not None:
        options.add_generation_prompt = body.add_generation_prompt
    if body.continue_final_message is not None:
        options.continue_final_message = body.continue_final_message
    if arguments := _template_arguments(body):
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


def completion_prompts(body: CompletionBody) -> list[Prompt]:
    """The prompts of a completion; a list of numbers is one prompt."""
    prompt = body.prompt
    if prompt is None:
        return []
    add_special_tokens = body.add_special_tokens is not False
    if isinstance(prompt, str):
        return [TextPrompt(prompt, add_special_tokens)]
    if not prompt or isinstance(prompt[0], int):
        return [TokenPrompt(cast(list[int], prompt))]
    return [TextPrompt(each, add_special_tokens) if isinstance(each, str) else TokenPrompt(each) for each in prompt]


def chat_options(body: ChatBody, request_id: str) -> RequestOptions:
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    prompt = dataclasses.replace(
        chat_prompt(body.messages, body),
        tool_choice=tool_choice_of(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls is not False,
        response_format=constraint_of(body),
    )
    return generation_options(body, prompt, request_id, max_tokens, logprobs, body.prompt_logprobs, Clamp.AS_SET)


def chat_prompt(messages: Sequence[Message], fields: ConversationFields) -> ChatPrompt:
    return ChatPrompt(
        [chat_message(each) for each in messages],
        tools=[_tool_of(each) for each in fields.tools or () if not each.is_left_out],
        template_options=template_options(fields),
        template_arguments=_template_arguments(fields),
        template=fields.chat_template,
    )


def chat_names(body: ChatBody) -> Names:
    """The names of the validator's fields in the body of a chat."""
    names = names_of(body)
    begins = {
        **names.begins,
        **numbered("tools", kept_tools(body)),
        **_names_of_calls(body.messages),
        "output.logprobs": "top_logprobs",
        "tool_choice.name": "tool_choice.function.name",
        "tool_choice.mode": "tool_choice",
        "tool_choice.allowed": "tool_choice.allowed_tools.tools",
        "template_options.arguments": "chat_template_kwargs",
    }
    if body.max_completion_tokens is not None:
        begins["stopping.max_tokens"] = "max_completion_tokens"
    own = (name for name in ("documents", "enable_thinking") if getattr(body, name) is not None)
    return Names(begins, {**names.whole, **{f"template_options.arguments.{name}": name for name in own}})


def _names_of_calls(messages: Sequence[Message]) -> dict[str, str]:
    """Names of the fields of earlier calls, which OpenAI's bodies nest one level deeper."""
    places = (
        f"messages[{position}].tool_calls[{number}]"
        for position, message in enumerate(messages)
        for number in range(len(message.tool_calls or ()))
    )
    return {f"{place}.{name}": f"{place}.function.{name}" for place in places for name in ("name", "arguments")}
