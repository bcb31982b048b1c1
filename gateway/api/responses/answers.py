"""The answers of OpenAI's Responses API: responses, their items, and the events of their streams.

Writers build these objects, and /openapi.json is made from them.
"""

from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field
from typing_extensions import TypedDict

from gateway.api.answer_parts import ChatTokenLogprob, OutputTokensDetails
from gateway.api.answers import ErrorDetail


class OutputText(TypedDict):
    type: Literal["output_text"]
    text: str
    annotations: list[Any]
    logprobs: Iterable[ChatTokenLogprob]


class InputText(TypedDict):
    type: Literal["input_text"]
    text: str


class ReasoningText(TypedDict):
    type: Literal["reasoning_text"]
    text: str


class ItemHead(TypedDict):
    id: str
    status: str


MessagePart = OutputText | InputText


class MessageAnswerItem(ItemHead):
    type: Literal["message"]
    role: str
    content: list[MessagePart]


class ReasoningAnswerItem(ItemHead):
    type: Literal["reasoning"]
    summary: list[Any]
    content: list[ReasoningText]


class CallHead(ItemHead):
    call_id: str
    name: str


class FunctionCallAnswerItem(CallHead):
    type: Literal["function_call"]
    arguments: str


class CustomCallAnswerItem(CallHead):
    type: Literal["custom_tool_call"]
    input: str


class FunctionCallOutputAnswerItem(ItemHead):
    type: Literal["function_call_output"]
    call_id: str
    output: str


OutputItem = MessageAnswerItem | ReasoningAnswerItem | FunctionCallAnswerItem | CustomCallAnswerItem
InputItem = MessageAnswerItem | ReasoningAnswerItem | FunctionCallAnswerItem | FunctionCallOutputAnswerItem


class InputTokensDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: str


class ResponseFailure(TypedDict):
    code: str
    message: str


class CancelledResponse(TypedDict):
    """A response that ran, without the fields of its request."""

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


class ResponseObject(CancelledResponse):
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


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class InputItems(TypedDict):
    """A page of the items of a response's input. An empty page has empty ids."""

    object: Literal["list"]
    data: list[InputItem]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class CompactionItem(TypedDict):
    """The summary of a conversation, as plain text."""

    type: Literal["compaction"]
    id: str
    encrypted_content: str


class CompactedResponse(TypedDict):
    """A shorter conversation: the messages of the user, and a summary of all."""

    id: str
    object: Literal["response.compaction"]
    created_at: int
    output: list[MessageAnswerItem | CompactionItem]
    usage: ResponseUsage | None


class Numbered(TypedDict):
    """An event with its number, from 0."""

    sequence_number: int


class ResponseStateEvent(Numbered):
    """An event with the state of the response. The last event of a stream is `completed` or `incomplete`, with the
    whole response; in the background also `failed`, and `incomplete` for a cancelled response."""

    type: Literal[
        "response.created",
        "response.queued",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class AtItem(Numbered):
    output_index: int


class OutputItemEvent(AtItem):
    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class InItem(AtItem):
    item_id: str


class InPart(InItem):
    content_index: int


class ContentPartEvent(InPart):
    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputText | ReasoningText


class OutputTextDelta(InPart):
    type: Literal["response.output_text.delta"]
    delta: str
    logprobs: Iterable[ChatTokenLogprob]


class OutputTextDone(InPart):
    type: Literal["response.output_text.done"]
    text: str
    logprobs: Iterable[ChatTokenLogprob]


class ReasoningTextDelta(InPart):
    type: Literal["response.reasoning_text.delta"]
    delta: str


class ReasoningTextDone(InPart):
    type: Literal["response.reasoning_text.done"]
    text: str


class CallDelta(InItem):
    type: Literal["response.function_call_arguments.delta", "response.custom_tool_call_input.delta"]
    delta: str


class FunctionCallArgumentsDone(InItem):
    type: Literal["response.function_call_arguments.done"]
    name: str
    arguments: str


class CustomToolCallInputDone(InItem):
    type: Literal["response.custom_tool_call_input.done"]
    input: str


class ResponseErrorEvent(Numbered):
    """The last event of a failed stream, with OpenAI's documented fields, and `error`, which makes clients raise."""

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
    | CallDelta
    | FunctionCallArgumentsDone
    | CustomToolCallInputDone
    | ResponseErrorEvent,
    Field(discriminator="type"),
]
