"""The shapes of successful answers, for /openapi.json.

Answers are written as dictionaries, in pieces; a test compares them with these types. A field that may be absent has a
default, and null is what its type says.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


def _is_open(schema: dict[str, Any]) -> None:
    """Clients must expect fields of later versions."""
    schema.pop("additionalProperties", None)


class Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_is_open, protected_namespaces=())


# OpenAI's completions and chat completions.


class PromptTokensDetails(Shape):
    cached_tokens: int


class CompletionTokensDetails(Shape):
    """`reasoning_tokens` are those of the reasoning with the marks around it; the others count what the prediction of a
    request was worth."""

    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class CompletionUsage(Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(Shape):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, TokenLogprob] | None]


class CompletionLogprobs(Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class _Choice(Shape):
    index: int
    finish_reason: str
    stop_reason: str | int | None
    token_ids: list[int] | None


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None


class RequestMetrics(Shape):
    """With `include_metrics`, of a request with one sequence. The first token is timed from the request's arrival."""

    time_to_first_token_ms: float | None
    generation_time_ms: float
    queue_time_ms: float
    mean_itl_ms: float = 0.0
    tokens_per_second: float | None


class _Completion(Shape):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: CompletionUsage
    metrics: RequestMetrics | None = None


class Completion(_Completion):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CallOfFunction(Shape):
    name: str
    arguments: str


class ChatToolCall(Shape):
    id: str
    type: Literal["function"]
    function: CallOfFunction


class CallOfCustom(Shape):
    name: str
    input: str


class ChatCustomToolCall(Shape):
    id: str
    type: Literal["custom"]
    custom: CallOfCustom


class ChatAnswer(Shape):
    """`reasoning_content` and `reasoning` are equal, where the model reasons."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ChatToolCall | ChatCustomToolCall] = []
    reasoning_content: str = ""
    reasoning: str = ""


class TopLogprob(Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Shape):
    content: list[ChatTokenLogprob]
    refusal: None


class ChatChoice(_Choice):
    message: ChatAnswer
    logprobs: ChatLogprobs | None


class ChatCompletion(_Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None
    prompt_token_ids: list[int] | None


class CancelledRequest(Shape):
    id: str
    object: Literal["request"]
    cancelled: Literal[True]


class ServedModelShape(Shape):
    """`parent` is the model that an adapter adapts. `max_model_len` is null until a scheduler was reached."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ServedModels(Shape):
    object: Literal["list"]
    data: list[ServedModelShape]


class Tokens(Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(Shape):
    prompt: str


# OpenAI's responses.


class OutputText(Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class InputText(Shape):
    type: Literal["input_text"]
    text: str


class ReasoningText(Shape):
    type: Literal["reasoning_text"]
    text: str


class _AnswerItem(Shape):
    id: str
    status: str


class MessageAnswerItem(_AnswerItem):
    type: Literal["message"]
    role: str
    content: list[OutputText | InputText]


class ReasoningAnswerItem(_AnswerItem):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


class FunctionCallAnswerItem(_AnswerItem):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class CustomCallAnswerItem(_AnswerItem):
    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    input: str


class FunctionCallOutputAnswerItem(_AnswerItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str


OutputItem = MessageAnswerItem | ReasoningAnswerItem | FunctionCallAnswerItem | CustomCallAnswerItem


class InputTokensDetails(Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(Shape):
    reasoning_tokens: int
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class ResponseUsage(Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(Shape):
    reason: str


class ResponseFailure(Shape):
    code: str
    message: str


class _ResponseHead(Shape):
    """What is known of each response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    background: bool
    error: ResponseFailure | None
    incomplete_details: IncompleteDetails | None
    model: str
    store: bool
    output: list[OutputItem]
    usage: ResponseUsage | None


class CancelledResponse(_ResponseHead):
    """A response that ran, without what its call had asked for."""


class ResponseObject(_ResponseHead):
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, str]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    temperature: float
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    presence_penalty: float
    frequency_penalty: float
    max_tool_calls: int | None
    service_tier: str
    safety_identifier: str | None
    prompt_cache_key: str | None
    user: str | None


class DeletedResponse(Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(Shape):
    """A page of the items of a response's input. The ids are empty where the page is."""

    object: Literal["list"]
    data: list[MessageAnswerItem | ReasoningAnswerItem | FunctionCallAnswerItem | FunctionCallOutputAnswerItem]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int


# Anthropic's messages.


class AnsweredText(Shape):
    type: Literal["text"]
    text: str


class AnsweredThinking(Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageOutputTokens(Shape):
    thinking_tokens: int


class MessageUsage(Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputTokens


class AnsweredMessage(Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(Shape):
    input_tokens: int


# KServe's protocol.


class InferenceServer(Shape):
    name: str
    version: str
    extensions: list[str]


class Liveness(Shape):
    live: bool


class Readiness(Shape):
    ready: bool


class ModelReadiness(Readiness):
    name: str


class TensorMetadata(Shape):
    name: str
    datatype: str
    shape: list[int]


class InferenceModel(Shape):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class OutputTensor(TensorMetadata):
    data: list[str | float | int | bool]


class InferenceAnswer(Shape):
    model_name: str
    model_version: str
    id: str = ""
    outputs: list[OutputTensor]


# Probes.


class Health(Shape):
    """`reason` is why no replica can serve."""

    status: Literal["ok", "failing"]
    reason: str = ""


class ServerLoad(Shape):
    server_load: int


class ForgottenBlocks(Shape):
    forgotten_blocks: int


class Sleeping(Shape):
    is_sleeping: bool


class ReplicaInfo(Shape):
    max_model_len: int
    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int


class ServerInfo(Shape):
    version: str
    model: str
    architecture: str
    replicas: list[ReplicaInfo]


class ReplicaLoading(Shape):
    """How far the workers of a scheduler are with loading their model."""

    scheduler: str
    phase: str
    done_bytes: int
    total_bytes: int
    percent: int | None


class GatewayReadiness(Shape):
    """`reason` is why no request would run, `loading` the replicas whose models are being loaded."""

    status: str
    reason: str = ""
    loading: list[ReplicaLoading] = []


class GatewayVersion(Shape):
    version: str


AnyObject = dict[str, Any]


class ErrorDetails(BaseModel):
    """The fields of an error that clients use to recover from it."""

    error_code: str
    unsupported: list[str]


class AnthropicErrorDetail(BaseModel):
    type: str
    message: str
    details: ErrorDetails | None = None


class AnthropicError(BaseModel):
    """An error in Anthropic's shape."""

    type: Literal["error"] = "error"
    error: AnthropicErrorDetail
