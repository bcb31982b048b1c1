"""Requests as values, in one form for all front ends: their parameters are the contract's own messages.

`RequestOptions` is a request as it came in: an absent field is absent in its messages. `GenerationRequest` is the same
request validated, tokenized and completed with defaults.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, Literal, cast

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from gateway.text.formats.answer import PLAIN, AnswerFormat
from quire.common.v1.common_pb2 import Constraint, OutputOptions, SamplingParameters, StoppingParameters
from quire.gateway.v1.generation_pb2 import TemplateOptions, Tool, ToolCall, ToolChoice
from quire.tracing import TraceContext

MAX_ENTRIES = 1 << 20
"""The maximum length of a list in a message. No limit is above it; a longer list is refused without being copied."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """`add_special_tokens`: whether the tokenizer adds its special tokens to the text."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`name` distinguishes speakers of one role. The chat template decides whether it is part of the prompt.

    An assistant's message may have tool calls and reasoning. A tool's message is the result of the call `tool_call_id`.
    """

    role: str
    content: str
    name: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to answer. `response_format` is what the content of the answer must match."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: Constraint | None = None
    template_options: TemplateOptions | None = None


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """The part of one sequence that the caller has: its tokens, and optionally the number of characters of their text
    and the sum of their log probabilities."""

    token_ids: Sequence[int]
    num_characters: int | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request as the caller sent it, not validated.

    A higher `priority` runs earlier. Errors show `priority_sign * priority`, which is what the caller wrote.
    """

    prompt: Prompt | None
    model: str | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingParameters = field(default_factory=StoppingParameters)
    output: OutputOptions = field(default_factory=OutputOptions)
    as_written: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values that the messages cannot hold exactly as the caller wrote them, by the path of the field. The validator
    checks these instead, and refuses each value that is outside the range of its field."""
    truncate_prompt_tokens: int | None = None
    """Keeps only this many last tokens of the prompt; -1 keeps as many as a prompt may have."""
    request_id: str | None = None
    priority: int | None = None
    priority_sign: Literal[1, -1] = 1
    durable: bool = False
    continue_from: Sequence[HeldSequence] = ()
    """The output of an earlier request: one entry per sequence, or empty."""

    def asked(self, path: str) -> Any:
        """The value that the caller wrote for a field, for example "sampling.top_p"; None if it is absent."""
        if path in self.as_written:
            return self.as_written[path]
        parent_of, name, has_presence = _place_of(path)
        message = parent_of(self)
        return None if has_presence and not message.HasField(name) else getattr(message, name)


@cache
def _place_of(path: str) -> tuple[Callable[[RequestOptions], Message], str, bool]:
    """For the field at a path: a function from options to its message, its name, and whether it can be absent."""
    parents, _, name = path.rpartition(".")
    parent_of: Callable[[RequestOptions], Message] = attrgetter(parents)
    return parent_of, name, parent_of(RequestOptions(None)).DESCRIPTOR.fields_by_name[name].has_presence


def optional(message: Message, field: str) -> Any:
    """The value of an `optional` field; None if it is absent."""
    return getattr(message, field) if message.HasField(field) else None


def write(message: Message, path: str, value: Any, as_written: dict[str, Any]) -> None:
    """Sets the field at the end of `path` to a value of a caller; None leaves it absent. A value that the field cannot
    hold exactly goes to `as_written` as well."""
    if value is None:
        return
    name = path.rpartition(".")[2]
    try:
        if isinstance(value, dict):
            getattr(message, name).update(value)
            is_held = not any(map(math.isinf, getattr(message, name).values()))
        elif isinstance(value, list):
            entries = cast(list[Any], value)
            is_held = len(entries) <= MAX_ENTRIES
            if is_held:
                getattr(message, name).extend(entries)
        else:
            setattr(message, name, value)
            is_held = getattr(message, name) == value
    except ValueError:
        # Outside the range of the field's type, or not valid Unicode.
        message.ClearField(name)
        is_held = False
    if not is_held:
        as_written[path] = value


@dataclass(frozen=True, slots=True)
class Parameters:
    """The parameters of a request with every default set, except what depends on the prompt. Requests of one call share
    them; `GenerationRequest` says what each is."""

    sampling: SamplingParameters
    stopping: StoppingParameters
    output: OutputOptions
    eos_token_ids: tuple[int, ...]
    row_sampling: bytes


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A request that was checked and can be submitted. `prompt_token_ids` is int32, shape [prompt length].

    Its id is unique among the running requests of its tenant. The messages have every default set; requests of one call
    share them, so nobody changes them. `stopping.stop` is matched by the gateway, the token ids by the scheduler;
    neither ends a sequence before `stopping.min_tokens` tokens.
    """

    request_id: str
    tenant: str
    prompt_token_ids: NDArray[np.int32]
    sampling: SamplingParameters
    """`n` sequences are returned, out of `best_of` that are sampled or searched. Without a seed: requests of one call
    that names none share all but that."""
    stopping: StoppingParameters
    output: OutputOptions
    seed: int
    eos_token_ids: Sequence[int] = ()
    """The model's eos ids; empty if they are ignored."""
    row_sampling: bytes = b""
    """The worker's sampling parameters: a serialized quire.common.v1.RowSampling."""
    priority: int = 0
    durable: bool = False
    """The request runs on without a reader for a while, and can be resumed."""
    answer_format: AnswerFormat = PLAIN
    """How the text is parsed: as plain text, except for chats."""
    nonce: int = 0
    """64 random bits that distinguish the request from others with the same id."""
    trace: TraceContext | None = None
    """The span that the scheduler continues, if the request is traced."""

    @property
    def logprobs(self) -> int | None:
        return optional(self.output, "logprobs")

    @property
    def prompt_logprobs(self) -> int | None:
        return optional(self.output, "prompt_logprobs")

    @property
    def prompt_logprobs_start(self) -> int:
        """The position of the first prompt token whose log probability is reported."""
        return self.output.prompt_logprobs_start or 1

    @property
    def ending_token_ids(self) -> frozenset[int]:
        return frozenset((*self.stopping.stop_token_ids, *self.eos_token_ids))

    @property
    def chooses(self) -> bool:
        """Whether the returned sequences are selected when all have finished, so that none is delivered earlier."""
        return self.sampling.best_of > self.sampling.n or self.sampling.HasField("beam_search")
