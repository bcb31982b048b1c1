"""Between the core's plans and results and the messages of workers."""

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from quire import compatibility
from quire.arrays import decode_float32, decode_int32, decode_logprobs, encode_int32
from quire.compatibility import ModelFingerprint, ProtocolVersions, check_protocol
from quire.rpc.errors import InvalidArgument, invalid_field
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.beam_search import Candidates
from scheduler_svc.core.block_pool import HASH_BYTES, BlockHash, BlockId
from scheduler_svc.core.step import RowAssignment, SampleLogprobs, StepInFlight, StepPlan, StepResult
from scheduler_svc.service.prompt_logprobs import RowPromptLogprobs
from scheduler_svc.service.replica import ReplicaInfo


def attach_message(epoch: int) -> bytes:
    attach = worker_pb2.Attach(scheduler_epoch=epoch, protocol=compatibility.WORKER_PROTOCOL.message())
    return worker_pb2.RunRequest(attach=attach).SerializeToString()


def step_message(plan: StepPlan, epoch: int, generation: int) -> bytes:
    """A step, serialized once for all ranks."""
    step = worker_pb2.StepRequest(
        step_id=plan.step_id,
        scheduler_epoch=epoch,
        worker_generation=generation,
        cache_operations=worker_pb2.CacheOperations(
            swap_out=encode_int32(plan.swap_out), swap_in=encode_int32(plan.swap_in), copy=encode_int32(plan.copies)
        ),
        release=encode_int32(plan.release),
        assign=[_assign_message(assigned) for assigned in plan.assign],
        fork=encode_int32(plan.forks),
        reseed=[worker_pb2.ReseedRow(row=row, seed=seed) for row, seed in plan.reseed],
        set_tokens=[
            worker_pb2.SetTokens(row=row, position=position, token_ids=encode_int32([token_id]))
            for row, position, token_id in plan.set_tokens.tolist()
        ],
        block_table_deltas=encode_int32(plan.block_table_deltas),
        batch=worker_pb2.Batch(
            rows=encode_int32(plan.rows),
            num_new_tokens=encode_int32(plan.num_new_tokens),
            num_computed_tokens=encode_int32(plan.num_computed_tokens),
            samples=encode_int32(plan.samples),
        ),
        sealed_block_ids=encode_int32([block for block, _ in plan.sealed]),
        sealed_hashes=b"".join(content for _, content in plan.sealed),
        traced=[
            worker_pb2.TracedRow(row=assigned.row, traceparent=assigned.traceparent)
            for assigned in plan.assign
            if assigned.traceparent is not None
        ],
    )
    return worker_pb2.RunRequest(step=step).SerializeToString()


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
    )
    if sampling.prompt_logprobs is not None and len(assigned.token_ids) == assigned.num_prompt_tokens:
        # What has output has had them delivered before its first token.
        message.prompt_logprobs = sampling.prompt_logprobs
    return message


class RankPlace(NamedTuple):
    """Which rank a worker is."""

    rank: int
    world_size: int


_MAX_INT32 = 2**31 - 1

_BOUNDS = {
    # A scheduler keeps about 100 bytes a block: 1.6 GB here.
    "pool.num_gpu_blocks": (1, 1 << 24),
    "pool.num_host_blocks": (0, 1 << 24),
    "pool.block_size": (1, 1 << 16),
    "model.vocab_size": (1, _MAX_INT32),
    "model.max_model_len": (1, _MAX_INT32),
    "limits.max_num_rows": (1, _MAX_INT32),
    "limits.max_num_batched_tokens": (1, _MAX_INT32),
    "limits.max_steps_in_flight": (1, _MAX_INT32),
}
"""The least and the greatest value of what workers report. Tables are made by it, and token ids and positions travel as
int32."""


def replica_info(info: worker_pb2.WorkerInfo) -> ReplicaInfo:
    """What attached.

    Raises:
        FailedPrecondition: it speaks no version of the contract that this scheduler does.
        InvalidArgument: names the first value with which no scheduler can work.
    """
    theirs = ProtocolVersions.of(info.protocol)
    ours = compatibility.WORKER_PROTOCOL
    check_protocol("quire.worker.v1", ours, theirs, us="the scheduler", them="the worker")
    for name, (least, greatest) in _BOUNDS.items():
        part, field = name.split(".")
        value = getattr(getattr(info, part), field)
        if not least <= value <= greatest:
            raise invalid_field(f"info.{name}", f"is {value}; a scheduler works with {least} to {greatest}")
    return ReplicaInfo(
        worker_generation=info.worker_generation,
        block_size=info.pool.block_size,
        num_gpu_blocks=info.pool.num_gpu_blocks,
        num_host_blocks=info.pool.num_host_blocks,
        architecture=info.model.architecture,
        dtype=info.model.dtype,
        vocab_size=info.model.vocab_size,
        max_model_len=info.model.max_model_len,
        max_num_rows=info.limits.max_num_rows,
        max_num_batched_tokens=info.limits.max_num_batched_tokens,
        max_steps_in_flight=info.limits.max_steps_in_flight,
        max_logprobs=info.limits.max_logprobs,
        fingerprint=ModelFingerprint.of(info.fingerprint),
    )


def sealed_blocks(attached: worker_pb2.Attached) -> list[tuple[BlockId, BlockHash]]:
    """The worker's inventory of final blocks. Raises InvalidArgument when its arrays do not make sense."""
    blocks = decode_int32(attached.sealed_block_ids, "sealed_block_ids", minimum=0).tolist()
    hashes = attached.sealed_hashes
    if len(hashes) != HASH_BYTES * len(blocks):
        raise InvalidArgument(f"sealed_hashes has {len(hashes)} bytes for {len(blocks)} blocks")
    starts = range(0, len(hashes), HASH_BYTES)
    contents = [BlockHash(hashes[start : start + HASH_BYTES]) for start in starts]
    return [(BlockId(block), content) for block, content in zip(blocks, contents, strict=True)]


@dataclass(frozen=True, slots=True)
class StepAnswer:
    """All that a worker says of a step: what the core takes in, and what it does not look at.

    `rows`, int64[n], are those that sampled, in the order of the result's tokens. `worker_us` are the microseconds that
    the step spent in the worker's queue, with cache operations, in the model and in the sampler.
    """

    result: StepResult
    rows: np.ndarray
    prompt_logprobs: SequenceOf[RowPromptLogprobs]
    worker_us: tuple[int, int, int, int]

    def check_rows(self, step: StepInFlight) -> None:
        """Raises ValueError unless it has the rows that sample in this step, in their order."""
        if not np.array_equal(self.rows, step.rows):
            raise ValueError(
                f"the result of step {self.result.step_id} has rows {self.rows.tolist()}; "
                f"step {step.step_id} samples {step.rows.tolist()}"
            )


def step_answer(message: worker_pb2.StepResult, vocab_size: int) -> StepAnswer:
    """A step's answer. Raises InvalidArgument when its arrays do not make sense."""
    rows = decode_int32(message.rows, "rows", minimum=0).astype(np.int64)
    timings = message.timings
    return StepAnswer(
        _step_result(message, rows, vocab_size),
        rows,
        [_prompt_logprobs(each, vocab_size) for each in message.prompt_logprobs],
        (timings.queue_us, timings.cache_operations_us, timings.model_us, timings.sample_us),
    )


def _step_result(message: worker_pb2.StepResult, rows: np.ndarray, vocab_size: int) -> StepResult:
    token_ids = decode_int32(message.token_ids, "token_ids", minimum=0, below=vocab_size)
    if len(rows) != len(token_ids):
        raise InvalidArgument(f"step {message.step_id} has {len(rows)} rows and {len(token_ids)} token ids")
    return StepResult(
        step_id=message.step_id,
        token_ids=token_ids.astype(np.int64),
        logprobs=_logprobs(message, len(rows), vocab_size) if message.HasField("token_logprobs") else None,
        failures={failure.row: failure.detail for failure in message.failures},
        refused=frozenset(
            failure.row
            for failure in message.failures
            if failure.reason == worker_pb2.ROW_FAILURE_REASON_INVALID_SAMPLING
        ),
        candidates={entry.row: _candidates(entry, vocab_size) for entry in message.candidates},
        non_finite_chunks=frozenset(decode_int32(message.non_finite_chunks, "non_finite_chunks", minimum=0).tolist()),
    )


def _logprobs(message: worker_pb2.StepResult, num_samples: int, vocab_size: int) -> SampleLogprobs:
    logprobs = message.token_logprobs
    samples = decode_int32(logprobs.samples, "token_logprobs.samples", minimum=0, below=num_samples)
    columns = decode_logprobs(logprobs, vocab_size=vocab_size)
    if len(samples) != len(columns) or not (samples[1:] > samples[:-1]).all():
        raise InvalidArgument(
            f"step {message.step_id} has log probabilities of {len(columns)} tokens for the samples "
            f"{samples.tolist()}, which must be as many and rising"
        )
    return SampleLogprobs(samples.astype(np.int64), columns)


def _candidates(entry: worker_pb2.RowCandidates, vocab_size: int) -> Candidates:
    token_ids = decode_int32(entry.token_ids, "candidates.token_ids", minimum=0, below=vocab_size).tolist()
    logprobs = decode_float32(entry.logprobs, "candidates.logprobs").tolist()
    if not token_ids or len(token_ids) != len(logprobs):
        raise InvalidArgument(f"row {entry.row} has {len(token_ids)} candidates and {len(logprobs)} log probabilities")
    return Candidates(token_ids, logprobs)


def _prompt_logprobs(message: worker_pb2.RowPromptLogprobs, vocab_size: int) -> RowPromptLogprobs:
    columns = decode_logprobs(message, vocab_size=vocab_size)
    return RowPromptLogprobs(message.row, message.first_position, columns)
