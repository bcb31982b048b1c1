"""Conversions between the core's plans and results and the messages of workers."""

import zlib
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from quire.common.v1 import common_pb2
from quire.messages.arrays import decode_float32, decode_int32, decode_logprobs, encode_int32
from quire.messages.logprob_columns import LogprobColumns
from quire.messages.prefix_hashes import BlockHash, hashes_of
from quire.rpc.errors import InvalidArgument, invalid_field
from quire.service import compatibility
from quire.service.compatibility import (
    PREPARES_CONSTRAINTS,
    UNKNOWN_MODEL,
    ModelFingerprint,
    ProtocolVersions,
    check_protocol,
    differing_parts,
)
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.beam_search import Candidates
from scheduler_svc.core.moves import Arriving, KvSource, Lease
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.preparation import Preparation
from scheduler_svc.core.request import Adapter, Constraint, Request
from scheduler_svc.core.running_batch import RowTable
from scheduler_svc.core.step import RowAssignment, SampleLogprobs, StepInFlight, StepPlan, StepResult
from scheduler_svc.service.outbox import PromptLogprobs


def attach_message(epoch: int) -> bytes:
    attach = worker_pb2.Attach(scheduler_epoch=epoch, protocol=compatibility.WORKER_PROTOCOL.message())
    return worker_pb2.RunRequest(attach=attach).SerializeToString()


def prepare_message(preparation: Preparation) -> bytes:
    number, need = preparation.number, preparation.need
    if preparation.arriving is not None:
        return worker_pb2.RunRequest(move_blocks=_move_message(number, preparation.arriving)).SerializeToString()
    if isinstance(need, Constraint):
        prepare = worker_pb2.PrepareConstraint(number=number, row_sampling=need.parameters)
        return worker_pb2.RunRequest(prepare=prepare).SerializeToString()
    assert isinstance(need, Adapter)
    load = worker_pb2.LoadAdapter(number=number, slot=preparation.slot, digest=need.digest, directory=need.directory)
    return worker_pb2.RunRequest(load_adapter=load).SerializeToString()


def _move_message(number: int, arriving: Arriving) -> worker_pb2.MoveBlocks:
    return worker_pb2.MoveBlocks(
        number=number,
        source=None if arriving.source is None else source_message(arriving.source),
        hashes=b"".join(arriving.hashes),
        block_ids=encode_int32(arriving.blocks),
        timeout_ms=round(MOVE_TIMEOUT_S * 1e3),
    )


def offer_message(lease: Lease, sealed: Iterable[tuple[BlockId, BlockHash]]) -> bytes:
    """An offer of these blocks to workers of other replicas."""
    pairs = list(sealed)
    offer = worker_pb2.OfferBlocks(
        lease=lease,
        block_ids=encode_int32([block for block, _ in pairs]),
        hashes=b"".join(content for _, content in pairs),
        lease_ms=round(LEASE_S * 1e3),
    )
    return worker_pb2.RunRequest(offer_blocks=offer).SerializeToString()


def source_message(source: KvSource) -> common_pb2.KvSource:
    return common_pb2.KvSource(kv_namespace=source.kv_namespace, endpoints=source.endpoints, lease=source.lease)


def step_message(plan: StepPlan, epoch: int, generation: int) -> bytes:
    """A step, serialized once for all ranks."""
    request = worker_pb2.RunRequest()
    # Filled in place: a message that is passed to the constructor of another is copied.
    step = request.step
    step.step_id, step.scheduler_epoch, step.worker_generation = plan.step_id, epoch, generation
    operations, batch = step.cache_operations, step.batch
    operations.swap_out, operations.swap_in = encode_int32(plan.swap_out), encode_int32(plan.swap_in)
    operations.copy = encode_int32(plan.copy)
    batch.rows, batch.samples = encode_int32(plan.rows), encode_int32(plan.samples)
    batch.num_new_tokens = encode_int32(plan.num_new_tokens)
    batch.num_computed_tokens = encode_int32(plan.num_computed_tokens)
    if plan.max_drafts is not None:
        batch.max_drafts = encode_int32(plan.max_drafts)
    batch.max_passes = 0 if plan.max_passes == 1 else plan.max_passes
    step.block_table_deltas = encode_int32(plan.block_table_deltas)
    step.release, step.fork = encode_int32(plan.release), encode_int32(plan.fork)
    _add_row_changes(step, plan)
    step.sealed_block_ids = encode_int32([block for block, _ in plan.sealed])
    step.sealed_hashes = b"".join([content for _, content in plan.sealed])
    step.short_lived = encode_int32(plan.short_lived)
    step.state_tables = encode_int32([each for row, blocks in plan.state_tables for each in (row, *blocks)])
    step.checkpoints = encode_int32([each for row, count, blocks in plan.checkpoints for each in (row, count, *blocks)])
    return request.SerializeToString()


def _add_row_changes(step: worker_pb2.StepRequest, plan: StepPlan) -> None:
    """Adds the changes that have messages of their own."""
    step.assign.extend(map(_assign_message, plan.assign))
    for row, seed in plan.reseed:
        step.reseed.add(row=row, seed=seed)
    for row, position, token_id in plan.set_tokens.tolist():
        step.set_tokens.add(row=row, position=position, token_ids=encode_int32([token_id]))
    for assigned in plan.assign:
        if assigned.traceparent is not None:
            step.traced.add(row=assigned.row, traceparent=assigned.traceparent)


def _assign_message(assigned: RowAssignment) -> worker_pb2.AssignRow:
    sampling = assigned.sampling
    message = worker_pb2.AssignRow(
        row=assigned.row,
        token_ids=encode_int32(assigned.token_ids),
        block_table=encode_int32(assigned.block_table),
        row_sampling=sampling.parameters,
        num_prompt_tokens=assigned.num_prompt_tokens,
        seed=sampling.seed,
        logprobs=sampling.logprobs,
        num_candidates=sampling.num_candidates,
        adapter_slot=assigned.adapter_slot,
        draft_scope=assigned.draft_scope,
        state_blocks=encode_int32(assigned.state_blocks),
    )
    if sampling.prompt_logprobs is not None and len(assigned.token_ids) == assigned.num_prompt_tokens:
        # They are delivered before the first output token, so a sequence with output needs none.
        message.prompt_logprobs = sampling.prompt_logprobs
    return message


MOVE_TIMEOUT_S = 5.0
"""Seconds after which blocks that have not come from another replica are computed."""
LEASE_S = 10.0
"""Seconds that blocks are kept for another replica after they were offered, or after the last fetch."""


class RankPlace(NamedTuple):
    """A worker's rank, and the number of ranks."""

    rank: int
    world_size: int


@dataclass(frozen=True, slots=True)
class ReplicaInfo:
    """Pool geometry, model and limits, as the worker of rank 0 reports them."""

    worker_generation: int
    block_size: int
    num_gpu_blocks: int
    num_host_blocks: int
    architecture: str
    dtype: str
    vocab_size: int
    max_model_len: int
    max_num_rows: int
    max_num_batched_tokens: int
    max_steps_in_flight: int
    max_logprobs: int
    fingerprint: ModelFingerprint = UNKNOWN_MODEL
    prepares_constraints: bool = False
    device: str = ""
    device_name: str = ""
    max_adapters: int = 0
    max_drafts: int = 0
    fixed_tokens: int = 0
    max_passes: int = 1
    block_bytes: int = 0
    full_groups: int = 1
    windowed_groups: int = 0
    window: int = 0
    state_blocks: int = 0

    def is_same_worker(self, other: "ReplicaInfo | None") -> bool:
        """Whether `other` is the same start of the same workers."""
        return other is not None and other.worker_generation == self.worker_generation

    def model_changes(self, before: "ReplicaInfo") -> list[str]:
        """The properties in which this model differs, each with both values; empty if it may be the same model."""
        changes = [
            f"{name} {old} and {new}"
            for name, old, new in (
                ("architecture", before.architecture, self.architecture),
                ("vocab_size", before.vocab_size, self.vocab_size),
            )
            if old != new
        ]
        return changes + differing_parts(before.fingerprint, self.fingerprint)

    def has_tokenizer_of(self, before: "ReplicaInfo") -> bool:
        """Whether token ids mean the same, unless one of the two has an unknown tokenizer."""
        ours, theirs = self.fingerprint.tokenizer, before.fingerprint.tokenizer
        return self.vocab_size == before.vocab_size and not (ours and theirs and ours != theirs)

    def is_like(self, other: "ReplicaInfo | None") -> bool:
        """Whether `other` is equal except for the start of its workers, and values that are measured at a start."""
        if other is None:
            return False
        return replace(other, worker_generation=self.worker_generation, fixed_tokens=self.fixed_tokens) == self


_MAX_INT32 = 2**31 - 1

_BOUNDS = {
    # A scheduler keeps about 100 bytes a block: 1.6 GB here.
    "pool.num_gpu_blocks": (1, 1 << 24),
    "pool.num_host_blocks": (0, 1 << 24),
    "pool.block_size": (1, 1 << 16),
    "model.vocab_size": (1, _MAX_INT32),
    "model.max_model_len": (1, _MAX_INT32),
    "pool.full_groups": (0, 64),
    "pool.windowed_groups": (0, 64),
    "pool.window": (0, _MAX_INT32),
    "pool.state_blocks": (0, 1 << 16),
    "limits.max_num_rows": (1, _MAX_INT32),
    "limits.max_num_batched_tokens": (1, _MAX_INT32),
    "limits.max_steps_in_flight": (1, _MAX_INT32),
    "limits.max_adapters": (0, 1 << 16),
    "limits.max_drafts": (0, 64),
    "limits.fixed_tokens": (0, 1 << 16),
    "limits.max_passes": (0, 64),
}
"""Bounds of workers' reports. They size tables, and token ids and positions travel as int32."""


def replica_info(info: worker_pb2.WorkerInfo) -> ReplicaInfo:
    """The properties that a worker reports.

    Raises:
        FailedPrecondition: worker and scheduler have no version of the contract in common.
        InvalidArgument: names the first value with which no scheduler can work.
    """
    theirs = ProtocolVersions.of(info.protocol)
    ours = compatibility.WORKER_PROTOCOL
    check_protocol("quire.worker.v1", ours, theirs, us="the scheduler", them="the worker")
    for name, (minimum, maximum) in _BOUNDS.items():
        part, field = name.split(".")
        value = getattr(getattr(info, part), field)
        if not minimum <= value <= maximum:
            raise invalid_field(f"info.{name}", f"is {value}; a scheduler works with {minimum} to {maximum}")
    values: dict[str, Any] = {
        name: getattr(part, name)
        for part in (info.pool, info.model, info.limits)
        for name in part.DESCRIPTOR.fields_by_name
        if name in ReplicaInfo.__slots__
    }
    values["max_passes"] = info.limits.max_passes or 1
    values["full_groups"] = info.pool.full_groups if info.pool.windowed_groups else max(info.pool.full_groups, 1)
    return ReplicaInfo(
        **values,
        worker_generation=info.worker_generation,
        fingerprint=ModelFingerprint.of(info.fingerprint),
        prepares_constraints=theirs.newest >= PREPARES_CONSTRAINTS,
    )


def sealed_blocks(attached: worker_pb2.Attached) -> list[tuple[BlockId, BlockHash]]:
    """The worker's inventory of final blocks. Raises InvalidArgument if the arrays of the message are malformed."""
    blocks = decode_int32(attached.sealed_block_ids, "sealed_block_ids", minimum=0).tolist()
    contents = _hashes(attached.sealed_hashes, "sealed_hashes")
    if len(contents) != len(blocks):
        raise InvalidArgument(f"sealed_hashes has {len(attached.sealed_hashes)} bytes for {len(blocks)} blocks")
    return [(BlockId(block), content) for block, content in zip(blocks, contents, strict=True)]


def _hashes(data: bytes, field: str) -> list[BlockHash]:
    try:
        return hashes_of(data)
    except ValueError as error:
        raise invalid_field(field, str(error)) from error


@dataclass(frozen=True, slots=True)
class RowPromptLogprobs:
    """The log probabilities of consecutive prompt tokens of a row."""

    row: int
    first_position: int
    columns: LogprobColumns

    def for_request(self, request: Request) -> "PromptLogprobs":
        """The log probabilities for the request in the row. Raises ValueError if it has no such positions."""
        first, end = self.first_position, self.first_position + len(self.columns)
        if not 1 <= first <= end <= len(request.prompt):
            raise ValueError(
                f"row {self.row} reports positions {first} to {end} of {len(request.prompt)} prompt tokens"
            )
        return PromptLogprobs(request.key.handle, first, request.prompt[first:end], self.columns)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A worker has compiled the constraint of this number, has loaded the adapter, or reports why it cannot; or it has
    fetched blocks, except the ones with the indices `failed`."""

    number: int
    failure: str | None = None
    failed: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Fetched:
    """Another replica has fetched a part of a rank's blocks under a lease; `is_done` with the last part."""

    lease: Lease
    is_done: bool


@dataclass(frozen=True, slots=True)
class TierChanged:
    """The first of these slots of the worker's tier hold these blocks now, and the other slots are empty."""

    slots: list[int]
    hashes: list[BlockHash]


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """A worker's complete answer to a step.

    `result` is the part for the core. `rows`, int64[n], are the rows that sampled, in the order of the result's tokens.
    `worker_us` are the microseconds of the step in the worker's queue, cache operations, model and sampler.
    `token_ids_crc32`, of tokens and counts, is the same for all ranks, while the tokens come from rank 0; None from a
    rank whose release does not send it.
    """

    result: StepResult
    rows: np.ndarray
    prompt_logprobs: SequenceOf[RowPromptLogprobs]
    worker_us: tuple[int, int, int, int]
    token_ids_crc32: int | None = None

    def check_rows(self, step: StepInFlight) -> None:
        """Raises ValueError unless `rows` are the rows that sample in this step, in their order."""
        if not np.array_equal(self.rows, step.rows):
            raise ValueError(
                f"the result of step {self.result.step_id} has rows {self.rows.tolist()}; "
                f"step {step.step_id} samples {step.rows.tolist()}"
            )


def step_answer(message: worker_pb2.StepResult, vocab_size: int) -> StepAnswer:
    """A step's answer from its message. Raises InvalidArgument if an array is malformed or a token id is not in the
    vocabulary. The core checks whether the arrays fit each other and the step."""
    result = StepResult(
        step_id=message.step_id,
        token_ids=decode_int32(message.token_ids, "token_ids", minimum=0, below=vocab_size).astype(np.int64),
        logprobs=_logprobs(message.token_logprobs, vocab_size) if message.HasField("token_logprobs") else None,
        failures={failure.row: failure.detail for failure in message.failures},
        refused=frozenset(
            failure.row
            for failure in message.failures
            if failure.reason == worker_pb2.ROW_FAILURE_REASON_INVALID_SAMPLING
        ),
        candidates={entry.row: _candidates(entry, vocab_size) for entry in message.candidates},
        non_finite_chunks=frozenset(decode_int32(message.non_finite_chunks, "non_finite_chunks", minimum=0).tolist()),
        num_tokens=_counts(message.num_tokens, "num_tokens"),
        num_drafts=_counts(message.num_drafts, "num_drafts"),
        num_passes=message.num_passes or 1,
        vectors={each.row: each.values for each in message.vectors},
    )
    timings = message.timings
    return StepAnswer(
        result,
        decode_int32(message.rows, "rows", minimum=0).astype(np.int64),
        [_prompt_logprobs(each, vocab_size) for each in message.prompt_logprobs],
        (timings.queue_us, timings.cache_operations_us, timings.model_us, timings.sample_us),
        _token_ids_crc32(message),
    )


WorkerAnswer = StepAnswer | Prepared | Fetched | TierChanged
"""A message that an attached worker sends, except heartbeats."""


def answer_from(message: worker_pb2.RunResponse, vocab_size: int) -> WorkerAnswer | None:
    """A worker's answer from its message; None for a heartbeat. Raises InvalidArgument if an array is malformed."""
    match message.WhichOneof("message"):
        case "result":
            return step_answer(message.result, vocab_size)
        case "prepared":
            return Prepared(message.prepared.number)
        case "adapter_loaded":
            loaded = message.adapter_loaded
            return Prepared(loaded.number, loaded.failure if loaded.HasField("failure") else None)
        case "moved":
            failed = decode_int32(message.moved.failed, "failed", minimum=0).tolist()
            return Prepared(message.moved.number, failed=frozenset(failed))
        case "fetched":
            return Fetched(Lease(message.fetched.lease), message.fetched.done)
        case "tier_changed":
            slots = decode_int32(message.tier_changed.slots, "slots", minimum=0).tolist()
            return TierChanged(slots, _hashes(message.tier_changed.hashes, "hashes")[: len(slots)])
        case _:
            return None


def _counts(data: bytes, field: str) -> np.ndarray | None:
    return decode_int32(data, field, minimum=0).astype(np.int64) if data else None


def _token_ids_crc32(message: worker_pb2.StepResult) -> int | None:
    if message.HasField("token_ids_crc32"):
        return message.token_ids_crc32
    return zlib.crc32(message.num_tokens, zlib.crc32(message.token_ids)) if message.token_ids else None


def _logprobs(message: worker_pb2.TokenLogprobs, vocab_size: int) -> SampleLogprobs:
    samples = decode_int32(message.samples, "token_logprobs.samples")
    return SampleLogprobs(samples.astype(np.int64), decode_logprobs(message, vocab_size=vocab_size))


def _candidates(entry: worker_pb2.RowCandidates, vocab_size: int) -> Candidates:
    token_ids = decode_int32(entry.token_ids, "candidates.token_ids", minimum=0, below=vocab_size).tolist()
    return Candidates(token_ids, decode_float32(entry.logprobs, "candidates.logprobs").tolist())


def _prompt_logprobs(message: worker_pb2.RowPromptLogprobs, vocab_size: int) -> RowPromptLogprobs:
    columns = decode_logprobs(message, vocab_size=vocab_size)
    return RowPromptLogprobs(message.row, message.first_position, columns)


class PromptLogprobsRouter:
    """Maps rows that report log probabilities of their prompt to requests, for each step in flight.

    The reports bypass the core, which does not need them, and reach a gateway before the first generated token of their
    request. A prompt that is computed again before that is reported again; readers get each position once.
    """

    def __init__(self) -> None:
        self._reporting: dict[int, Request] = {}
        self._by_step: dict[int, Mapping[int, Request]] = {}

    def planned(self, plan: StepPlan, rows: RowTable) -> None:
        """A step is sent. Called before the rows change again."""
        for row in plan.release.tolist():
            self._reporting.pop(row, None)
        for assigned in plan.assign:
            sequence = rows.sequences[assigned.row]
            if assigned.sampling.prompt_logprobs is not None and sequence is not None:
                self._reporting[assigned.row] = sequence.request
        if self._reporting:
            self._by_step[plan.step_id] = dict(self._reporting)

    def answered(self, answer: StepAnswer) -> list[PromptLogprobs]:
        """The step's reports, by request. Raises ValueError for a report that was not requested.

        Reports of a chunk that is not finite are left out: if the worker is lost before the request fails, its prompt
        is computed again, and readers would keep the wrong values.
        """
        step_id, non_finite = answer.result.step_id, answer.result.non_finite_chunks
        reporting = self._by_step.pop(step_id, {})
        routed: list[PromptLogprobs] = []
        for report in answer.prompt_logprobs:
            request = reporting.get(report.row)
            if request is None:
                raise ValueError(
                    f"step {step_id} reports prompt logprobs of row {report.row}, which did not request them"
                )
            if report.row not in non_finite:
                routed.append(report.for_request(request))
        return routed

    def clear(self) -> None:
        """Forgets all steps: the worker was lost."""
        self._reporting.clear()
        self._by_step.clear()
