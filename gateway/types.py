"""Requests as received, as values in one form for all front ends. Their parameters are the API's protobuf messages.

A field that is absent in a request is absent in its messages. `GenerationRequest`, in replicas/generation_request.py,
is the same request after validation and tokenization, with all defaults set.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import cache
from operator import attrgetter
from typing import Any, Literal, cast

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from quire.common.v1.common_pb2 import Constraint, OutputOptions, SamplingParameters, StoppingParameters
from quire.gateway.v1.generation_pb2 import TemplateOptions, Tool, ToolCall, ToolChoice

TokenIds = Sequence[int] | NDArray[np.int32]
MAX_ENTRIES = 1 << 20
"""The maximum length of a list in a message. No limit is above it; a longer list is rejected without a copy."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A prompt as text. `add_special_tokens` is whether the tokenizer adds its special tokens to it."""

    text: str
    add_special_tokens: bool = True


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message of a conversation. `name` distinguishes speakers of one role, if the chat template uses it.

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
    """A conversation to answer. The content of the answer must match `response_format`. With `drops_turns`, the oldest
    turns are dropped if the conversation is too long."""

    messages: Sequence[ChatMessage]
    tools: Sequence[Tool] = ()
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    response_format: Constraint | None = None
    template_options: TemplateOptions | None = None
    template_arguments: Mapping[str, Any] | None = None
    """As in `template_options`, whose objects have no order and whose numbers are floats; None: what that has."""
    template: str | None = None
    """The caller's own chat template."""
    drops_turns: bool = False


class ModelKind(Enum):
    """The kind of answers of a model; the value is how errors say it."""

    TEXT = "generates text"
    VECTORS = "gives embeddings"
    """The vector of a prompt."""
    SCORES = "ranks documents"
    """The score of a prompt that is a pair of texts."""


class Clamp(Enum):
    """Whether a max_tokens beyond the rest of the context is reduced to it, or rejected."""

    NEVER = auto()
    AS_SET = auto()
    """As the gateway's setting says."""
    ALWAYS = auto()


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """The part of one sequence that the caller already has: tokens, and optionally the number of characters of their
    text and the sum of their log probabilities."""

    token_ids: Sequence[int]
    num_characters: int | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request as the caller sent it, before validation.

    Requests with a higher `priority` run earlier. Errors show `priority_sign * priority`, the caller's value.
    """

    prompt: Prompt | None
    model: str | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingParameters = field(default_factory=StoppingParameters)
    output: OutputOptions = field(default_factory=OutputOptions)
    as_written: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Values that the messages cannot hold exactly as the caller wrote them, by the path of the field. The validator
    checks these instead, and rejects each value outside the range of its field."""
    truncate_prompt_tokens: int | None = None
    """The number of last tokens of the prompt to keep; -1 means the maximum length of a prompt."""
    truncation_side: Literal["left", "right"] = "left"
    """The side on which tokens are cut off."""
    clamp: Clamp = Clamp.NEVER
    request_id: str | None = None
    priority: int | None = None
    priority_sign: Literal[1, -1] = 1
    durable: bool = False
    cache_salt: str | None = None
    """Requests with different salts do not share cached prefixes."""
    retain_ms: int | None = None
    """The time for which the cache keeps the blocks of prompt and answer afterwards, if possible."""
    expected_tokens: int | None = None
    """As in GenerationRequest."""
    front_end: bytes = b""
    """As in GenerationRequest, and so is the next field."""
    is_steady: bool = False
    kind: ModelKind = ModelKind.TEXT
    """The kind of the answer."""
    cuts_text: Literal["start", "end"] | None = None
    """A text that is too long is cut at its end; the special tokens behind it are kept."""
    continue_from: Sequence[HeldSequence] = ()
    """The output of an earlier request: one entry per sequence, or empty."""

    @property
    def is_truncated(self) -> bool:
        """Whether a prompt that is too long is truncated."""
        drops_turns = isinstance(self.prompt, ChatPrompt) and self.prompt.drops_turns
        return drops_turns or self.truncate_prompt_tokens is not None or self.cuts_text is not None

    def asked(self, path: str) -> Any:
        """The value that the caller wrote for a field, for example of "sampling.top_p"; None if it is absent."""
        if path in self.as_written:
            return self.as_written[path]
        parent_of, name, has_presence = _place_of(path)
        message = parent_of(self)
        return None if has_presence and not message.HasField(name) else getattr(message, name)


@cache
def _place_of(path: str) -> tuple[Callable[[RequestOptions], Message], str, bool]:
    """Locates the field at a path: a function from options to its message, its name, and whether it can be absent."""
    parents, _, name = path.rpartition(".")
    parent_of: Callable[[RequestOptions], Message] = attrgetter(parents)
    return parent_of, name, parent_of(RequestOptions(None)).DESCRIPTOR.fields_by_name[name].has_presence


def optional(message: Message, field: str) -> Any:
    """The value of an `optional` field; None if it is absent."""
    return getattr(message, field) if message.HasField(field) else None


def write(message: Message, path: str, value: Any, as_written: dict[str, Any]) -> None:
    """Sets the field at the end of `path` to a caller's value; None leaves it absent. A value that the field cannot
    hold exactly is also stored in `as_written`."""
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
