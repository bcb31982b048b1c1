"""Sequences, and the groups in which they are scheduled."""

import enum
from dataclasses import dataclass, field

from scheduler_svc.core.block import BlockId
from scheduler_svc.core.logprobs import PositionLogprobs
from scheduler_svc.core.prefix_cache import PrefixHashes
from scheduler_svc.core.request import EmittedSequence, Request


class SequenceStatus(enum.Enum):
    """WAITING -> RUNNING -> (WAITING again by recompute) -> RUNNING -> FINISHED."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.Enum):
    """Why a sequence ended by itself."""

    STOP = enum.auto()
    LENGTH = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of text being generated.

    `token_ids` are prompt and output as far as results came back, without the tokens that steps in flight will sample.
    `row` is its slot in the worker's batch, None unless it runs. Where sequences are selected at the end, log
    probabilities are summed in `cumulative_logprob` and those to be delivered wait in `held_back`.
    """

    request: Request
    index: int
    token_ids: list[int]
    prefix_hashes: PrefixHashes
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[BlockId] = field(default_factory=list)
    row: int | None = None
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0
    held_back: list[PositionLogprobs] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt)

    def end_reason(self) -> FinishReason | None:
        """Whether the sequence ends with its newest token."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.request.max_len:
            return FinishReason.LENGTH
        return None


@dataclass(slots=True)
class Timeline:
    """When things happened to a request, in seconds of the caller's clock."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """All sequences of one request. It is scheduled, preempted and resumed as one (the paper's section 4.5).

    `arrival` numbers groups in order of arrival; preemption takes the highest. `cached_tokens` are the prompt tokens
    that the prefix cache had when the group first ran, None before.
    """

    request: Request
    arrival: int
    sequences: list[Sequence]
    timeline: Timeline
    preemptions: int = 0
    cached_tokens: int | None = None

    @classmethod
    def of(cls, request: Request, arrival: int, block_size: int, now: float) -> "SequenceGroup":
        emitted = request.emitted or [EmittedSequence(())] * request.num_sequences
        sequences = [
            Sequence(
                request,
                index,
                [*request.prompt, *each.token_ids],
                PrefixHashes(request.tenant, block_size),
                SequenceStatus.FINISHED if each.has_ended else SequenceStatus.WAITING,
            )
            for index, each in enumerate(emitted)
        ]
        return cls(request, arrival, sequences, Timeline(now))

    @property
    def unfinished(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if sequence.status is not SequenceStatus.FINISHED]

    @property
    def is_one_prompt(self) -> bool:
        """Whether several sequences are still to be sampled from the same prompt, which one of them computes."""
        return len(self.sequences) > 1 and not any(sequence.num_output_tokens for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def finished(self) -> bool:
        return not self.unfinished
