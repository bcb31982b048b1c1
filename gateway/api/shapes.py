"""The shapes of successful answers, for /openapi.json.

Answers are written as dictionaries, in pieces; a test compares them with these types. A field that may be absent has a
default, and null is what its type says.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


def _is_open(schema: dict[str, Any]) -> None:
    """Clients must expect fields of later versions."""
    schema.pop("additionalProperties", None)


class _Shape(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, json_schema_extra=_is_open, protected_namespaces=())


# OpenAI's completions and chat completions.


class PromptTokensDetails(_Shape):
    cached_tokens: int


class CompletionTokensDetails(_Shape):
    """`reasoning_tokens` are those of the reasoning with the marks around it."""

    reasoning_tokens: int


class CompletionUsage(_Shape):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails


class TokenLogprob(_Shape):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, TokenLogprob] | None]


class CompletionLogprobs(_Shape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None] | None
    text_offset: list[int]


class _Choice(_Shape):
    index: int
    finish_reason: str
    stop_reason: str | int | None


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs = []


class _Completion(_Shape):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: CompletionUsage


class Completion(_Completion):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class CallOfFunction(_Shape):
    name: str
    arguments: str


class ChatToolCall(_Shape):
    id: str
    type: Literal["function"]
    function: CallOfFunction


class ChatAnswer(_Shape):
    """`reasoning_content` and `reasoning` are equal, where the model reasons."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    tool_calls: list[ChatToolCall] = []
    reasoning_content: str = ""
    reasoning: str = ""


class TopLogprob(_Shape):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(_Shape):
    content: list[ChatTokenLogprob]
    refusal: None


class ChatChoice(_Choice):
    message: ChatAnswer
    logprobs: ChatLogprobs | None


class ChatCompletion(_Completion):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs = []


class ServedModelShape(_Shape):
    """`max_model_len` is null until a scheduler was reached."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: None
    max_model_len: int | None


class ServedModels(_Shape):
    object: Literal["list"]
    data: list[ServedModelShape]


class Tokens(_Shape):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedText(_Shape):
    prompt: str


# OpenAI's responses.


class OutputText(_Shape):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: list[ChatTokenLogprob]


class InputText(_Shape):
    type: Literal["input_text"]
    text: str


class ReasoningText(_Shape):
    type: Literal["reasoning_text"]
    text: str


class _AnswerItem(_Shape):
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


class FunctionCallOutputAnswerItem(_AnswerItem):
    type: Literal["function_call_output"]
    call_id: str
    output: str


OutputItem = MessageAnswerItem | ReasoningAnswerItem | FunctionCallAnswerItem


class InputTokensDetails(_Shape):
    cached_tokens: int
    cache_write_tokens: int


class OutputTokensDetails(_Shape):
    reasoning_tokens: int


class ResponseUsage(_Shape):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(_Shape):
    reason: str


class _ResponseHead(_Shape):
    """What is known of each response."""

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    status: str
    background: bool
    error: None
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
    truncation: Literal["disabled"]


class DeletedResponse(_Shape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(_Shape):
    """A page of the items of a response's input. The ids are empty where the page is."""

    object: Literal["list"]
    data: list[MessageAnswerItem | ReasoningAnswerItem | FunctionCallAnswerItem | FunctionCallOutputAnswerItem]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(_Shape):
    object: Literal["response.input_tokens"]
    input_tokens: int


# Anthropic's messages.


class AnsweredText(_Shape):
    type: Literal["text"]
    text: str


class AnsweredThinking(_Shape):
    type: Literal["thinking"]
    thinking: str
    signature: str


class AnsweredToolUse(_Shape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageOutputTokens(_Shape):
    thinking_tokens: int


class MessageUsage(_Shape):
    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: MessageOutputTokens


class AnsweredMessage(_Shape):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[AnsweredText | AnsweredThinking | AnsweredToolUse]
    stop_reason: str | None
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(_Shape):
    input_tokens: int


# KServe's protocol.


class InferenceServer(_Shape):
    name: str
    version: str
    extensions: list[str]


class Liveness(_Shape):
    live: bool


class Readiness(_Shape):
    ready: bool


class ModelReadiness(Readiness):
    name: str


class TensorMetadata(_Shape):
    name: str
    datatype: str
    shape: list[int]


class InferenceModel(_Shape):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class OutputTensor(TensorMetadata):
    data: list[str | float | int | bool]


class InferenceAnswer(_Shape):
    model_name: str
    model_version: str
    id: str = ""
    outputs: list[OutputTensor]


# Probes.


class Health(_Shape):
    status: Literal["ok"]


class ReplicaLoading(_Shape):
    """How far the workers of a scheduler are with loading their model."""

    scheduler: str
    phase: str
    done_bytes: int
    total_bytes: int
    percent: int | None


class GatewayReadiness(_Shape):
    """`reason` is why no request would run, `loading` the replicas whose models are being loaded."""

    status: str
    reason: str = ""
    loading: list[ReplicaLoading] = []


class GatewayVersion(_Shape):
    version: str


AnyObject = dict[str, Any]
