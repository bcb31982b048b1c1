"""What a scheduler says, as values."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gateway.requests.events import FinishReason, PositionLogprobs, Usage
from quire.logprob_columns import LogprobColumns
from quire.rpc.errors import QuireError


@dataclass(frozen=True, slots=True)
class Welcome:
    """What a replica is. See quire.scheduler.v1.Welcome."""

    scheduler_epoch: int
    vocab_size: int
    max_model_len: int
    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    architecture: str
    dtype: str
    max_logprobs: int


@dataclass(slots=True)
class TokenRun:
    """Consecutive tokens of one sequence; `logprobs` has one entry a token, or none."""

    handle: int
    sequence_index: int
    offset: int
    token_ids: list[int]
    logprobs: list[PositionLogprobs] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class PromptRun:
    """Log probabilities of consecutive prompt tokens; `first_position` is the index of the first of them."""

    handle: int
    first_position: int
    token_ids: NDArray[np.int32]
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class SequenceEnded:
    """A sequence ended after `num_tokens` tokens, which came before."""

    handle: int
    sequence_index: int
    num_tokens: int
    reason: FinishReason
    stop_token_id: int | None
    cumulative_logprob: float | None


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """All sequences of a request ended. `usage` is None where the gateway ended it and the scheduler does not know it
    (any more)."""

    handle: int
    usage: Usage | None


@dataclass(frozen=True, slots=True)
class RequestFailed:
    """A request was refused, or failed while it ran."""

    handle: int
    error: QuireError


@dataclass(frozen=True, slots=True)
class EventBatch:
    """All that happened to the gateway's requests in one or more steps, in the order in which it is to be applied."""

    runs: list[TokenRun]
    ended: list[SequenceEnded]
    completed: list[RequestEnded]
    failed: list[RequestFailed]
    prompt_runs: list[PromptRun] = field(default_factory=list)
    """To be applied before `runs`: they came no later than the tokens that follow them."""
