"""Sequences, and the groups in which they are scheduled."""

import enum
from dataclasses import dataclass, field

from quire.messages.logprob_columns import LogprobLog
from scheduler_svc.core.beam_search import BeamSearch, Candidates, Hypothesis
from scheduler_svc.core.moves import KvSource
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import CachedStart, PrefixHashes
from scheduler_svc.core.request import EmittedSequence, Request


class SequenceStatus(enum.Enum):
    """WAITING -> RUNNING -> (SWAPPED | WAITING again by recompute) -> RUNNING -> FINISHED."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    SWAPPED = enum.auto()
    FINISHED = enum.auto()


class FinishReason(enum.Enum):
    """Why a sequence ended without an error."""

    STOP = enum.auto()
    LENGTH = enum.auto()


class Milestone(enum.Enum):
    """Recorded events of a request between its first step and its end."""

    SWAPPED_OUT = enum.auto()
    RECOMPUTED = enum.auto()
    """It was preempted, and its prompt and output so far are to be computed again."""
    WORKER_LOST = enum.auto()
    RESUMED = enum.auto()


@dataclass(slots=True, eq=False)
class Sequence:
    """One line of text that is being generated.

    `token_ids` are the prompt and the output of all results so far, without tokens that steps in flight will sample.
    `row` is its slot in the worker's batch, None unless it runs or waits there to be forked. While it is swapped,
    `block_table` names blocks of the host pool, which hold keys and values of its first `num_swapped_tokens` tokens.
    If sequences are selected at the end, `cumulative_logprob` sums log probabilities, and `held_back` keeps the ones to
    deliver. While it waits or is swapped, `cached_start` has its blocks that `BlockManager` found in the prefix cache.
    `num_drafted` counts its verified drafts, and `num_accepted` the drafts that became tokens.
    """

    request: Request
    index: int
    token_ids: list[int]
    prefix_hashes: PrefixHashes
    status: SequenceStatus = SequenceStatus.WAITING
    block_table: list[BlockId] = field(default_factory=list[BlockId])
    num_swapped_tokens: int = 0
    row: int | None = None
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0
    held_back: LogprobLog = field(default_factory=LogprobLog)
    cached_start: CachedStart | None = None
    num_drafted: int = 0
    num_accepted: int = 0

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt)

    @property
    def num_emitted_tokens(self) -> int:
        """Tokens of its output that an earlier scheduler produced."""
        emitted = self.request.emitted
        return len(emitted[self.index].token_ids) if emitted else 0

    @property
    def output(self) -> list[int]:
        return self.token_ids[len(self.request.prompt) :]

    @property
    def max_cached_tokens(self) -> int:
        """The maximum number of its tokens that cached blocks can replace. Cached tokens have no logits: to continue,
        the logits of the last token are needed; for the log probability of a prompt token, the logits of the token
        before it. A sequence that has output has reported the latter."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs is None or self.num_output_tokens > 0:
            return self.num_tokens - 1
        return min(self.num_tokens, sampling.prompt_logprobs_start) - 1

    def become_fork_of(self, parent: "Sequence") -> None:
        """Copies all that the parent has except its blocks and its row."""
        self.token_ids = list(parent.token_ids)
        self.prefix_hashes = parent.prefix_hashes.copy()
        self.held_back = parent.held_back.copy()
        self.cached_start = None

    def end_reason(self) -> FinishReason | None:
        """The reason why the sequence ends with its newest token; None if it does not end."""
        if self.token_ids[-1] in self.request.stop_token_ids:
            return FinishReason.STOP
        if self.num_tokens >= self.request.max_len:
            return FinishReason.LENGTH
        return None


@dataclass(slots=True, eq=False)
class BeamGroup:
    """A group's search, and the sequences of its live beams, best first; there are none if the search is over.

    `candidates` has the candidates that came since the last step of the search, by sequence index. The search advances
    once all beams have theirs, which is within one step except after a preemption. `logprobs` has the log probabilities
    of the best finished hypotheses, if the request wants them. `num_generated` counts the tokens of all beams,
    including dropped ones.
    """

    search: BeamSearch
    beams: list[Sequence]
    candidates: dict[int, Candidates] = field(default_factory=dict[int, Candidates])
    logprobs: dict[Hypothesis, LogprobLog] = field(default_factory=dict[Hypothesis, LogprobLog])
    num_generated: int = 0


@dataclass(slots=True)
class Timeline:
    """Times of a request's events, in seconds of the caller's clock. `first_token` is the first token of this
    scheduler. `milestones` are in order."""

    arrived: float
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None
    milestones: list[tuple[Milestone, float]] = field(default_factory=list[tuple[Milestone, float]])

    def run(self, now: float) -> None:
        """Records that the request is in the batch from now on."""
        if self.started is None:
            self.started = now
        else:
            self.milestones.append((Milestone.RESUMED, now))

    def note(self, milestone: Milestone, now: float) -> None:
        self.milestones.append((milestone, now))


@dataclass(slots=True, eq=False)
class SequenceGroup:
    """All sequences of one request. It is scheduled, preempted, swapped and resumed as one (the paper's section 4.5).

    `order` is its place in queues: unique, the lowest goes first. `cached_tokens` are the prompt tokens that the prefix
    cache had when the group first ran, None before. `source` is where its blocks can be fetched, until that is tried or
    the group runs. `has_been_passed` if other groups went first while its blocks were fetched, until it runs. `beams`
    is set if the sequences are the beams of a search.
    """

    request: Request
    order: int
    sequences: list[Sequence]
    timeline: Timeline
    beams: BeamGroup | None = None
    preemptions: int = 0
    cached_tokens: int | None = None
    source: KvSource | None = None
    has_been_passed: bool = False

    @classmethod
    def of(cls, request: Request, order: int, block_size: int, now: float) -> "SequenceGroup":
        """A group that arrives at `now`, in seconds, with its already emitted tokens."""
        emitted = request.emitted or [EmittedSequence(())] * request.num_sequences
        sequences = [
            Sequence(
                request,
                index,
                [*request.prompt, *each.token_ids],
                PrefixHashes(request.cache_root, block_size),
                SequenceStatus.FINISHED if each.has_ended else SequenceStatus.WAITING,
            )
            for index, each in enumerate(emitted)
        ]
        group = cls(request, order, sequences, Timeline(now), source=request.source)
        if request.beam is not None:
            search = BeamSearch(request.beam, request.max_tokens, request.stop_token_ids)
            group.beams = BeamGroup(search, list(sequences))
        return group

    @property
    def unfinished(self) -> list[Sequence]:
        finished = SequenceStatus.FINISHED
        return [sequence for sequence in self.sequences if sequence.status is not finished]

    @property
    def computing(self) -> list[Sequence]:
        """The sequences that need blocks of their own to continue. One sequence without output computes the prompt, and
        all others without output fork from it. It comes first, so that sequences with output can share its blocks."""
        unfinished = self.unfinished
        if len(unfinished) == 1:
            return unfinished
        without_output = [sequence for sequence in unfinished if not sequence.num_output_tokens]
        return [*without_output[:1], *(sequence for sequence in unfinished if sequence.num_output_tokens)]

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens that a group without blocks computes: the prompt, once, and each sequence's own output."""
        return len(self.request.prompt) + sum(sequence.num_output_tokens for sequence in self.unfinished)

    @property
    def finished(self) -> bool:
        return not self.unfinished

    def restart(self) -> None:
        """The group left the batch, and its sequences wait. An interrupted search gets its candidates again."""
        for sequence in self.unfinished:
            sequence.status = SequenceStatus.WAITING
        if self.beams is not None:
            self.beams.candidates.clear()

    def move_to_blocks_of(self, block_size: int) -> None:
        """Moves the group to another pool: a block of another size has other tokens, and so another hash."""
        for sequence in self.unfinished:
            sequence.prefix_hashes = PrefixHashes(self.request.cache_root, block_size)
