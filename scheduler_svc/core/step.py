"""The values between the core and the service: a step, its result, and the events for clients."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple, Self

import numpy as np

from quire.messages.logprob_columns import LogprobColumns, LogprobLog
from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.beam_search import Candidates
from scheduler_svc.core.paging import batch
from scheduler_svc.core.paging.batch import Array
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.request import Handle, RequestKey, RowSampling
from scheduler_svc.core.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class RowAssignment(batch.RowAssignment):
    """A sequence that enters a row, with how its tokens are drawn."""

    sampling: RowSampling
    num_prompt_tokens: int
    traceparent: str | None = None
    adapter_slot: int | None = None
    draft_scope: bytes = b""
    state_blocks: SequenceOf[BlockId] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan(batch.StepPlan):
    """One step of all workers. Arrays are int64.

    reseed                           row and seed of each child that draws with its own seed
    sealed                           blocks whose content is final, and their hashes
    short_lived                      of these blocks, the ones of checkpoints that later ones are to replace
    state_tables                     rows, and the blocks of the state of each from now on
    checkpoints                      rows, numbers of tokens, and blocks to which the state after these is written, too
    max_drafts               [s]     number of tokens beyond one by which each sample may extend its row; None for none
    max_passes                       maximum runs of the model; `max_drafts` counts one token for each run but the first

    While steps in flight have drafts of a row, `num_computed_tokens` is the least that they may leave computed.
    """

    assign: SequenceOf[RowAssignment]
    reseed: SequenceOf[tuple[int, int]]
    sealed: SequenceOf[tuple[BlockId, BlockHash]]
    max_drafts: Array | None = None
    max_passes: int = 1
    state_tables: SequenceOf[tuple[int, SequenceOf[BlockId]]] = ()
    checkpoints: SequenceOf[tuple[int, int, SequenceOf[BlockId]]] = ()
    short_lived: SequenceOf[BlockId] = ()

    @property
    def num_tokens(self) -> int:
        return int(self.num_new_tokens.sum())


@dataclass(frozen=True, slots=True)
class StepWork:
    """Amounts of work that determine a step's duration.

    num_tokens       tokens that the step computes
    num_samples      tokens that it samples, one for each row of logits
    num_chunk_tokens the part of `num_tokens` in chunks of prompts: rows with more than one token
    num_chunks       rows with more than one token
    context_tokens   tokens whose keys and values are read: for each row all tokens up to its newest
    attended_pairs   pairs of a new token and a token that it attends to
    copied_blocks    blocks copied inside the pool
    swapped_blocks   blocks moved between the pool and host memory, both ways
    """

    num_tokens: int
    num_samples: int
    num_chunk_tokens: int
    num_chunks: int
    context_tokens: int
    attended_pairs: int
    copied_blocks: int = 0
    swapped_blocks: int = 0

    @classmethod
    def of(cls, plan: StepPlan) -> Self:
        new, computed, num_tokens = plan.num_new_tokens, plan.num_computed_tokens, plan.num_tokens
        is_chunk = new > 1
        num_chunks = int(np.count_nonzero(is_chunk))
        return cls(
            num_tokens=num_tokens,
            num_samples=len(plan.samples),
            num_chunk_tokens=int(new[is_chunk].sum()) if num_chunks else 0,
            num_chunks=num_chunks,
            context_tokens=num_tokens + int(computed.sum()),
            attended_pairs=int(new @ (2 * computed + new + 1)) // 2,
            copied_blocks=len(plan.copy),
            swapped_blocks=len(plan.swap_in) + len(plan.swap_out),
        )


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A planned step whose result is still to come. Arrays are int64[n].

    Attributes:
        rows: The rows that sample.
        incarnations: The incarnation of each of `rows`, as in `RowTable`.
        max_drafts: Number of tokens beyond one that each of `rows` may grow by; None for none.
        chunk_rows: The rows that compute a chunk and sample nothing.
        chunk_incarnations: The incarnation of each of `chunk_rows`.
        chunk_num_computed: Computed tokens of `chunk_rows` after the step.
        planned: The time of planning, in seconds.
        has_chunks: Whether any row computes a chunk, including a last chunk, which samples.
        from_host: Blocks of the pool that the step fills from the host.
    """

    step_id: int
    rows: Array
    incarnations: Array
    max_drafts: Array | None
    chunk_rows: Array
    chunk_incarnations: Array
    chunk_num_computed: Array
    planned: float
    has_chunks: bool
    from_host: Array


@dataclass(frozen=True, slots=True)
class SampleLogprobs:
    """The log probabilities of some of a step's tokens."""

    samples: Array
    """int64[m], indices into the step's tokens, rising."""
    columns: LogprobColumns

    def check(self, num_samples: int) -> None:
        """Raises ValueError unless it belongs to `num_samples` samples and its columns fit each other."""
        samples, columns = self.samples, self.columns
        num_positions, num_top = len(columns), int(columns.top_counts.sum(dtype=np.int64))
        of_positions = (samples, columns.chosen_ranks, columns.top_counts)
        if any(len(each) != num_positions for each in of_positions) or not (
            num_top == len(columns.top_token_ids) == len(columns.top_logprobs) and (columns.top_counts >= 0).all()
        ):
            raise ValueError(f"the columns of {num_positions} log probabilities are not of one length")
        if num_positions and not (samples[0] >= 0 and samples[-1] < num_samples and (samples[1:] > samples[:-1]).all()):
            raise ValueError(
                f"log probabilities are of the samples {samples.tolist()} out of {num_samples}, not rising"
            )

    def of(self, samples: Array) -> tuple[Array, LogprobColumns]:
        """Indices into `samples` (int64[n], rising) of the samples that have log probabilities, and those values."""
        _, places, positions = np.intersect1d(samples, self.samples, assume_unique=True, return_indices=True)
        return places, self.columns.take(positions)

    def of_sample(self, sample: int) -> LogprobColumns | None:
        """The log probabilities of one sample; None if it has none."""
        position = int(np.searchsorted(self.samples, sample))
        if position == len(self.samples) or self.samples[position] != sample:
            return None
        return self.columns.part(position, position + 1)


@dataclass(frozen=True, slots=True)
class StepResult:
    """The workers' answer to a step: the tokens of each of `StepPlan.samples`, in that order. Each sample has one
    token, unless `num_tokens` has their numbers; then `num_drafts` has the numbers of verified drafts. int64[s] both.
    The model ran `num_passes` times.

    `candidates` and `failures` are keyed by row; the token of a row with failures or candidates means nothing.
    `refused` are the failed rows that the worker could not sample with their sampling parameters.
    `logprobs` is None if no row requests them. `non_finite_chunks` are rows that computed a chunk, sampled nothing, and
    got hidden states with NaN or infinity. `vectors` are the vectors of prompts, keyed by row, of a model that gives
    vectors instead of texts.
    """

    step_id: int
    token_ids: Array
    logprobs: SampleLogprobs | None = None
    failures: Mapping[int, str] = field(default_factory=dict[int, str])
    candidates: Mapping[int, Candidates] = field(default_factory=dict[int, Candidates])
    non_finite_chunks: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()
    num_tokens: Array | None = None
    num_drafts: Array | None = None
    num_passes: int = 1
    vectors: Mapping[int, bytes] = field(default_factory=dict[int, bytes])


class SequenceEnd(NamedTuple):
    """A sequence ended; its tokens came before. `vector` is the vector of its prompt, empty from a model of texts. A
    tuple for speed: many sequences may end at once."""

    handle: Handle
    sequence_index: int
    num_tokens: int
    reason: FinishReason
    stop_token_id: int | None
    cumulative_logprob: float | None = None
    vector: bytes = b""


class Usage(NamedTuple):
    """The usage of a request. Times are in seconds."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    queue_s: float
    prefill_s: float
    decode_s: float
    drafted_tokens: int = 0
    accepted_draft_tokens: int = 0


class RequestEnd(NamedTuple):
    """The end of a request, after all of its sequences."""

    handle: Handle
    usage: Usage


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One request failed; others continue. `epoch` is the epoch that found another model, if that is the reason."""

    key: RequestKey
    reason: str
    message: str
    epoch: int | None = None


@dataclass(slots=True)
class ClientEvents:
    """All events of one step for one client. The first four lists describe tokens, one entry each."""

    handles: list[Handle] = field(default_factory=list[Handle])
    sequence_indices: list[int] = field(default_factory=list[int])
    offsets: list[int] = field(default_factory=list[int])
    token_ids: list[int] = field(default_factory=list[int])
    with_logprobs: list[int] = field(default_factory=list[int])
    """The tokens that have log probabilities, as rising indices into the lists above."""
    logprobs: LogprobLog = field(default_factory=LogprobLog)
    """One position for each of `with_logprobs`."""
    finished: list[SequenceEnd] = field(default_factory=list[SequenceEnd])
    completed: list[RequestEnd] = field(default_factory=list[RequestEnd])
    failed: list[RequestFailure] = field(default_factory=list[RequestFailure])

    @property
    def is_empty(self) -> bool:
        return not (self.handles or self.finished or self.completed or self.failed)
