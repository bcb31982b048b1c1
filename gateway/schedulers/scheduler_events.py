"""What a scheduler says, as values."""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gateway.requests.events import FinishReason, Usage
from quire.compatibility import ModelFingerprint, ProtocolVersions
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
    durable_grace_s: float = field(default=0.0, kw_only=True)
    architecture: str
    dtype: str
    max_logprobs: int
    protocol: ProtocolVersions
    model: ModelFingerprint


@dataclass(slots=True)
class TokenRun:
    """Consecutive tokens of one sequence; `logprobs` has one position a token, where there are any."""

    handle: int
    sequence_index: int
    offset: int
    token_ids: list[int]
    logprobs: LogprobColumns | None = None

    def piece(self, start: int, end: int) -> "TokenRun":
        """The tokens from `start` to before `end`, as far as there are any."""
        token_ids = self.token_ids[start:end]
        logprobs = None if self.logprobs is None else self.logprobs.part(start, start + len(token_ids))
        return TokenRun(self.handle, self.sequence_index, self.offset + start, token_ids, logprobs)


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


RequestEvent = TokenRun | PromptRun | SequenceEnded | RequestEnded | RequestFailed


@dataclass(frozen=True, slots=True)
class EventBatch:
    """All that happened to the gateway's requests in one or more steps, in the order in which it is to be applied."""

    runs: list[TokenRun]
    ended: list[SequenceEnded]
    completed: list[RequestEnded]
    failed: list[RequestFailed]
    prompt_runs: list[PromptRun] = field(default_factory=list)
    """To be applied before `runs`: they came no later than the tokens that follow them."""

    def parts(self, max_tokens: int) -> "list[EventBatch]":
        """Batches of at most that many tokens, or about as many ends, which are this one when they are applied in
        order. A request's completion is in the same one as its ends."""
        if sum(len(run.token_ids) for run in self.runs) + len(self.ended) <= max_tokens:
            return [self]
        parts: list[list[TokenRun]] = [[]]
        room = max_tokens
        for run in self.runs:
            start = 0
            while start < len(run.token_ids):
                if not room:
                    parts.append([])
                    room = max_tokens
                piece = run.piece(start, start + room)
                parts[-1].append(piece)
                start += len(piece.token_ids)
                room -= len(piece.token_ids)
        batches = [EventBatch([], [], [], [], self.prompt_runs), *(EventBatch(runs, [], [], []) for runs in parts)]
        ends: dict[int, list[SequenceEnded]] = {completion.handle: [] for completion in self.completed}
        for end in self.ended:
            ends.setdefault(end.handle, []).append(end)
        completed = {completion.handle: completion for completion in self.completed}
        for handle, of_request in ends.items():
            if len(batches[-1].ended) >= max_tokens or batches[-1].runs:
                batches.append(EventBatch([], [], [], []))
            batches[-1].ended.extend(of_request)
            if handle in completed:
                batches[-1].completed.append(completed[handle])
        return [*batches, EventBatch([], [], [], self.failed)]
