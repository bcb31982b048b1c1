"""One step of the scheduler as values: what `convert` makes of the messages and all other modules work with.

Arrays are int32 numpy arrays; pairs have shape [n, 2], triples [n, 3]. A row is a slot of the persistent batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from quire.common.v1.common_pb2 import SamplingParameters
from quire.logprob_columns import LogprobColumns

Int32Array = NDArray[np.int32]

HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class StepHeader:
    """What says whether a step is for this worker, now."""

    step_id: int
    scheduler_epoch: int
    worker_generation: int


@dataclass(frozen=True, slots=True)
class CacheOperations:
    """Moves of whole blocks, applied in this order before the model runs."""

    swap_out: Int32Array
    """Pairs (gpu block, host block)."""
    swap_in: Int32Array
    """Pairs (host block, gpu block)."""
    copy: Int32Array
    """Pairs (source gpu block, destination gpu block)."""

    @property
    def written_blocks(self) -> Int32Array:
        """GPU blocks that the moves overwrite."""
        return np.concatenate((self.swap_in[:, 1], self.copy[:, 1]))


def _no_tokens() -> Int32Array:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class LogitRules:
    """What is done to a row's logits before a token is drawn; the defaults do nothing."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_token_ids: Int32Array = field(default_factory=_no_tokens)
    """Each token once."""
    bias_values: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    allowed_token_ids: Int32Array = field(default_factory=_no_tokens)
    """Empty allows all."""
    bad_sequences: tuple[Int32Array, ...] = ()
    """Token sequences that must not be generated, none of them empty."""
    min_tokens: int = 0
    """None of `stop_token_ids` is chosen before this many output tokens."""
    stop_token_ids: Int32Array = field(default_factory=_no_tokens)

    @property
    def has_penalties(self) -> bool:
        """Whether it matters which tokens were seen."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_neutral(self) -> bool:
        """Whether no logit is ever changed."""
        delays_stop = self.min_tokens > 0 and len(self.stop_token_ids) > 0
        has_lists = len(self.bias_token_ids) or len(self.allowed_token_ids) or self.bad_sequences
        return not (self.has_penalties or delays_stop or has_lists)


@dataclass(frozen=True, slots=True, eq=False)
class RowSampling:
    """How a row's tokens are drawn: the gateway's message, checked, and what the scheduler adds for this sequence."""

    parameters: SamplingParameters
    """Absent values are filled in; nothing changes it any more."""
    seed: int = 0
    logprobs: int | None = None
    """Report the chosen token's log probability and this many of the most likely tokens."""
    num_candidates: int | None = None
    """Draw nothing; report this many of the most likely tokens."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each prompt token but the first when the position before it is computed."""
    rules: LogitRules | None = None
    """None where no logit is ever changed."""
    refusal: str | None = None
    """Why nothing can be drawn by what the gateway sent: the row runs, and fails when it samples."""


@dataclass(frozen=True, slots=True)
class AssignRow:
    """Puts a sequence into a row that holds none."""

    row: int
    token_ids: Int32Array
    block_table: Int32Array
    sampling: RowSampling
    num_prompt_tokens: int
    """How many of `token_ids` are prompt."""


@dataclass(frozen=True, slots=True)
class ReseedRow:
    """Gives a forked row its own random numbers."""

    row: int
    seed: int


@dataclass(frozen=True, slots=True)
class SetTokens:
    """Replaces the tokens of a row from a position on."""

    row: int
    position: int
    token_ids: Int32Array


@dataclass(frozen=True, slots=True)
class RowChanges:
    """Changes of the persistent batch, applied in this order."""

    release: Int32Array
    assign: tuple[AssignRow, ...]
    fork: Int32Array
    """Pairs (parent row, child row). All parents are read before any child is written."""
    reseed: tuple[ReseedRow, ...]
    set_tokens: tuple[SetTokens, ...]
    block_table_deltas: Int32Array
    """Triples (row, logical index, block id)."""

    @property
    def are_none(self) -> bool:
        """As in most steps: rows only take their next tokens."""
        lists = (self.release, self.assign, self.fork, self.reseed, self.set_tokens, self.block_table_deltas)
        return not any(map(len, lists))


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens to compute: parallel arrays, one entry a row."""

    rows: Int32Array
    num_new_tokens: Int32Array
    num_computed_tokens: Int32Array
    samples: Int32Array
    """Pairs (row that samples, row of this batch from whose last token's logits)."""


@dataclass(frozen=True, slots=True)
class SealedBlocks:
    """Blocks whose content is final, and the hash of each as `[n, HASH_BYTES]` bytes."""

    block_ids: Int32Array
    hashes: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Step:
    """Everything that one step does, in the order of the fields."""

    step_id: int
    scheduler_epoch: int
    cache_operations: CacheOperations
    row_changes: RowChanges
    batch: Batch
    sealed: SealedBlocks


@dataclass(frozen=True, slots=True)
class AdmittedStep:
    """A step that was found valid."""

    step: Step
    batch_blocks: Int32Array
    """GPU blocks that its batch writes."""

    @property
    def written_blocks(self) -> Int32Array:
        """GPU blocks that it writes, be it by a move or by its batch."""
        return np.concatenate((self.step.cache_operations.written_blocks, self.batch_blocks))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probabilities of some of a step's sampled tokens."""

    samples: Int32Array
    """Indices into `StepOutput.rows`, rising."""
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """The log probabilities of consecutive prompt tokens of a row."""

    row: int
    first_position: int
    """Index into the sequence of the first of them."""
    columns: LogprobColumns


@dataclass(frozen=True, slots=True)
class RowCandidates:
    """The most likely next tokens of a row, best first."""

    row: int
    token_ids: Int32Array
    logprobs: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Durations in microseconds."""

    queue_us: int
    cache_operations_us: int
    model_us: int
    sample_us: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What a step brought, in the order of `Batch.samples`."""

    step_id: int
    rows: Int32Array
    token_ids: Int32Array
    logprobs: TokenLogprobs | None
    """None where no row asks for them."""
    candidates: tuple[RowCandidates, ...]
    failed_rows: tuple[int, ...]
    """Rows that drew nothing, their logits not being finite or their sampling refused; their token means nothing."""
    timings: StepTimings
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    num_computed_tokens: int = 0
    """Tokens of the batch."""
    non_finite_chunks: tuple[int, ...] = ()
    """Rows that sample nothing, of whose new tokens one has a hidden state that is not finite."""
    refusals: Mapping[int, str] = field(default_factory=dict)
    """Why, for those of `failed_rows` whose sampling was refused."""
