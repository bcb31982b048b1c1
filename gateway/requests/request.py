"""What a caller asks for, as values that both front ends share.

`...Options` are requests as they came in: None stands for an absent field. `GenerationRequest` is what they become once
validated, tokenized and completed with defaults.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from quire.tracing import TraceContext


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


class EarlyStopping(Enum):
    """When a beam search ends; quire.common.v1.EarlyStopping says what each means."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class BeamSearchOptions:
    """`early_stopping` is a number where the caller sent one that means nothing."""

    beam_width: int
    length_penalty: float | None = None
    early_stopping: EarlyStopping | int = EarlyStopping.FALSE


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    n: int | None = None
    best_of: int | None = None
    beam_search: BeamSearchOptions | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: Sequence[int] = ()
    bad_words: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class StoppingOptions:
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_string: bool = False


@dataclass(frozen=True, slots=True)
class OutputOptions:
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_special_tokens: bool = False


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
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stopping: StoppingOptions = field(default_factory=StoppingOptions)
    output: OutputOptions = field(default_factory=OutputOptions)
    request_id: str | None = None
    priority: int | None = None
    priority_sign: Literal[1, -1] = 1
    durable: bool = False
    continue_from: Sequence[HeldSequence] = ()
    """What an earlier request gave; one entry a sequence, or none."""


@dataclass(frozen=True, slots=True)
class BeamSearch:
    """A beam search, every default filled in. The score of a hypothesis is its log probability divided by
    length ** length_penalty."""

    width: int
    length_penalty: float
    early_stopping: EarlyStopping


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is chosen, every default filled in. temperature 0 is greedy; top_k 0 keeps all.

    `allowed_token_ids` allows all when it is empty; `bad_token_sequences` are bad_words as tokens. With `beam_search`
    nothing is drawn: temperature, top_k, top_p and min_p have the values by which they change nothing.
    """

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    bad_token_sequences: tuple[tuple[int, ...], ...] = ()
    beam_search: BeamSearch | None = None


@dataclass(frozen=True, slots=True)
class Stopping:
    """When a sequence ends. `stop` is matched by the gateway; the token ids by the scheduler.

    Nothing of both ends it before `min_tokens` tokens. `include_stop_string` keeps what was matched in the text.
    """

    max_tokens: int
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    eos_token_ids: tuple[int, ...]
    min_tokens: int = 0
    include_stop_string: bool = False

    @property
    def ending_token_ids(self) -> frozenset[int]:
        return frozenset(self.stop_token_ids) | frozenset(self.eos_token_ids)


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A request that was checked and can be submitted. `prompt_token_ids` is int32, shape [prompt length].

    Its id is unique among the running requests of its tenant. `num_sequences` are returned, out of `best_of` that are
    sampled, or that a beam search finds.
    """

    request_id: str
    tenant: str
    prompt_token_ids: NDArray[np.int32]
    sampling: Sampling
    stopping: Stopping
    logprobs: int | None
    include_special_tokens: bool
    priority: int
    ignore_eos: bool
    num_sequences: int = 1
    best_of: int = 1
    prompt_logprobs: int | None = None
    durable: bool = False
    """It runs on without its reader for a while, and can be resumed."""
    nonce: int = 0
    """Tells it from others that have its id before or after it; 64 bits."""
    trace: TraceContext | None = None
    """The span that schedulers continue, where the request is traced."""

    @property
    def chooses(self) -> bool:
        """Whether its sequences are chosen among others, and come when all of those have ended."""
        return self.best_of > self.num_sequences or self.sampling.beam_search is not None
