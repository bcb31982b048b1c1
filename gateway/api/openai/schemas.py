"""The fields and types of request bodies, their conversion to requests of the generator, and the names of its fields in
the bodies. The validator checks ranges, and `field_rule` has the fields that are not read. docs/openai.md lists all
fields.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

from pydantic import TypeAdapter

from gateway.api import field_rule
from gateway.api.constraint_fields import check_constraints, constraint_of
from gateway.api.field_rule import FieldRule, Unread
from gateway.api.fields import Names, numbered
from gateway.api.generation_fields import (
    Body,
    CompletionBody,
    GenerationBody,
    ListOf,
    check_generation,
    generation_options,
    names_of,
)
from gateway.api.openai.conversation import (
    ConversationFields,
    Message,
    ToolChoiceObject,
    chat_message,
    check_conversation,
    check_tool_choice,
    kept_tools,
    left_out_tools,
    template_options,
    tool_choice_of,
    tools_of,
)
from gateway.request.violations import Violations
from gateway.types import ChatPrompt, Clamp, Prompt, RequestOptions, TextPrompt, TokenPrompt

_MESSAGES = TypeAdapter(list[Message])
_NO_SPECIAL_TOKENS = "add_special_tokens", "is true; in a chat only the chat template writes special tokens"


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
    prompts = cast(list[str] | list[list[int]], prompt)
    return [TextPrompt(each, add_special_tokens) if isinstance(each, str) else TokenPrompt(each) for each in prompts]


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
        tools=tools_of(fields),
        template_options=template_options(fields),
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
