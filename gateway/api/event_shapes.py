"""The shapes of the events of streams, for /openapi.json; a test compares them with what streams send.

A shape is that of one event's data. Streams of completions and of chats have `[DONE]` besides, as their last event.
"""

from typing import Annotated, Literal

from pydantic import Field

from gateway.api.answers import ErrorBody, ErrorDetail
from gateway.api.shapes import (
    AnsweredMessage,
    AnsweredText,
    AnsweredThinking,
    AnsweredToolUse,
    AnthropicError,
    ChatLogprobs,
    ChatTokenLogprob,
    CompletionLogprobs,
    CompletionUsage,
    MessageUsage,
    OutputItem,
    OutputText,
    PromptLogprobs,
    ReasoningText,
    RequestMetrics,
    ResponseObject,
    Shape,
)

# OpenAI's completions and chat completions.


class UsageSoFar(Shape):
    """With `continuous_usage_stats`: the number of cached tokens is known only at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class _Chunk(Shape):
    """With `include_usage`, `usage` is null until the last chunk, which has no choices."""

    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: CompletionUsage | UsageSoFar | None = None
    metrics: RequestMetrics | None = None


class _ChunkChoice(Shape):
    """The end of a choice is a chunk of its own."""

    index: int
    finish_reason: str | None
    stop_reason: str | int | None
    token_ids: list[int] = Field(default_factory=list[int])


class CompletionChunkChoice(_ChunkChoice):
    """The log probabilities and the tokens of the prompt come with the first chunk of a choice."""

    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs = Field(default_factory=list)
    prompt_token_ids: list[int] = Field(default_factory=list[int])


class CompletionChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class FunctionDelta(Shape):
    name: str = ""
    arguments: str


class CustomDelta(Shape):
    name: str = ""
    input: str


class ToolCallDeltaShape(Shape):
    """The first delta of a call has `id`, `type` and the name; those after it have arguments. A call has `function`, or
    `custom`."""

    index: int
    id: str = ""
    type: Literal["function", "custom"] = "function"
    function: FunctionDelta = FunctionDelta(arguments="")
    custom: CustomDelta = CustomDelta(input="")


class ChatDelta(Shape):
    """`role` is in the first chunk of each choice. `reasoning_content` and `reasoning` are equal."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDeltaShape] = Field(default_factory=list)


class ChatChunkChoice(_ChunkChoice):
    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(_Chunk):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    prompt_logprobs: PromptLogprobs = Field(default_factory=list)
    prompt_token_ids: list[int] = Field(default_factory=list[int])


CompletionEvent = CompletionChunk | ErrorBody
ChatEvent = ChatCompletionChunk | ErrorBody


# OpenAI's responses.


class _ResponseEvent(Shape):
    """Events are numbered from 0."""

    sequence_number: int


class ResponseStateEvent(_ResponseEvent):
    """The last event of a stream is `completed` or `incomplete`, with the whole response; in the background it may be
    `failed` as well, and where `status` is cancelled it is `incomplete`."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class OutputItemEvent(_ResponseEvent):
    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class _OfItem(_ResponseEvent):
    output_index: int
    item_id: str


class _OfPart(_OfItem):
    content_index: int


class ContentPartEvent(_OfPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class OutputTextDelta(_OfPart):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: list[ChatTokenLogprob]


class OutputTextDone(_OfPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: list[ChatTokenLogprob]


class ReasoningTextDelta(_OfPart):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(_OfPart):
    type: Literal["response.reasoning_text.done"]
    text: str


class FunctionCallArgumentsDelta(_OfItem):
    type: Literal["response.function_call_arguments.delta"]
    delta: str


class FunctionCallArgumentsDone(_OfItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomToolCallInputDelta(_OfItem):
    type: Literal["response.custom_tool_call_input.delta"]
    delta: str


class CustomToolCallInputDone(_OfItem):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ResponseErrorEvent(_ResponseEvent):
    """The last event of a stream that failed."""

    type: Literal["error"]
    code: str
    message: str
    param: str | None
    error: ErrorDetail


ResponseEvent = Annotated[
    ResponseStateEvent
    | OutputItemEvent
    | ContentPartEvent
    | OutputTextDelta
    | OutputTextDone
    | ReasoningTextDelta
    | ReasoningTextDone
    | FunctionCallArgumentsDelta
    | FunctionCallArgumentsDone
    | CustomToolCallInputDelta
    | CustomToolCallInputDone
    | ResponseErrorEvent,
    Field(discriminator="type"),
]


# Anthropic's messages.


class MessageStart(Shape):
    type: Literal["message_start"]
    message: AnsweredMessage


class Ping(Shape):
    type: Literal["ping"]


class ContentBlockStart(Shape):
    type: Literal["content_block_start"]
    index: int
    content_block: AnsweredText | AnsweredThinking | AnsweredToolUse


class TextDelta(Shape):
    type: Literal["text_delta"]
    text: str


class ThinkingDelta(Shape):
    type: Literal["thinking_delta"]
    thinking: str


class InputJsonDelta(Shape):
    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(Shape):
    type: Literal["content_block_delta"]
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class ContentBlockStop(Shape):
    type: Literal["content_block_stop"]
    index: int


class StopFields(Shape):
    stop_reason: str | None
    stop_sequence: str | None


class MessageDelta(Shape):
    type: Literal["message_delta"]
    delta: StopFields
    usage: MessageUsage


class MessageStop(Shape):
    type: Literal["message_stop"]


MessageEvent = Annotated[
    MessageStart
    | Ping
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | AnthropicError,
    Field(discriminator="type"),
]
