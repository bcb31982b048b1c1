"""The answers of Anthropic's Messages API: messages, the events of their streams, and errors.

Writers build these objects, and /openapi.json is made from them. A field that may be absent is NotRequired.
"""

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict


class AnsweredText(TypedDict):
    type: Literal["text"]
    text: str


class AnsweredThinking(TypedDict):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(TypedDict):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


Block = AnsweredText | AnsweredThinking | AnsweredToolUse


class MessageOutputTokens(TypedDict):
    thinking_tokens: int


class MessageUsage(TypedDict):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputTokens


class StopFields(TypedDict):
    stop_reason: str | None
    stop_sequence: str | None


class AnsweredMessage(StopFields):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[Block]
    usage: MessageUsage


class MessageTokens(TypedDict):
    input_tokens: int


class ErrorDetails(TypedDict):
    """The fields of an error that clients use to recover from it."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(TypedDict):
    type: str
    message: str
    details: NotRequired[ErrorDetails]


class AnthropicError(TypedDict):
    """An error in Anthropic's shape."""

    type: Literal["error"]
    error: AnthropicErrorDetail


class MessageStart(TypedDict):
    type: Literal["message_start"]
    message: AnsweredMessage


class Ping(TypedDict):
    type: Literal["ping"]


class ContentBlockStart(TypedDict):
    type: Literal["content_block_start"]
    index: int
    content_block: Block


class TextDelta(TypedDict):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(TypedDict):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(TypedDict):
    type: Literal["input_json_delta"]
    partial_json: str


Delta = TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockDelta(TypedDict):
    type: Literal["content_block_delta"]
    index: int
    delta: Delta


class ContentBlockStop(TypedDict):
    type: Literal["content_block_stop"]
    index: int


class MessageDelta(TypedDict):
    type: Literal["message_delta"]
    delta: StopFields
    usage: MessageUsage


class MessageStop(TypedDict):
    type: Literal["message_stop"]


Event = MessageStart | Ping | ContentBlockStart | ContentBlockDelta | ContentBlockStop | MessageDelta | MessageStop
MessageEvent = Annotated[Event | AnthropicError, Field(discriminator="type")]
