"""The fields and types of request bodies. The validator checks ranges, and `field_rule` has the fields that are not
read. docs/openai.md lists all fields.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from gateway.api import field_rule, generation_fields
from gateway.api.constraint_fields import check_constraints
from gateway.api.field_rule import Unread
from gateway.api.generation_fields import Body, GenerationBody, ListOf, check_generation
from gateway.api.openai.conversation import (
    ConversationFields,
    Message,
    ToolChoiceObject,
    check_conversation,
    check_tool_choice,
)
from gateway.request.violations import Violations


class ChatBody(GenerationBody, ConversationFields):
    api: ClassVar[str] = "chat"
    unread: ClassVar[Unread] = field_rule.CHAT

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


class TokenizeBody(Body, ConversationFields):
    """Either a prompt or messages."""

    api: ClassVar[str] = "tokens"

    prompt: str | None = None
    messages: ListOf[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    api: ClassVar[str] = "tokens"

    tokens: ListOf[int]


UNION_TYPES: Mapping[str, str] = {
    **generation_fields.UNION_TYPES,
    "tool_choice": 'a string, {"type": "function", "function": {"name": ...}} or {"type": "allowed_tools", ...}',
}
"""The types of fields that accept several, as errors show them."""


def check_body(violations: Violations, body: Body) -> None:
    """Adds violations for fields that contradict each other or have unknown values."""
    if isinstance(body, GenerationBody):
        check_generation(violations, body)
        if isinstance(body, ChatBody):
            _check_chat(violations, body)
        check_constraints(violations, body)
    if isinstance(body, ChatBody | TokenizeBody):
        is_forced = isinstance(body, ChatBody) and body.requires_call
        check_conversation(violations, body.messages or [], body, is_forced=is_forced)
        if body.messages is not None and body.add_special_tokens:
            violations.add("add_special_tokens", "is true; in a chat only the chat template writes special tokens")


def _check_chat(violations: Violations, body: ChatBody) -> None:
    if body.top_logprobs and not body.logprobs:
        violations.add("top_logprobs", "is set; it has an effect only if logprobs is true")
    check_tool_choice(violations, body.tool_choice)
