"""Converts the messages of the step stream to values and back.

`StepDecoder` refuses a StepRequest that is wrong by itself: lengths, ranges, contradictions within a list. `RowLedger`
refuses requests that contradict the present content of the rows. Neither changes anything before everything is checked.
If the sampling parameters of a row are wrong, the step runs and only that row fails (`SamplingReader`).
"""

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from quire.messages.arrays import decode_int32, encode_float32, encode_int32, encode_logprobs
from quire.model_files.adapter_files import DIGEST_BYTES
from quire.rpc.errors import FailedPrecondition, invalid_field
from quire.service import compatibility
from quire.service.compatibility import ProtocolVersions, check_protocol
from quire.worker.v1 import worker_pb2
from worker_svc.sampling.sampling_table import SamplingReader
from worker_svc.step import (
    HASH_BYTES,
    AssignRow,
    Batch,
    CacheOperations,
    Int32Array,
    LoadAdapter,
    ModelGeometry,
    PoolGeometry,
    PromptLogprobs,
    ReseedRow,
    RowCandidates,
    RowChanges,
    SealedBlocks,
    SetTokens,
    Step,
    StepOutput,
    WorkerInfo,
    WorkerLimits,
    check_distinct,
    first_true,
)

_MAX_UINT32 = 0xFFFFFFFF
_Composition = tuple[Int32Array, Int32Array, Int32Array]
"""The rows of a batch, their numbers of new tokens, and its samples; see `Batch`."""
_SLOTS_AT_ONCE = 4096
"""Maximum slots of a tier in one message: a scheduler handles it between steps."""


def protocol_of(pool: PoolGeometry) -> ProtocolVersions:
    """The versions that a worker with this pool speaks."""
    ours = compatibility.WORKER_PROTOCOL
    if pool.state_blocks:
        return ProtocolVersions(compatibility.HAS_STATES, ours.newest)
    return ours if pool.groups.num_groups == 1 else ProtocolVersions(compatibility.HAS_LAYER_GROUPS, ours.newest)


def epoch_of(request: worker_pb2.RunRequest, ours: ProtocolVersions = compatibility.WORKER_PROTOCOL) -> int:
    """The epoch that the first message attaches, to a worker that speaks `ours`.

    Raises:
        FailedPrecondition: it is not an Attach, or of a scheduler that speaks no version of this worker's.
    """
    if request.WhichOneof("message") != "attach":
        raise FailedPrecondition("the first message of a step stream must be attach", reason="NOT_ATTACHED")
    theirs = ProtocolVersions.of(request.attach.protocol)
    check_protocol("quire.worker.v1", ours, theirs, us="the worker", them="the scheduler")
    return request.attach.scheduler_epoch


class StepDecoder:
    """Reads StepRequests for one worker, whose geometry and limits bound every number in them."""

    def __init__(self, info: WorkerInfo) -> None:
        self._pool = info.pool
        self._model = info.model
        self._limits = info.limits
        self._max_blocks = info.pool.table_len(info.model.max_model_len)
        self._sampling = SamplingReader(info.model, info.limits)
        # The last composition that was found valid, and the fields that it was read from.
        self._composition: _Composition | None = None
        self._composition_data: tuple[bytes, bytes, bytes] | None = None

    def decode(self, message: worker_pb2.StepRequest) -> Step:
        """The step as values.

        Raises:
            InvalidArgument: a field is misshapen, out of range or contradicts another; it names field, value and limit.
        """
        operations = self._cache_operations(message.cache_operations)
        changes = self._row_changes(message)
        batch = self._batch(message.batch)
        sealed = self._sealed(message)
        _check_cache_operations(operations)
        _check_row_changes(changes)
        _check_batch(batch, self._model, self._limits)
        checkpoints = self._state_lines(message.checkpoints, "checkpoints", (self._model.max_model_len + 1,))
        return Step(message.step_id, message.scheduler_epoch, operations, changes, batch, sealed, checkpoints)

    def load_adapter(self, message: worker_pb2.LoadAdapter) -> LoadAdapter:
        """The adapter to load. InvalidArgument: the worker has no such slot, or the digest is none."""
        if len(message.digest) != DIGEST_BYTES:
            raise invalid_field("load_adapter.digest", f"has {len(message.digest)} bytes; it must have {DIGEST_BYTES}")
        slot = self._slot(message.slot, "load_adapter.slot")
        return LoadAdapter(slot, message.digest, Path(message.directory))

    def _cache_operations(self, message: worker_pb2.CacheOperations) -> CacheOperations:
        gpu, host = self._pool.num_gpu_blocks, self._pool.num_host_blocks
        return CacheOperations(
            swap_out=_tuples(message.swap_out, "cache_operations.swap_out", (gpu, host)),
            swap_in=_tuples(message.swap_in, "cache_operations.swap_in", (host, gpu)),
            copy=_tuples(message.copy, "cache_operations.copy", (gpu, gpu)),
        )

    def _row_changes(self, message: worker_pb2.StepRequest) -> RowChanges:
        rows = self._limits.max_num_rows
        bounds = (rows, self._max_blocks, self._pool.num_gpu_blocks)
        return RowChanges(
            release=_ids(message.release, "release", rows),
            assign=tuple(self._assign(each, f"assign[{i}]") for i, each in enumerate(message.assign)),
            fork=_tuples(message.fork, "fork", (rows, rows)),
            reseed=tuple(
                ReseedRow(self._row(each.row, f"reseed[{i}].row"), each.seed) for i, each in enumerate(message.reseed)
            ),
            set_tokens=tuple(self._set_tokens(each, f"set_tokens[{i}]") for i, each in enumerate(message.set_tokens)),
            block_table_deltas=_tuples(message.block_table_deltas, "block_table_deltas", bounds),
            state_tables=self._state_lines(message.state_tables, "state_tables"),
        )

    def _state_lines(self, data: bytes, field: str, below: tuple[int, ...] = ()) -> Int32Array:
        """[n, 1 + len(below) + state_blocks]: a row, numbers with these bounds, and the blocks of a state."""
        of_blocks = (self._pool.num_gpu_blocks,) * self._pool.state_blocks
        if data and not of_blocks:
            raise invalid_field(field, "is not empty; the layers of this model keep no state")
        return _tuples(data, field, (self._limits.max_num_rows, *below, *of_blocks))

    def _assign(self, message: worker_pb2.AssignRow, field: str) -> AssignRow:
        token_ids = self._tokens(message.token_ids, f"{field}.token_ids", 0)
        if not len(token_ids):
            raise invalid_field(f"{field}.token_ids", "is empty; a sequence has at least 1 token")
        if message.num_prompt_tokens > len(token_ids):
            raise invalid_field(
                f"{field}.num_prompt_tokens",
                f"is {message.num_prompt_tokens}; the sequence has {len(token_ids)} tokens",
            )
        block_table = _ids(message.block_table, f"{field}.block_table", self._pool.num_gpu_blocks)
        if len(block_table) > self._max_blocks:
            raise invalid_field(
                f"{field}.block_table", f"has {len(block_table)} blocks; a sequence has at most {self._max_blocks}"
            )
        if len(block_table) % self._pool.groups.num_groups:
            raise invalid_field(
                f"{field}.block_table",
                f"has {len(block_table)} blocks; it must have as many of each of the {self._pool.groups.num_groups} "
                "groups of layers",
            )
        if message.HasField("num_candidates") and not message.num_candidates:
            raise invalid_field(f"{field}.num_candidates", "is 0; it must be at least 1 if it is set")
        row = self._row(message.row, f"{field}.row")
        slot = self._slot(message.adapter_slot, f"{field}.adapter_slot") if message.HasField("adapter_slot") else None
        sampling, scope = self._sampling.read(message), message.draft_scope
        state_blocks = _ids(message.state_blocks, f"{field}.state_blocks", self._pool.num_gpu_blocks)
        if len(state_blocks) != self._pool.state_blocks:
            raise invalid_field(
                f"{field}.state_blocks", f"has {len(state_blocks)} blocks; a state has {self._pool.state_blocks}"
            )
        return AssignRow(row, token_ids, block_table, sampling, message.num_prompt_tokens, slot, scope, state_blocks)

    def _set_tokens(self, message: worker_pb2.SetTokens, field: str) -> SetTokens:
        row = self._row(message.row, f"{field}.row")
        token_ids = self._tokens(message.token_ids, f"{field}.token_ids", message.position)
        if not message.position + len(token_ids):
            raise invalid_field(f"{field}.token_ids", "leaves the row empty; a sequence has at least 1 token")
        return SetTokens(row, message.position, token_ids)

    def _tokens(self, data: bytes, field: str, position: int) -> Int32Array:
        token_ids = _ids(data, field, self._model.vocab_size)
        if position + len(token_ids) > self._model.max_model_len:
            raise invalid_field(
                field,
                f"ends at {position + len(token_ids)} tokens; a sequence has at most {self._model.max_model_len}",
            )
        return token_ids

    def _batch(self, message: worker_pb2.Batch) -> Batch:
        data = message.rows, message.num_new_tokens, message.samples
        if self._composition is None or data != self._composition_data:
            # While rows only decode, a step has the composition of the step before.
            self._composition, self._composition_data = self._checked_composition(*data), data
        rows, new, samples = self._composition
        computed = _ids(message.num_computed_tokens, "batch.num_computed_tokens", self._model.max_model_len)
        if len(computed) != len(rows):
            raise invalid_field("batch.num_computed_tokens", f"has {len(computed)} entries; batch.rows has {len(rows)}")
        drafts = _ids(message.max_drafts, "batch.max_drafts", self._limits.max_growth + 1)
        if len(drafts) not in (0, len(samples)):
            raise invalid_field("batch.max_drafts", f"has {len(drafts)} entries; batch.samples has {len(samples)}")
        max_passes = max(message.max_passes, 1)
        if max_passes > self._limits.max_passes:
            raise invalid_field("batch.max_passes", f"is {max_passes}; the limit is {self._limits.max_passes}")
        return Batch(rows, new, computed, samples, drafts, max_passes)

    def _checked_composition(self, rows_data: bytes, new_data: bytes, samples_data: bytes) -> _Composition:
        """Each row is named once and has new tokens; samples draw from rows of the batch."""
        max_rows = self._limits.max_num_rows
        rows = _ids(rows_data, "batch.rows", max_rows)
        new = decode_int32(new_data, "batch.num_new_tokens", minimum=1, below=self._model.max_model_len + 1)
        if len(new) != len(rows):
            raise invalid_field("batch.num_new_tokens", f"has {len(new)} entries; batch.rows has {len(rows)}")
        samples = _tuples(samples_data, "batch.samples", (max_rows, max_rows))
        check_distinct(rows, "batch.rows", "row")
        check_distinct(samples[:, 0], "batch.samples", "row", "as the one that samples")
        is_in_batch = np.zeros(max_rows, dtype=bool)
        is_in_batch[rows] = True
        if (worst := first_true(~is_in_batch[samples[:, 1]])) is not None:
            raise invalid_field("batch.samples", f"draws from row {samples[worst, 1]}, which is not in batch.rows")
        return rows, new, samples

    def _sealed(self, message: worker_pb2.StepRequest) -> SealedBlocks:
        blocks = _ids(message.sealed_block_ids, "sealed_block_ids", self._pool.num_gpu_blocks)
        short_lived = _ids(message.short_lived, "short_lived", self._pool.num_gpu_blocks)
        hashes = message.sealed_hashes
        if len(hashes) != HASH_BYTES * len(blocks):
            raise invalid_field(
                "sealed_hashes", f"has {len(hashes)} bytes; {len(blocks)} blocks need {HASH_BYTES * len(blocks)}"
            )
        return SealedBlocks(blocks, np.frombuffer(hashes, dtype=np.uint8).reshape(-1, HASH_BYTES), short_lived)

    def _row(self, row: int, field: str) -> int:
        if row >= self._limits.max_num_rows:
            raise invalid_field(field, f"is {row}; rows are below {self._limits.max_num_rows}")
        return row

    def _slot(self, slot: int, field: str) -> int:
        if slot >= self._limits.max_adapters:
            raise invalid_field(field, f"is {slot}; this worker has {self._limits.max_adapters} slots of adapters")
        return slot


def _check_cache_operations(operations: CacheOperations) -> None:
    """No list writes a block twice, and no copy reads a block that another one writes, so their order does not
    matter."""
    if not any(map(len, (operations.swap_out, operations.swap_in, operations.copy))):
        return
    check_distinct(operations.swap_out[:, 1], "cache_operations.swap_out", "host block", "as destination")
    check_distinct(operations.swap_in[:, 1], "cache_operations.swap_in", "block", "as destination")
    check_distinct(operations.copy[:, 1], "cache_operations.copy", "block", "as destination")
    sources, destinations = operations.copy.T
    if (worst := first_true(np.isin(sources, destinations))) is not None:
        raise invalid_field("cache_operations.copy", f"holds block {sources[worst]} as source and as destination")


def _check_row_changes(changes: RowChanges) -> None:
    """No list names a row twice if the changes would contradict each other."""
    if changes.are_none:
        return
    check_distinct(changes.release, "release", "row")
    check_distinct(changes.fork[:, 1], "fork", "child row")
    for field, named in (("assign", changes.assign), ("reseed", changes.reseed), ("set_tokens", changes.set_tokens)):
        if named:
            check_distinct(np.array([each.row for each in named], dtype=np.int32), field, "row")
    deltas = changes.block_table_deltas
    places = np.sort((deltas[:, 0].astype(np.int64) << 32) + deltas[:, 1])
    if (worst := first_true(places[1:] == places[:-1])) is not None:
        row, index = divmod(int(places[worst]), 1 << 32)
        raise invalid_field("block_table_deltas", f"sets block {index} of row {row} twice")


def _check_batch(batch: Batch, model: ModelGeometry, limits: WorkerLimits) -> None:
    """Token budget and positions of the model suffice, and drafts are of decodes."""
    num_tokens = int(batch.num_new_tokens.sum(dtype=np.int64)) + int(batch.max_drafts.sum(dtype=np.int64))
    if num_tokens > limits.max_num_batched_tokens:
        raise invalid_field(
            "batch.num_new_tokens",
            f"adds up to {num_tokens} tokens; a step takes at most {limits.max_num_batched_tokens}",
        )
    ends = batch.ends
    if (worst := first_true(ends > model.max_model_len)) is not None:
        raise invalid_field(
            "batch.num_new_tokens",
            f"takes row {batch.rows[worst]} to {ends[worst]} tokens; a sequence has at most {model.max_model_len}",
        )
    if batch.max_passes > 1:
        if len(batch.samples) != len(batch.rows) or (batch.num_new_tokens > 1).any():
            raise invalid_field("batch.max_passes", f"is {batch.max_passes}, and not all rows are decodes")
        if not len(batch.max_drafts) or (batch.max_drafts < batch.max_passes - 1).any():
            raise invalid_field("batch.max_passes", f"is {batch.max_passes}, and max_drafts is too small for it")
    if not len(batch.max_drafts):
        return
    num_new = np.zeros(limits.max_num_rows, np.int32)
    num_new[batch.rows] = batch.num_new_tokens
    samplers, sources = batch.samples.T
    if (worst := first_true((batch.max_drafts > 0) & ((samplers != sources) | (num_new[sources] > 1)))) is not None:
        raise invalid_field("batch.max_drafts", f"gives drafts to row {samplers[worst]}, which is no decode")


def _ids(data: bytes, field: str, below: int) -> Int32Array:
    return decode_int32(data, field, minimum=0, below=below)


@cache
def _nothing(width: int) -> Int32Array:
    """[0, width], read-only as all decoded arrays are."""
    array = np.zeros((0, width), np.int32)
    array.flags.writeable = False
    return array


def _tuples(data: bytes, field: str, below: tuple[int, ...]) -> Int32Array:
    """[n, len(below)]; each column has a bound of its own."""
    if not data:
        # Most lists of most steps are empty.
        return _nothing(len(below))
    array = decode_int32(data, field, minimum=0, columns=len(below))
    if len(array):
        for column, (greatest, bound) in enumerate(zip(array.max(axis=0), below, strict=True)):
            if greatest >= bound:
                raise invalid_field(field, f"holds {greatest} in column {column}; values there must be below {bound}")
    return array


def result_message(output: StepOutput) -> worker_pb2.RunResponse:
    """The answer to a step."""
    response, timings = worker_pb2.RunResponse(), output.timings
    # Filled in place: a message that is passed to the constructor of another is copied.
    result = response.result
    result.step_id = output.step_id
    result.rows, result.token_ids = encode_int32(output.rows), encode_int32(output.token_ids)
    if output.logprobs is not None:
        result.token_logprobs.samples = encode_int32(output.logprobs.samples)
        encode_logprobs(output.logprobs.columns, result.token_logprobs)
    result.prompt_logprobs.extend(map(_prompt_logprobs_message, output.prompt_logprobs))
    result.candidates.extend(map(_candidates_message, output.candidates))
    result.failures.extend(
        _failure_message(row, output.refusals.get(row), output.failure) for row in output.failed_rows
    )
    result.non_finite_chunks = encode_int32(output.non_finite_chunks)
    result.num_tokens, result.num_drafts = encode_int32(output.num_tokens), encode_int32(output.num_drafts)
    result.num_passes = 0 if output.num_passes == 1 else output.num_passes
    for each in output.vectors:
        result.vectors.add(row=each.row, values=encode_float32(each.values))
    for field in ("queue_us", "cache_operations_us", "model_us", "sample_us"):
        setattr(result.timings, field, min(getattr(timings, field), _MAX_UINT32))
    return response


def _failure_message(row: int, refusal: str | None, failure: str) -> worker_pb2.RowFailure:
    if refusal is not None:
        return worker_pb2.RowFailure(row=row, reason=worker_pb2.ROW_FAILURE_REASON_INVALID_SAMPLING, detail=refusal)
    return worker_pb2.RowFailure(row=row, reason=worker_pb2.ROW_FAILURE_REASON_NON_FINITE_LOGITS, detail=failure)


def acknowledgement(output: StepOutput) -> worker_pb2.RunResponse:
    """The answer of a rank other than rank 0: its results are the same, so it sends only a checksum of them."""
    crc32 = zlib.crc32(encode_int32(output.num_tokens), zlib.crc32(encode_int32(output.token_ids)))
    return worker_pb2.RunResponse(result=worker_pb2.StepResult(step_id=output.step_id, token_ids_crc32=crc32))


def attached_message(epoch: int, info: WorkerInfo, sealed: SealedBlocks) -> worker_pb2.RunResponse:
    """The answer to Attach."""
    attached = worker_pb2.Attached(
        scheduler_epoch=epoch,
        info=info_message(info),
        sealed_block_ids=encode_int32(sealed.block_ids),
        sealed_hashes=sealed.hashes.tobytes(),
    )
    return worker_pb2.RunResponse(attached=attached)


def tier_messages(changes: Sequence[tuple[int, bytes | None]]) -> Iterator[worker_pb2.RunResponse]:
    """Messages with the content of these slots of a tier; None marks an empty slot."""
    for start in range(0, len(changes), _SLOTS_AT_ONCE):
        part = sorted(changes[start : start + _SLOTS_AT_ONCE], key=lambda change: change[1] is None)
        slots, hashes = encode_int32([slot for slot, _ in part]), b"".join(name for _, name in part if name is not None)
        yield worker_pb2.RunResponse(tier_changed=worker_pb2.TierChanged(slots=slots, hashes=hashes))


def info_message(info: WorkerInfo) -> worker_pb2.WorkerInfo:
    """This worker's identity, geometry and limits."""
    return worker_pb2.WorkerInfo(
        worker_generation=info.worker_generation,
        rank=info.rank,
        world_size=info.world_size,
        pool=_pool_message(info.pool),
        model=worker_pb2.ModelGeometry(**asdict(info.model)),
        limits=worker_pb2.WorkerLimits(**asdict(info.limits)),
        protocol=protocol_of(info.pool).message(),
        fingerprint=info.fingerprint.message(),
        kv_namespace=info.kv_namespace,
        transfer_endpoint=info.transfer_endpoint,
    )


def _pool_message(pool: PoolGeometry) -> worker_pb2.KvPoolGeometry:
    values: dict[str, Any] = asdict(pool)
    groups = pool.groups
    del values["groups"]
    return worker_pb2.KvPoolGeometry(
        **values, full_groups=groups.num_full, windowed_groups=groups.num_windowed, window=groups.window
    )


def _prompt_logprobs_message(logprobs: PromptLogprobs) -> worker_pb2.RowPromptLogprobs:
    message = worker_pb2.RowPromptLogprobs(row=logprobs.row, first_position=logprobs.first_position)
    encode_logprobs(logprobs.columns, message)
    return message


def _candidates_message(candidates: RowCandidates) -> worker_pb2.RowCandidates:
    return worker_pb2.RowCandidates(
        row=candidates.row,
        token_ids=encode_int32(candidates.token_ids),
        logprobs=encode_float32(candidates.logprobs),
    )
