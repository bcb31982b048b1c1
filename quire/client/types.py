"""The client's arguments and results, as plain values. The protos define the fields and their allowed values."""

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypedDict

from quire.messages.replica_role import ReplicaRole
from quire.model_files.progress import LoadProgress


class FinishReason(StrEnum):
    """The reason why a sequence ended."""

    UNSPECIFIED = "unspecified"
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    TOOL_CALLS = "tool_calls"
    ERROR = "error"


class EarlyStopping(StrEnum):
    """The condition that ends a beam search."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """Beam search instead of sampling; it returns the best `n` hypotheses (GenerationOptions), the best first."""

    beam_width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping | None = None


JsonSchema = str | Mapping[str, Any] | type
"""A JSON schema as JSON text, as a mapping, or a class with a method `model_json_schema`, as pydantic's models have."""


@dataclass(frozen=True, slots=True)
class StructuralTag:
    """A constrained part of a text, between `begin` and `end`: exactly one of the three fields constrains it."""

    begin: str
    end: str = ""
    json_schema: JsonSchema | None = None
    regex: str | None = None
    lark: str | None = None


@dataclass(frozen=True, slots=True)
class StructuralTags:
    """Free text with constrained parts."""

    tags: Sequence[StructuralTag]
    required: bool | None = None
    single: bool | None = None
    no_free_text: bool | None = None


@dataclass(frozen=True, slots=True)
class Constraint:
    """A pattern for the generated text. Exactly one field is set; `begins_after`, and for JSON `no_white_space`, may be
    set in addition."""

    json_schema: JsonSchema | None = None
    json_object: bool = False
    regex: str | None = None
    choice: Sequence[str] = ()
    lark: str | None = None
    structural_tags: StructuralTags | None = None
    begins_after: str | None = None
    no_white_space: bool | None = None


@dataclass(frozen=True, slots=True)
class GenerationOptions:
    """Options of a generation. None stands for the model's defaults.

    The first block is quire.common.v1.SamplingParameters, the second StoppingParameters, the third OutputOptions. A
    single str for `bad_words` or `stop` is one text.
    """

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_search: BeamSearch | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict[int, float])
    allowed_token_ids: Sequence[int] = ()
    bad_words: str | Sequence[str] = ()
    constraint: Constraint | None = None
    thinking_token_budget: int | None = None

    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool | None = None
    include_stop_string: bool | None = None

    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int | None = None
    include_special_tokens: bool | None = None
    prediction: str | None = None
    logprob_token_ids: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool; `arguments` is a JSON object as text."""

    id: str
    name: str
    arguments: str

    @property
    def input(self) -> dict[str, Any]:
        """The arguments by name. Raises ValueError if the answer ended within them."""
        return json.loads(self.arguments)


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message of a conversation; roles are usually "system", "user", "assistant" and "tool".

    A message of an assistant has its calls and its reasoning; a message of a tool has the call that it answers.
    """

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


AnyChatMessage = ChatMessage | Mapping[str, Any]
"""One message of a conversation; a mapping has fields of ChatMessage, among them "role" and "content"."""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the schema of its arguments."""

    name: str
    description: str | None = None
    parameters: JsonSchema | None = None
    strict: bool | None = None


class GenerationFields(TypedDict, total=False):
    """The fields of a request to generate that are neither its prompt nor its options."""

    model: str | None
    request_id: str | None
    priority: int | None


class ChatFields(GenerationFields, total=False):
    """The fields of a chat other than its messages and options.

    `tool_choice` is "auto", "none", "required" or the name of a tool. `allowed_tools` are the names of the tools that
    may be called, if not all may. `response_format` constrains the content of the answer; with a schema, answers have
    `parsed`. `template_arguments` are passed to the chat template.
    """

    tools: Sequence[Tool]
    tool_choice: str | None
    allowed_tools: Sequence[str]
    parallel_tool_calls: bool | None
    response_format: "Constraint | JsonSchema | None"
    template_arguments: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | None


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of one token id; rank 1 is the most likely."""

    token_id: int
    logprob: float
    rank: int


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token of one position, and the most likely ones, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The usage of a request; times are in milliseconds."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    preemptions: int
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """One finished sequence. `logprobs` is empty unless requested. `text` has neither the reasoning nor the calls.

    `parsed` is the answer to a chat with a schema as its `response_format`: an instance of the pydantic model, or a
    value of JSON; None if the answer ended before it was complete, or calls tools.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    cumulative_logprob: float | None
    logprobs: tuple[PositionLogprobs, ...] = field(repr=False)
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    parsed: Any = None

    @property
    def message(self) -> ChatMessage:
        """The answer as a message, to continue the conversation."""
        return ChatMessage("assistant", self.text, tool_calls=self.tool_calls, reasoning=self.reasoning or None)


@dataclass(frozen=True, slots=True)
class Generation:
    """The answer to `generate` or `chat`."""

    request_id: str
    model: str
    sequences: tuple[GeneratedSequence, ...]
    usage: Usage
    prompt_logprobs: tuple[PositionLogprobs, ...] = field(repr=False)

    @property
    def text(self) -> str:
        """The text of the first sequence."""
        return self.sequences[0].text

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The calls of the first sequence."""
        return self.sequences[0].tool_calls

    @property
    def message(self) -> ChatMessage:
        """The first sequence as a message, to continue the conversation."""
        return self.sequences[0].message

    @property
    def parsed(self) -> Any:
        """The parsed content of the first sequence, if the chat's `response_format` is a schema."""
        return self.sequences[0].parsed


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """A part of one tool call of a stream: its addition to the arguments. The first part of a call has its id and name.

    `index` is the position of the call among the calls of its sequence.
    """

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class TokenChunk:
    """New tokens of one sequence of a stream; `offset` tokens of it came before. `reasoning` and `tool_calls` are their
    parts of a chat's reasoning and calls."""

    sequence_index: int
    offset: int
    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[PositionLogprobs, ...] = field(repr=False)
    reasoning: str = ""
    tool_calls: tuple[ToolCallDelta, ...] = ()


@dataclass(frozen=True, slots=True)
class SequenceFinished:
    """The end of one sequence of a stream, which has `num_tokens` tokens in all."""

    sequence_index: int
    num_tokens: int
    finish_reason: FinishReason
    stop_string: str | None
    stop_token_id: int | None
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True)
class RequestCompleted:
    """The last event of a stream."""

    request_id: str
    model: str
    usage: Usage
    prompt_logprobs: tuple[PositionLogprobs, ...] = field(repr=False)


StreamEvent = TokenChunk | SequenceFinished | RequestCompleted


@dataclass(frozen=True, slots=True)
class Tokenization:
    """Token ids, and their spelling in the vocabulary."""

    token_ids: tuple[int, ...]
    tokens: tuple[str, ...]
    max_model_len: int


Texts = str | Sequence[str] | Sequence[Sequence[int]]
"""A text to embed, several, or the token ids of several."""


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Vectors in the order of the texts. Each is an array of float32, which `numpy.asarray` reads without a copy.

    Attributes:
        vectors: In answers of `embed_stream`, the vector of a text is empty if it has NaN or infinity; `embed` raises.
        prompt_tokens: The tokens of all texts with a vector, after truncation.
    """

    vectors: tuple["array[float]", ...]
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class RankedDocument:
    """A document's position in the request, and its score; higher is better."""

    index: int
    relevance_score: float


@dataclass(frozen=True, slots=True)
class Ranking:
    """Documents, best first. `prompt_tokens` are of all pairs of query and document."""

    results: tuple[RankedDocument, ...]
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Scores:
    """The score of each pair of texts, in order."""

    scores: tuple[float, ...]
    model: str
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix whose whole blocks stay cached for its time to live, or until it is unpinned."""

    pin_id: str
    pinned_tokens: int
    pinned_blocks: int
    time_to_live_ms: int


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. Token ids are below `vocab_size`; prompt and output have at most `max_model_len` tokens."""

    name: str
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    parent: str | None = None
    """For an adapter, the model that it adapts."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter of the model `parent`. `digest` is its files' digest, in hexadecimal. Only operators see the
    directory; it is empty for others."""

    name: str
    parent: str
    digest: str
    rank: int
    directory: str


@dataclass(frozen=True, slots=True)
class Replica:
    """One scheduler and its workers, as the gateway sees it."""

    scheduler_address: str
    connected: bool
    scheduler_epoch: int
    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    loading: LoadProgress | None
    """The progress of a lost worker with loading its model anew."""
    device_name: str = ""
    """The device that the model runs on, for people; empty if the server does not say."""
    role: ReplicaRole = ReplicaRole.BOTH
    """The kind of work that gateways prefer to send there."""
    block_bytes: int = 0
    """Bytes of one block, in the workers of all ranks together; 0 if the server does not say."""
    full_groups: int = 0
    """Groups of layers that read all tokens; a block has tokens of the layers of one group."""
    windowed_groups: int = 0
    """Groups of layers that read the last `window` tokens only."""
    window: int = 0
    state_blocks: int = 0
    """Blocks that hold the state of a sequence, of all layers that keep a state of fixed size."""
    model: str = ""
    """The model that it serves; empty if the server does not say."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a request."""

    max_message_bytes: int
    max_prompt_tokens: int
    max_n: int
    max_logprobs: int
    max_stop_strings: int
    max_stop_string_bytes: int
    max_chat_messages: int
    max_logit_bias: int
    max_stop_token_ids: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """A gateway, and the replicas that it knows."""

    version: str
    gateway_id: str
    replicas: tuple[Replica, ...]
    limits: Limits
