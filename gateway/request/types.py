"""What a caller asks for, in one form for all front ends: the contract's own messages.

`RequestOptions` are a request as it came in: an absent field is absent in its messages. `GenerationRequest` is what
becomes of it once it is validated, tokenized and completed with defaults.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any, Literal

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray

from quire.common.v1.common_pb2 import OutputOptions, SamplingParameters, StoppingParameters
from quire.tracing import TraceContext

MAX_ENTRIES = 1 << 20
"""Of a list in a message. No limit is above it; a longer one is refused without being copied."""


@dataclass(frozen=True, slots=True)
class TextPrompt:
    text: str


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """`name` says who speaks among several of one role; whether that is part of the prompt the template decides."""

    role: str
    content: str
    name: str | None = None


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    messages: Sequence[ChatMessage]


Prompt = TextPrompt | TokenPrompt | ChatPrompt


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """What the caller holds of one sequence: its tokens, characters of their text where it counts these, and the sum of
    their log probabilities where it has that."""

    token_ids: Sequence[int]
    num_characters: int | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """One request as the caller sent it, nothing checked.

    A higher `priority` runs earlier; `priority_sign` times it is what the caller wrote, which errors show.
    """

    prompt: Prompt | None
    model: str | None = None
    sampling: SamplingParameters = field(default_factory=SamplingParameters)
    stopping: StoppingParameters = field(default_factory=StoppingParameters)
    output: OutputOptions = field(default_factory=OutputOptions)
    as_written: Mapping[str, Any] = field(default_factory=dict)
    """Values that a field of the messages does not hold as the caller wrote them, by the field's path. The validator
    judges these, and refuses each that its field cannot hold at all."""
    request_id: str | None = None
    priority: int | None = None
    priority_sign: Literal[1, -1] = 1
    durable: bool = False
    continue_from: Sequence[HeldSequence] = ()
    """What an earlier request gave; one entry a sequence, or none."""

    def asked(self, path: str) -> Any:
        """What the caller wrote in a field of the messages, for example "sampling.top_p"; None where it is absent."""
        if path in self.as_written:
            return self.as_written[path]
        parent_of, name, has_presence = _place_of(path)
        message: Message = parent_of(self)
        return None if has_presence and not message.HasField(name) else getattr(message, name)


_GROUPS = {"sampling": SamplingParameters, "stopping": StoppingParameters, "output": OutputOptions}


@cache
def _place_of(path: str) -> tuple[Callable[[RequestOptions], Message], str, bool]:
    """Where a path leads: to the message that has the field, the field's name, and whether that can be absent."""
    group, *parts, name = path.split(".")
    descriptor = _GROUPS[group].DESCRIPTOR
    for part in parts:
        descriptor = descriptor.fields_by_name[part].message_type
    return attrgetter(path.rpartition(".")[0]), name, descriptor.fields_by_name[name].has_presence


def write(message: Message, path: str, value: Any, as_written: dict[str, Any]) -> None:
    """Writes what a caller wrote into the field that `path` ends with; None leaves it absent. What the field does not
    hold as it was written goes to `as_written`."""
    if value is None:
        return
    name = path.rpartition(".")[2]
    try:
        if isinstance(value, dict):
            getattr(message, name).update(value)
            is_held = not any(map(math.isinf, getattr(message, name).values()))
        elif isinstance(value, list):
            is_held = len(value) <= MAX_ENTRIES
            if is_held:
                getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
            is_held = getattr(message, name) == value
    except ValueError:
        # Out of the range of the field's type, or no valid Unicode.
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

    def stopping_at(self, max_tokens: int) -> StoppingParameters:
        """`stopping` for a request that generates at most so many tokens."""
        if self.stopping.max_tokens == max_tokens:
            return self.stopping
        stopping = StoppingParameters(max_tokens=max_tokens)
        stopping.MergeFrom(self.stopping)
        return stopping


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
    """Without a seed: requests of one call that names none share all but that."""
    stopping: StoppingParameters
    output: OutputOptions
    seed: int
    eos_token_ids: Sequence[int] = ()
    """The model's; none where they are ignored."""
    row_sampling: bytes = b""
    """What the worker samples by: a serialized quire.common.v1.RowSampling."""
    priority: int = 0
    durable: bool = False
    """It runs on without its reader for a while, and can be resumed."""
    nonce: int = 0
    """Tells it from others that have its id before or after it; 64 bits."""
    trace: TraceContext | None = None
    """The span that schedulers continue, where the request is traced."""

    @property
    def num_sequences(self) -> int:
        """How many are returned, out of `best_of` that are sampled, or that a beam search finds."""
        return self.sampling.n

    @property
    def best_of(self) -> int:
        return self.sampling.best_of

    @property
    def logprobs(self) -> int | None:
        return self.output.logprobs if self.output.HasField("logprobs") else None

    @property
    def prompt_logprobs(self) -> int | None:
        return self.output.prompt_logprobs if self.output.HasField("prompt_logprobs") else None

    @property
    def ending_token_ids(self) -> frozenset[int]:
        return frozenset((*self.stopping.stop_token_ids, *self.eos_token_ids))

    @property
    def chooses(self) -> bool:
        """Whether its sequences are chosen among others, and come when all of those have ended."""
        return self.best_of > self.num_sequences or self.sampling.HasField("beam_search")
