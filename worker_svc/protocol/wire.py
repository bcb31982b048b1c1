"""Between messages and values: the worker's answers, and what the messages of a step stream contain of traces."""

from dataclasses import dataclass

from quire import compatibility
from quire.arrays import decode_int32, encode_float32, encode_int32, encode_logprobs
from quire.rpc.errors import InvalidArgument
from quire.worker.v1 import worker_pb2
from worker_svc.step import PromptLogprobs, RowCandidates, SealedBlocks, StepOutput, TokenLogprobs, WorkerInfo

RunResponse = worker_pb2.RunResponse

_MAX_UINT32 = 0xFFFFFFFF


def result_message(output: StepOutput) -> RunResponse:
    """The answer to a step."""
    timings = output.timings
    result = worker_pb2.StepResult(
        step_id=output.step_id,
        rows=encode_int32(output.rows),
        token_ids=encode_int32(output.token_ids),
        token_logprobs=None if output.logprobs is None else _logprobs_message(output.logprobs),
        prompt_logprobs=[_prompt_logprobs_message(each) for each in output.prompt_logprobs],
        candidates=[_candidates_message(each) for each in output.candidates],
        failures=[_failure_message(row, output.refusals.get(row)) for row in output.failed_rows],
        non_finite_chunks=encode_int32(output.non_finite_chunks),
        timings=worker_pb2.StepTimings(
            queue_us=min(timings.queue_us, _MAX_UINT32),
            cache_operations_us=min(timings.cache_operations_us, _MAX_UINT32),
            model_us=min(timings.model_us, _MAX_UINT32),
            sample_us=min(timings.sample_us, _MAX_UINT32),
        ),
    )
    return RunResponse(result=result)


def _failure_message(row: int, refusal: str | None) -> worker_pb2.RowFailure:
    if refusal is not None:
        return worker_pb2.RowFailure(row=row, reason=worker_pb2.ROW_FAILURE_REASON_INVALID_SAMPLING, detail=refusal)
    detail = "the logits hold NaN or +infinity, or nothing finite"
    return worker_pb2.RowFailure(row=row, reason=worker_pb2.ROW_FAILURE_REASON_NON_FINITE_LOGITS, detail=detail)


def acknowledgement(output: StepOutput) -> RunResponse:
    """The answer of a rank other than rank 0: its results are the same, so it sends none."""
    return RunResponse(result=worker_pb2.StepResult(step_id=output.step_id))


def attached_message(epoch: int, info: WorkerInfo, sealed: SealedBlocks) -> RunResponse:
    """The answer to Attach."""
    attached = worker_pb2.Attached(
        scheduler_epoch=epoch,
        info=info_message(info),
        sealed_block_ids=encode_int32(sealed.block_ids),
        sealed_hashes=sealed.hashes.tobytes(),
    )
    return RunResponse(attached=attached)


def heartbeat_message(last_step_id: int, busy_ms: int) -> RunResponse:
    """A sign of life, with the time that the device has been busy with its current step."""
    return RunResponse(heartbeat=worker_pb2.Heartbeat(last_step_id=last_step_id, busy_ms=busy_ms))


def info_message(info: WorkerInfo) -> worker_pb2.WorkerInfo:
    """This worker's identity, geometry and limits."""
    pool, model, limits = info.pool, info.model, info.limits
    return worker_pb2.WorkerInfo(
        worker_generation=info.worker_generation,
        rank=info.rank,
        world_size=info.world_size,
        pool=worker_pb2.KvPoolGeometry(
            block_size=pool.block_size,
            num_gpu_blocks=pool.num_gpu_blocks,
            num_host_blocks=pool.num_host_blocks,
            num_layers=pool.num_layers,
            num_kv_heads=pool.num_kv_heads,
            head_dim=pool.head_dim,
            dtype=pool.dtype,
            block_bytes=pool.block_bytes,
        ),
        model=worker_pb2.ModelGeometry(
            architecture=model.architecture,
            dtype=model.dtype,
            vocab_size=model.vocab_size,
            max_model_len=model.max_model_len,
            device=model.device,
        ),
        limits=worker_pb2.WorkerLimits(
            max_num_rows=limits.max_num_rows,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            max_steps_in_flight=limits.max_steps_in_flight,
            max_logprobs=limits.max_logprobs,
        ),
        protocol=compatibility.WORKER_PROTOCOL.message(),
        fingerprint=info.fingerprint.message(),
    )


def _logprobs_message(logprobs: TokenLogprobs) -> worker_pb2.TokenLogprobs:
    message = worker_pb2.TokenLogprobs(samples=encode_int32(logprobs.samples))
    encode_logprobs(logprobs.columns, message)
    return message


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


@dataclass(frozen=True, slots=True)
class StepOutline:
    """The rows of a step, unchecked.

    Attributes:
        released: rows that hold nothing any more.
        traced: trace parents of the rows that enter with this step.
        computed: number of computed tokens by row.
        sampling: rows that get a token.
    """

    step_id: int
    released: list[int]
    traced: dict[int, str]
    computed: dict[int, int]
    sampling: set[int]


def has_traces(request: worker_pb2.RunRequest) -> bool:
    """Whether the request is a step that assigns traced rows."""
    return bool(request.step.traced)


def outline_of(request: worker_pb2.RunRequest) -> StepOutline | None:
    """None for a step with malformed arrays."""
    step = request.step
    try:
        rows = decode_int32(step.batch.rows, "rows").tolist()
        num_new_tokens = decode_int32(step.batch.num_new_tokens, "num_new_tokens").tolist()
        return StepOutline(
            step.step_id,
            decode_int32(step.release, "release").tolist(),
            {traced.row: traced.traceparent for traced in step.traced},
            dict(zip(rows, num_new_tokens, strict=False)),
            # Pairs, of which the first is the row that samples.
            set(decode_int32(step.batch.samples, "samples")[::2].tolist()),
        )
    except InvalidArgument:
        return None


def answer_of(response: worker_pb2.RunResponse) -> tuple[int, int] | None:
    """The step id of an answer, and the microseconds in the model; None for other responses."""
    if not response.HasField("result"):
        return None
    return response.result.step_id, response.result.timings.model_us
