"""The values of the step protocol: a worker's properties, a step of the scheduler, and its results.

`protocol.step_messages` converts them from and to messages; all other modules work with them. Arrays are int32 numpy
arrays; pairs have shape [n, 2], triples [n, 3]. A row is a slot of the persistent batch.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.common.v1.common_pb2 import Constraint, SamplingParameters
from quire.constraints.thinking import ThinkingLimit
from quire.messages.layer_groups import ONE_GROUP, LayerGroups
from quire.messages.logprob_columns import LogprobColumns
from quire.rpc.errors import FailedPrecondition, invalid_field
from quire.service.compatibility import UNKNOWN_MODEL, ModelFingerprint

Int32Array = NDArray[np.int32]

HASH_BYTES = 32


class SupersededError(FailedPrecondition):
    """A scheduler of a higher epoch has taken over this worker, or another rank of its group."""

    default_reason = "SUPERSEDED"


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """The KV pool: tensors [lines_per_token, num_blocks, num_kv_heads, block_size, head_dim], one for each layer of a
    group of layers; all groups share them. Layers may have fewer or narrower heads."""

    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    num_layers: int
    """Layers of a group."""
    num_kv_heads: int
    head_dim: int
    dtype: str
    block_bytes: int
    """The bytes of one block: keys and values of the layers of one group."""
    lines_per_token: int = 2
    """Lines of a token and head: a key and a value, or 1 for a latent, which is both."""
    groups: LayerGroups = ONE_GROUP
    state_blocks: int = 0
    """Blocks that hold the state of one sequence; 0 for a model whose layers keep none."""

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks of one group of layers that hold `num_tokens` tokens of one sequence."""
        return -(-num_tokens // self.block_size)

    def table_len(self, num_tokens: int) -> int:
        """Entries of the block table of a sequence of `num_tokens` tokens."""
        return self.blocks_for(num_tokens) * self.groups.num_groups


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """The properties of the model that the scheduler needs."""

    architecture: str
    dtype: str
    vocab_size: int
    """Width of the logits; token ids are below this."""
    max_model_len: int
    """Largest number of positions of one sequence."""
    device: str
    device_name: str = ""
    """For people; see quire.worker.v1."""


_MAX_VERIFIED = 256


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds of one step."""

    max_num_rows: int
    max_num_batched_tokens: int
    max_steps_in_flight: int
    max_logprobs: int
    max_adapters: int = 0
    """Slots of adapters; 0 has none."""
    max_drafts: int = 0
    """Maximum tokens beyond one by which a sample may extend its row, each time the model runs."""
    fixed_tokens: int = 0
    """Time of a step of decodes that does not depend on its tokens, as the number of tokens that take as long."""
    max_passes: int = 1
    """Maximum runs of the model in a step of decodes."""

    @property
    def max_verified(self) -> int:
        """Maximum drafts of all rows that a run of the model verifies: more would never pay, and take memory."""
        return min(self.max_num_rows * self.max_drafts, _MAX_VERIFIED)

    @property
    def max_growth(self) -> int:
        """Maximum tokens beyond one by which a sample may extend its row in one step."""
        return self.max_passes * (1 + self.max_drafts) - 1


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One incarnation of a worker process."""

    worker_generation: int
    rank: int
    world_size: int
    pool: PoolGeometry
    model: ModelGeometry
    limits: WorkerLimits
    fingerprint: ModelFingerprint = UNKNOWN_MODEL
    kv_namespace: str = ""
    """Names the format and the model of its blocks' bytes; empty if they go to no other worker."""
    transfer_endpoint: str = ""
    """The address for other workers; empty if it is the scheduler's."""


@dataclass(frozen=True, slots=True)
class LoadAdapter:
    """An adapter to load into a slot, during the steps."""

    slot: int
    digest: bytes
    """Expected digest of the files in `directory`."""
    directory: Path


@dataclass(frozen=True, slots=True)
class CacheOperations:
    """Moves of whole blocks, done in this order before the model runs."""

    swap_out: Int32Array
    """Pairs (gpu block, host block)."""
    swap_in: Int32Array
    """Pairs (host block, gpu block)."""
    copy: Int32Array
    """Pairs (source gpu block, destination gpu block)."""

    @property
    def written_blocks(self) -> Int32Array:
        """GPU blocks that the moves write."""
        return np.concatenate((self.swap_in[:, 1], self.copy[:, 1]))


def _no_lines() -> Int32Array:
    return np.zeros((0, 2), np.int32)


def _no_tokens() -> Int32Array:
    return np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True, eq=False)
class LogitRules:
    """Changes of a row's logits before a token is drawn; the defaults change nothing."""

    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    bias_token_ids: Int32Array = field(default_factory=_no_tokens)
    bias_values: NDArray[np.float32] = field(default_factory=lambda: np.zeros(0, np.float32))
    allowed_token_ids: Int32Array = field(default_factory=_no_tokens)
    """Empty allows all."""
    bad_sequences: tuple[Int32Array, ...] = ()
    """Token sequences that must not be generated. None is empty."""
    min_tokens: int = 0
    """Number of output tokens before which no token of `stop_token_ids` is chosen."""
    stop_token_ids: Int32Array = field(default_factory=_no_tokens)
    first_excluded: Int32Array = field(default_factory=_no_tokens)
    """Tokens that are not chosen as the first output token."""
    sequence_biases: tuple[tuple[Int32Array, float], ...] = ()
    """Added to the last token of a sequence behind the other ones, in prompt and output. None is empty."""
    no_repeat_ngram_size: int = 0
    """No sequence of this many tokens occurs twice in prompt and output; 0 allows all."""

    @property
    def has_penalties(self) -> bool:
        """Whether the tokens so far matter."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @property
    def is_neutral(self) -> bool:
        """Whether no logit is ever changed."""
        delays_stop = self.min_tokens > 0 and len(self.stop_token_ids) > 0
        has_lists = len(self.bias_token_ids) or len(self.allowed_token_ids) or len(self.first_excluded)
        has_sequences = self.bad_sequences or self.sequence_biases or self.no_repeat_ngram_size
        return not (self.has_penalties or delays_stop or has_lists or has_sequences)


@dataclass(frozen=True, slots=True, eq=False)
class RowConstraint:
    """The constraint of a row's output, and the limit of its reasoning; at least one of them."""

    message: Constraint | None
    """Must not be changed any more. None if only the reasoning is limited."""
    ending_token_ids: tuple[int, ...]
    """Drawn only if the output is complete."""
    min_tokens: int = 0
    """Number of output tokens before which none of them is drawn, while another token may follow."""
    thinking: ThinkingLimit | None = None


@dataclass(frozen=True, slots=True, eq=False)
class RowSampling:
    """The sampling of a row: the gateway's message, checked, and the scheduler's additions for this sequence."""

    parameters: SamplingParameters
    """Absent values are filled in. It is not changed any more."""
    seed: int = 0
    logprobs: int | None = None
    """Reports the log probability of the chosen token and of this many of the most likely tokens."""
    num_candidates: int | None = None
    """Reports this many of the most likely tokens, and draws none."""
    prompt_logprobs: int | None = None
    """As `logprobs`, for each prompt token but the first, when the position before it is computed."""
    rules: LogitRules | None = None
    """None if no logit is changed."""
    constraint: RowConstraint | None = None
    refusal: str | None = None
    """Why the parameters cannot be used: the row runs, and fails when it samples."""
    predicted: Int32Array | None = None
    """The output that its caller expects."""
    logprob_token_ids: Int32Array | None = None
    """With `logprobs`: reports these tokens, the number that it says, instead of the most likely ones."""
    ending_token_ids: frozenset[int] = frozenset()
    """After one of these the scheduler takes no further token of the row."""


@dataclass(frozen=True, slots=True)
class AssignRow:
    """Puts a sequence into a row that holds none."""

    row: int
    token_ids: Int32Array
    block_table: Int32Array
    """As `LayerGroups` describes. Entries of windowed groups that are not read or written yet, or not any more, are
    any block."""
    sampling: RowSampling
    num_prompt_tokens: int
    """Number of prompt tokens in `token_ids`."""
    adapter_slot: int | None = None
    """The slot of its adapter; None runs the model as it is."""
    draft_scope: bytes = b""
    """Rows of one scope may have each other's outputs as guesses; empty: no others."""
    state_blocks: Int32Array = field(default_factory=_no_tokens)
    """[PoolGeometry.state_blocks], the blocks of its state, which is zeros before the first token."""


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
    state_tables: Int32Array = field(default_factory=_no_lines)
    """[n, 1 + PoolGeometry.state_blocks], lines of a row and the blocks of its state from now on."""

    @property
    def are_none(self) -> bool:
        """True for most steps: the rows only get their next tokens."""
        lists = (self.release, self.assign, self.fork, self.reseed, self.set_tokens)
        return not any(map(len, (*lists, self.block_table_deltas, self.state_tables)))


@dataclass(frozen=True, slots=True)
class Batch:
    """The tokens to compute: parallel arrays, one entry a row."""

    rows: Int32Array
    num_new_tokens: Int32Array
    num_computed_tokens: Int32Array
    samples: Int32Array
    """Pairs (row that samples, row of this batch from whose last token's logits)."""
    max_drafts: Int32Array = field(default_factory=_no_tokens)
    """For each sample, the maximum tokens beyond one by which it may extend its row; empty: none."""
    max_passes: int = 1
    """Maximum runs of the model; `max_drafts` counts a token for each run but one."""

    @property
    def ends(self) -> NDArray[np.int64]:
        """Number of tokens of each row that are computed after the step."""
        return self.num_computed_tokens.astype(np.int64) + self.num_new_tokens


@dataclass(frozen=True, slots=True)
class SealedBlocks:
    """Blocks whose content is final, and the hash of each as `[n, HASH_BYTES]` bytes."""

    block_ids: Int32Array
    hashes: NDArray[np.uint8]
    short_lived: Int32Array = field(default_factory=_no_tokens)
    """Some of these blocks: of checkpoints that later ones are to replace."""


@dataclass(frozen=True, slots=True)
class Step:
    """The work of one step, in the order of the fields."""

    step_id: int
    scheduler_epoch: int
    cache_operations: CacheOperations
    row_changes: RowChanges
    batch: Batch
    sealed: SealedBlocks
    checkpoints: Int32Array = field(default_factory=_no_lines)
    """[n, 2 + PoolGeometry.state_blocks], lines of a row, a number of its tokens, and blocks to which its state after
    these tokens is written in addition. The batch computes the last of them."""

    def cached_blocks(self, block_size: int, groups: LayerGroups = ONE_GROUP) -> Int32Array:
        """The blocks whose content rows that are assigned here find there, in order of each row and group of layers.
        The last ones of a row are of the checkpoint that its state is copied from."""
        computed = dict(zip(self.batch.rows.tolist(), self.batch.num_computed_tokens.tolist(), strict=True))
        copies = self.cache_operations.copy
        found: list[Int32Array] = []
        for each in self.row_changes.assign:
            num_computed = computed.get(each.row, 0)
            by_group = each.block_table.reshape(-1, groups.num_groups)[: num_computed // block_size].T
            first = groups.first_read(num_computed) // block_size
            found += [*by_group[: groups.num_full], *by_group[groups.num_full :, first:]]
            found.append(copies[np.isin(copies[:, 1], each.state_blocks), 0])
        return np.concatenate(found) if found else np.empty(0, np.int32)


@dataclass(frozen=True, slots=True)
class AdmittedStep:
    """A step that was found valid."""

    step: Step
    batch_blocks: Int32Array
    """GPU blocks that its batch writes."""
    max_forked: tuple[int, int] | None = None
    """The maximum numbers of tokens and of blocks in a row that it forks; None if that is not known."""

    @property
    def written_blocks(self) -> Int32Array:
        """GPU blocks that it writes, by moves or by its batch."""
        return np.concatenate((self.step.cache_operations.written_blocks, self.batch_blocks))


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The log probabilities of some of a step's sampled tokens."""

    samples: Int32Array
    """Indices into `StepOutput.token_ids`, rising."""
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
class RowVector:
    """The vector of the prompt in a row, of a model that gives vectors instead of texts."""

    row: int
    values: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepTimings:
    """Durations in microseconds."""

    queue_us: int
    cache_operations_us: int
    model_us: int
    sample_us: int


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step, in the order of `Batch.samples`."""

    step_id: int
    rows: Int32Array
    token_ids: Int32Array
    logprobs: TokenLogprobs | None
    """None if no row requests them."""
    candidates: tuple[RowCandidates, ...]
    failed_rows: tuple[int, ...]
    """Rows that drew no token, since their logits were not finite or their sampling was refused; each once."""
    timings: StepTimings
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()
    num_computed_tokens: int = 0
    """Tokens of the batch."""
    non_finite_chunks: tuple[int, ...] = ()
    """Rows that do not sample, with a new token whose hidden state is not finite."""
    refusals: Mapping[int, str] = field(default_factory=dict)
    """The reasons of the rows in `failed_rows` whose sampling was refused."""
    num_tokens: Int32Array = field(default_factory=_no_tokens)
    """Number of tokens in `token_ids` of each sample; empty: each has one."""
    num_drafts: Int32Array = field(default_factory=_no_tokens)
    """Number of verified drafts of each sample; empty: none."""
    num_passes: int = 1
    """Number of runs of the model."""
    vectors: tuple[RowVector, ...] = ()
    failure: str = "the logits hold NaN or +infinity, or nothing finite"
    """The reason of the rows in `failed_rows` that were not refused."""

    @property
    def num_sampled_tokens(self) -> int:
        """Number of `token_ids` of rows that did not fail."""
        if not self.failed_rows:
            return len(self.token_ids)
        num_tokens = self.num_tokens if len(self.num_tokens) else np.ones_like(self.rows)
        return int(num_tokens[~np.isin(self.rows, self.failed_rows)].sum())


def check_distinct(values: Int32Array, field: str, noun: str, role: str = "") -> None:
    """Refuses a repeated value."""
    if len(values) < 2:
        return
    ordered = np.sort(values)
    if (worst := first_true(ordered[1:] == ordered[:-1])) is not None:
        raise invalid_field(field, " ".join(("holds", noun, str(ordered[worst]), "twice", role)).rstrip())


def first_true(mask: NDArray[np.bool_]) -> int | None:
    """Index of the first True of a vector; None if there is none."""
    # On the few rows of a step `any` takes several times as long.
    return int(mask.argmax()) if np.count_nonzero(mask) else None
