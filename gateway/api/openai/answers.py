"""Answers of completions and chat completions, whole and as chunks, and answers about tokens.

Writers build these objects, and /openapi.json is made from them. A field that may be absent is NotRequired; a list that
may be long is an Iterable, so that its entries are made while it is written.
"""

from collections.abc import Iterable
from typing import Literal, NotRequired

from typing_extensions import TypedDict

from gateway.api.answer_parts import ChatLogprobs, LogprobsByTokenId, OutputTokensDetails
from gateway.api.answers import ErrorBody


class TokenCounts(TypedDict):
    """The usage so far, with `continuous_usage_stats`: the number of cached tokens is known only at the end."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class PromptTokensDetails(TypedDict):
    cached_tokens: int


class CompletionUsage(TokenCounts):
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: OutputTokensDetails


PromptLogprobs = Iterable[LogprobsByTokenId | None]


class CompletionLogprobs(TypedDict):
    tokens: Iterable[str]
    token_logprobs: Iterable[float | None]
    top_logprobs: Iterable[dict[str, float] | None]
    text_offset: Iterable[int]


class RequestMetrics(TypedDict):
    """Times of a request with one sequence, for `include_metrics`. The first token is timed from the arrival."""

    time_to_first_token_ms: float | None
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: NotRequired[float]
    tokens_per_second: float | None


class Metrics(TypedDict, total=False):
    metrics: RequestMetrics | None


class Head(Metrics):
    """The first fields of every answer and every chunk of a call."""

    id: str
    created: int
    model: str
    system_fingerprint: str


class _Answer(Head):
    usage: CompletionUsage


class OfPrompt(TypedDict):
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class Finish(TypedDict):
    finish_reason: str
    stop_reason: str | int | None


class _Choice(Finish):
    index: int
    token_ids: list[int] | None


class CompletionPiece(TypedDict):
    text: str
    logprobs: CompletionLogprobs | None


class CompletionChoice(_Choice, CompletionPiece, OfPrompt):
    pass


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: Iterable[CompletionChoice]


class CallOfFunction(TypedDict):
    name: str
    arguments: str


class ChatToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CallOfFunction


class CallOfCustom(TypedDict):
    name: str
    input: str


class ChatCustomToolCall(TypedDict):
    id: str
    type: Literal["custom"]
    custom: CallOfCustom


class ReasoningFields(TypedDict, total=False):
    reasoning_content: str
    reasoning: str


class ChatAnswer(ReasoningFields):
    """The message of an answer. `reasoning_content` and `reasoning` are equal: vLLM's older and newer name."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: NotRequired[list[ChatToolCall | ChatCustomToolCall]]


class ChatChoice(_Choice):
    message: ChatAnswer
    logprobs: ChatLogprobs | None


class ChatCompletion(_Answer, OfPrompt):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]


# Chunks.


class ChunkUsage(TypedDict, total=False):
    usage: CompletionUsage | TokenCounts | None


class _Chunk(Head, ChunkUsage):
    """A chunk. With `include_usage`, `usage` is null until the last chunk, which has no choices."""


class ChunkOfPrompt(TypedDict, total=False):
    prompt_logprobs: PromptLogprobs
    prompt_token_ids: list[int]


class ChunkTokenIds(TypedDict, total=False):
    token_ids: list[int]


class ChunkFinish(TypedDict):
    finish_reason: str | None
    stop_reason: str | int | None


class _ChunkChoice(ChunkFinish, ChunkTokenIds):
    index: int


class CompletionChunkChoice(_ChunkChoice, CompletionPiece, ChunkOfPrompt):
    """A choice in a chunk. The first chunk of a choice has the log probabilities and the tokens of the prompt; its end
    is a separate chunk."""


class CompletionChunk(_Chunk):
    object: Literal["text_completion"]
    choices: list[CompletionChunkChoice]


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CustomDelta(TypedDict):
    name: NotRequired[str]
    input: str


class ToolCallDeltaShape(TypedDict):
    """A piece of a call. The first delta of a call has `id`, `type` and the name, later deltas have arguments. A call
    has either `function` or `custom`."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function", "custom"]]
    function: NotRequired[FunctionDelta]
    custom: NotRequired[CustomDelta]


class ChatDelta(ReasoningFields, total=False):
    """A piece of a message. A choice's first chunk has `role`. `reasoning_content` and `reasoning` are equal."""

    role: Literal["assistant"]
    content: str
    tool_calls: list[ToolCallDeltaShape]


class ChatChunkChoice(_ChunkChoice):
    """A choice in a chunk. The end of a choice is a separate chunk."""

    delta: ChatDelta
    logprobs: ChatLogprobs | None


class ChatCompletionChunk(_Chunk, ChunkOfPrompt):
    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]


CompletionEvent = CompletionChunk | ErrorBody
ChatEvent = ChatCompletionChunk | ErrorBody


# Tokens.


class Tokens(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(TypedDict):
    prompt: str
