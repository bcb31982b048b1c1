"""What one step is, and what came of it: the values that pass between the core and the service."""

from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from quire.logprob_columns import LogprobLog
from scheduler_svc.core.beam import Candidates
from scheduler_svc.core.block import BlockHash, BlockId
from scheduler_svc.core.logprobs import SampleLogprobs
from scheduler_svc.core.request import Handle, RequestKey, RowSampling
from scheduler_svc.core.sequence import FinishReason


@dataclass(frozen=True, slots=True)
class RowAssignment:
    """A sequence that enters a row: sent whole, once. Later steps send only what changed."""

    row: int
    token_ids: SequenceOf[int]
    block_table: SequenceOf[BlockId]
    sampling: RowSampling
    num_prompt_tokens: int
    traceparent: str | None = None


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step of all workers. Arrays are int64; rows of the batch are distinct.

    swap_out                 [o, 2]  GPU block, host block: before all else
    swap_in                  [i, 2]  host block, GPU block: after swap_out
    copies                   [c, 2]  source block, destination block: copy-on-write, after swap_in
    release                  [r]     rows that hold nothing any more, before `assign`
    forks                    [f, 2]  parent row, child row: the child gets all that the parent held before this step
    reseed                           row and seed of each child that draws by a seed of its own
    set_tokens               [t, 3]  row, position, token id that was chosen for it there (beam search)
    block_table_deltas       [d, 3]  row, logical index, block id
    rows, num_new_tokens, num_computed_tokens  [b]  the batch
    samples                  [s, 2]  row that samples, row of the batch from whose last token's logits
    sealed                           blocks whose content is final, and their hashes
    """

    step_id: int
    swap_out: np.ndarray
    swap_in: np.ndarray
    copies: np.ndarray
    release: np.ndarray
    assign: SequenceOf[RowAssignment]
    forks: np.ndarray
    reseed: SequenceOf[tuple[int, int]]
    set_tokens: np.ndarray
    block_table_deltas: np.ndarray
    rows: np.ndarray
    num_new_tokens: np.ndarray
    num_computed_tokens: np.ndarray
    samples: np.ndarray
    sealed: SequenceOf[tuple[BlockId, BlockHash]]

    @property
    def num_tokens(self) -> int:
        return int(self.num_new_tokens.sum())


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """A planned step whose result is still to come: who sits in its sampling rows, and how many of their tokens are
    computed then; and the same for the rows that compute a chunk of what they came with and sample nothing."""

    step_id: int
    rows: np.ndarray
    incarnations: np.ndarray
    num_computed: np.ndarray
    chunk_rows: np.ndarray
    chunk_incarnations: np.ndarray
    chunk_num_computed: np.ndarray


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the workers answered: one token id for each of `StepPlan.samples`, in that order.

    `candidates` and `failures` are keyed by row; the token of a failed row, and of one that has candidates, means
    nothing. `refused` are those of `failures` whose row the worker could not sample by the parameters that it was sent.
    `logprobs` is None where no row asks for them. `non_finite_chunks` are rows that computed a chunk, sampled
    nothing, and got hidden states that hold NaN or infinity.
    """

    step_id: int
    token_ids: np.ndarray
    logprobs: SampleLogprobs | None = None
    failures: Mapping[int, str] = field(default_factory=dict)
    candidates: Mapping[int, Candidates] = field(default_factory=dict)
    non_finite_chunks: frozenset[int] = frozenset()
    refused: frozenset[int] = frozenset()


class SequenceEnd(NamedTuple):
    """A sequence ended; its tokens came before. A tuple, as all that there is of each end: many may come at once."""

    handle: Handle
    sequence_index: int
    num_tokens: int
    reason: FinishReason
    stop_token_id: int | None
    cumulative_logprob: float | None = None


class Usage(NamedTuple):
    """What a request cost. Times are seconds."""

    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    preemptions: int
    queue_s: float
    prefill_s: float
    decode_s: float


class RequestEnd(NamedTuple):
    """All sequences of a request ended."""

    handle: Handle
    usage: Usage


@dataclass(frozen=True, slots=True)
class RequestFailure:
    """One request failed; others go on."""

    key: RequestKey
    reason: str
    message: str


@dataclass(slots=True)
class ClientEvents:
    """All that happened in one step to the requests of one client. The first four lists describe tokens, one entry
    each."""

    handles: list[Handle] = field(default_factory=list)
    sequence_indices: list[int] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    with_logprobs: list[int] = field(default_factory=list)
    """Which of the tokens have log probabilities, as rising indices into the lists above."""
    logprobs: LogprobLog = field(default_factory=LogprobLog)
    """One position for each of `with_logprobs`."""
    finished: list[SequenceEnd] = field(default_factory=list)
    completed: list[RequestEnd] = field(default_factory=list)
    failed: list[RequestFailure] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self.handles or self.finished or self.completed or self.failed)
