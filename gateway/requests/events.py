"""What a client learns about its request, in the order chunks, one Finished per sequence, one Completed."""

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class FinishReason(Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    ERROR = "error"


class Logprob(NamedTuple):
    """Natural logarithm of a token's probability; `rank` is 1 for the most likely token."""

    token_id: int
    logprob: float
    rank: int


class PositionLogprobs(NamedTuple):
    """The log probabilities at one position: of the chosen token, and of the most likely ones, best first."""

    chosen: Logprob
    top: tuple[Logprob, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New tokens of one sequence. `offset` counts the tokens before them; `logprobs` has one entry a token, or none."""

    sequence_index: int
    offset: int
    token_ids: list[int]
    text: str
    logprobs: Collection[PositionLogprobs] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a sequence of `num_tokens` tokens; `stop_string` or `stop_token_id` is what ended it, if one did."""

    sequence_index: int
    num_tokens: int
    reason: FinishReason
    stop_string: str | None = None
    stop_token_id: int | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost; times in milliseconds, as the contract defines them."""

    prompt_tokens: int
    generated_tokens: int
    cached_tokens: int = 0
    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    preemptions: int = 0


@dataclass(frozen=True, slots=True)
class Completed:
    """`prompt_logprobs` has one entry for each prompt token from the second on, where they were asked."""

    usage: Usage
    prompt_logprobs: Collection[PositionLogprobs] = ()


@dataclass(frozen=True, slots=True)
class GeneratedSequence:
    """A finished sequence as a whole."""

    token_ids: list[int]
    text: str
    logprobs: Collection[PositionLogprobs]
    finished: Finished


Event = Chunk | Finished | Completed
