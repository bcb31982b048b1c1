"""Sequences, and the groups in which they are scheduled."""

import enum
from dataclasses import dataclass, field
from typing import Self

from quire.messages.logprob_columns import LogprobLog
from quire.messages.prefix_hashes import BlockHash, PrefixHash
from scheduler_svc.core.beam_search import BeamSearch, Candidates, Hypothesis
from scheduler_svc.core.moves import KvSource
from scheduler_svc.core.paging import sequence as paging
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.paging.sequence import SequenceStatus
from scheduler_svc.core.prefix_index import CachedStart, PrefixHashes
from scheduler_svc.core.request import EmittedSequence, Request


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


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence(paging.Sequence):
    """A sequence of a `Request`.

    If sequences are selected at the end, `cumulative_logprob` sums log probabilities, and `held_back` keeps the ones to
    deliver. While it waits or is swapped, `cached_start` has its blocks that `BlockManager` found in the prefix cache.
    `num_drafted` counts its verified drafts, and `num_accepted` the drafts that became tokens. It has blocks of
    windowed groups of layers up to the logical index `windows_end`.

    Its state is in `state_blocks`, which forks may share until they change it. `newest_checkpoint` are the blocks of
    its last checkpoint, if that gives way to the next one, with their names; they may be in other use by now.
    `partings` are numbers of its first tokens after which another sequence goes on in another way. It waits for the
    `leader`, a sequence of the same request, to compute the tokens that both begin with.
    """

    request: Request
    prefix_hashes: PrefixHashes
    finish_reason: FinishReason | None = None
    cumulative_logprob: float = 0.0
    held_back: LogprobLog = field(default_factory=LogprobLog)
    cached_start: CachedStart | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    windows_end: int = 0
    state_blocks: list[BlockId] = field(default_factory=list[BlockId])
    newest_checkpoint: list[tuple[BlockId, BlockHash]] = field(default_factory=list[tuple[BlockId, BlockHash]])
    partings: set[int] = field(default_factory=set[int])
    leader: "Sequence | None" = None
    is_finite: bool = True
    """All chunks of its prompt were finite so far."""

    @classmethod
    def of(cls, request: Request, index: int, token_ids: list[int], block_size: int) -> Self:
        """A waiting sequence of the request, with these tokens so far."""
        return cls(
            key=request.key,
            index=index,
            token_ids=token_ids,
            num_prompt_tokens=len(request.prompt),
            max_len=request.max_len,
            stop_token_ids=request.stop_token_ids,
            is_dependent=request.beam is not None,
            request=request,
            prefix_hashes=PrefixHashes(request.cache_root, block_size),
        )

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

    @property
    def num_shareable(self) -> int:
        """Blocks of tokens that it may take from other sequences."""
        return self.max_cached_tokens // self.prefix_hashes.block_size

    @property
    def shareable_hashes(self) -> list[PrefixHash]:
        return self.prefix_hashes.first(self.num_shareable, self.token_ids)

    @property
    def full_hashes(self) -> list[PrefixHash]:
        return self.prefix_hashes.first(self.num_tokens // self.prefix_hashes.block_size, self.token_ids)

    def become_fork_of(self, parent: "Sequence") -> None:
        """Copies all that the parent has except its blocks and its row."""
        self.token_ids = list(parent.token_ids)
        self.prefix_hashes = parent.prefix_hashes.copy()
        self.held_back = parent.held_back.copy()
        self.cached_start = None
        self.is_finite = parent.is_finite

    def lose_blocks(self) -> None:
        """The worker was lost, and the pool with it."""
        self.row, self.partings, self.leader, self.is_finite = None, set(), None, True
        self.block_table, self.state_blocks, self.newest_checkpoint = [], [], []

    def end_reason(self) -> FinishReason | None:
        """The reason why the sequence ends with its newest token; None if it does not end."""
        if self.token_ids[-1] in self.stop_token_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.num_tokens >= self.max_len else None


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

    def record(self, milestone: Milestone, now: float) -> None:
        self.milestones.append((milestone, now))


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceGroup(paging.SequenceGroup[Sequence]):
    """All sequences of one `Request`.

    `cached_tokens` are the prompt tokens that the prefix cache had when the group first ran, None before. `source` is
    where its blocks can be fetched, until that is tried or the group runs. `others_went_first` while its blocks were
    fetched, until it runs. `beams` is set if the sequences are the beams of a search.
    """

    request: Request
    timeline: Timeline
    beams: BeamGroup | None = None
    cached_tokens: int | None = None
    source: KvSource | None = None
    others_went_first: bool = False

    @classmethod
    def of(cls, request: Request, order: int, block_size: int, now: float) -> Self:
        """A group that arrives at `now`, in seconds, with its already emitted tokens."""
        emitted = request.emitted or [EmittedSequence(())] * request.num_sequences
        sequences: list[Sequence] = []
        for index, each in enumerate(emitted):
            sequences.append(Sequence.of(request, index, [*request.prompt, *each.token_ids], block_size))
            if each.has_ended:
                sequences[-1].status = SequenceStatus.FINISHED
        beams = None
        if request.beam is not None:
            search = BeamSearch(request.beam, request.max_tokens, request.stop_token_ids)
            beams = BeamGroup(search, list(sequences))
        return cls(
            key=request.key,
            order=order,
            sequences=sequences,
            request=request,
            timeline=Timeline(now),
            beams=beams,
            source=request.source,
        )

    @property
    def num_tokens(self) -> int:
        return sum(sequence.num_tokens for sequence in self.sequences)

    @property
    def num_tokens_to_compute(self) -> int:
        """Tokens that a group without blocks computes: the prompt, once, and each sequence's own output."""
        return len(self.request.prompt) + sum(sequence.num_output_tokens for sequence in self.unfinished)

    def restart(self) -> None:
        """The group left the batch, and its sequences wait. An interrupted search gets its candidates again."""
        super(SequenceGroup, self).restart()
        if self.beams is not None:
            self.beams.candidates.clear()

    def move_to_blocks_of(self, block_size: int) -> None:
        """Moves the group to another pool: a block of another size has other tokens, and so another hash."""
        for sequence in self.unfinished:
            sequence.prefix_hashes = PrefixHashes(self.request.cache_root, block_size)
