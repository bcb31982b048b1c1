"""The fields and types of request bodies. The validator checks ranges, and `field_rule` has the fields that are not
read. docs/openai.md lists all fields.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import TypeAdapter

from gateway.api import field_rule
from gateway.api.constraint_fields import check_constraints
from gateway.api.field_rule import FieldRule, Unread
from gateway.api.generation_fields import Body, GenerationBody, ListOf, check_generation
from gateway.api.openai.conversation import (
    ConversationFields,
    Message,
    ToolChoiceObject,
    check_conversation,
    check_tool_choice,
    left_out_tools,
)
from gateway.request.violations import Violations

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
