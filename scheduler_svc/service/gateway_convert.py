"""Between the messages of gateways and the values of the core. Arrays are checked before any use."""

from google.rpc import code_pb2

from quire.arrays import decode_int32, encode_int32
from quire.common.v1 import common_pb2
from quire.rpc.errors import FieldViolation, InvalidArgument, QuireError, Unimplemented
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step_plan import (
    ClientEvents,
    PositionLogprobs,
    RequestEnd,
    RequestFailure,
    SequenceEnd,
    TokenLogprob,
)
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.replica import ReplicaInfo

_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}


# From gateways


def request_from_submit(submit: scheduler_pb2.Submit, client: ClientId, vocab_size: int) -> Request:
    """A gateway's submission. Raises InvalidArgument or Unimplemented."""
    _check_supported(submit)
    prompt = decode_int32(submit.prompt_token_ids, "prompt_token_ids", minimum=0, below=vocab_size)
    return Request(
        key=RequestKey(client, Handle(submit.handle)),
        request_id=submit.request_id,
        prompt=prompt.tolist(),
        sampling=_sampling_from(submit),
        max_tokens=submit.stopping.max_tokens,
        stop_token_ids=frozenset((*submit.stopping.stop_token_ids, *submit.eos_token_ids)),
        emitted=_emitted_from(submit, vocab_size),
        tenant=submit.tenant,
    )


def _check_supported(submit: scheduler_pb2.Submit) -> None:
    sampling = submit.sampling
    asked = {
        "sampling.n": sampling.n > 1,
        "sampling.best_of": sampling.best_of > 1,
        "sampling.beam_search": sampling.HasField("beam_search"),
        "sampling.presence_penalty": sampling.presence_penalty != 0,
        "sampling.frequency_penalty": sampling.frequency_penalty != 0,
        "sampling.repetition_penalty": sampling.HasField("repetition_penalty") and sampling.repetition_penalty != 1,
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.allowed_token_ids": bool(sampling.allowed_token_ids),
        "bad_token_sequences": bool(submit.bad_token_sequences),
        "stopping.min_tokens": submit.stopping.min_tokens > 0,
        "output.prompt_logprobs": submit.output.HasField("prompt_logprobs"),
    }
    for name, is_asked in asked.items():
        if is_asked:
            violation = FieldViolation(name, "is not supported by this version")
            raise Unimplemented(f"{name} is not supported by this version", violations=[violation])


def _sampling_from(submit: scheduler_pb2.Submit) -> RowSampling:
    sampling = submit.sampling
    return RowSampling(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        logprobs=submit.output.logprobs if submit.output.HasField("logprobs") else None,
    )


def _emitted_from(submit: scheduler_pb2.Submit, vocab_size: int) -> list[int]:
    if not submit.emitted:
        return []
    if len(submit.emitted) > 1 or submit.emitted[0].sequence_index != 0:
        raise InvalidArgument("emitted names other sequences than 0, the only one of the request")
    return decode_int32(submit.emitted[0].token_ids, "emitted.token_ids", minimum=0, below=vocab_size).tolist()


# To gateways


def welcome_message(epoch: int, info: ReplicaInfo, scheduler: Scheduler) -> scheduler_pb2.ConnectResponse:
    """What a gateway needs to know of this replica."""
    return scheduler_pb2.ConnectResponse(
        welcome=scheduler_pb2.Welcome(
            scheduler_epoch=epoch,
            vocab_size=info.vocab_size,
            max_model_len=scheduler.max_len,
            block_size=info.block_size,
            num_gpu_blocks=info.num_gpu_blocks,
            num_host_blocks=info.num_host_blocks,
            max_num_seqs=scheduler.config.max_num_seqs,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
            architecture=info.architecture,
            dtype=info.dtype,
            max_logprobs=info.max_logprobs,
        )
    )


def _refusal_message(handle: int, error: QuireError) -> scheduler_pb2.RequestFailure:
    """A refusal or failure of one request."""
    code, _ = error.code.value
    failure = scheduler_pb2.RequestFailure(handle=handle, code=code, reason=error.reason, message=error.message)
    if error.retry_after_ms is not None:
        failure.retry_after_ms = error.retry_after_ms
    return failure


def _failure_message(failure: RequestFailure) -> scheduler_pb2.RequestFailure:
    """The failure of a request whose row the worker could not sample."""
    return scheduler_pb2.RequestFailure(
        handle=failure.key.handle, code=code_pb2.INTERNAL, reason=failure.reason, message=failure.message
    )


def events_message(outgoing: Outgoing) -> scheduler_pb2.ConnectResponse:
    """All that happened to a gateway's requests since the last message, oldest first, in one."""
    batches: list[ClientEvents] = outgoing.batches
    message = scheduler_pb2.TokenEvents(step_id=outgoing.step_id)
    message.handles = encode_int32([handle for batch in batches for handle in batch.handles])
    message.sequence_indices = encode_int32([index for batch in batches for index in batch.sequence_indices])
    message.offsets = encode_int32([offset for batch in batches for offset in batch.offsets])
    message.token_ids = encode_int32([token_id for batch in batches for token_id in batch.token_ids])
    first = 0
    for batch in batches:
        for event, logprobs in batch.logprobs:
            message.logprobs.add(event=first + event, logprobs=_position_logprobs_message(logprobs))
        first += len(batch.token_ids)
        message.finished.extend(map(_sequence_end_message, batch.finished))
        message.completed.extend(map(_request_end_message, batch.completed))
        message.failed.extend(map(_failure_message, batch.failed))
    message.failed.extend(_refusal_message(handle, error) for handle, error in outgoing.refusals)
    return scheduler_pb2.ConnectResponse(events=message)


def _position_logprobs_message(position: PositionLogprobs) -> common_pb2.PositionLogprobs:
    return common_pb2.PositionLogprobs(
        chosen=_logprob_message(position.chosen), top=[_logprob_message(entry) for entry in position.top]
    )


def _logprob_message(entry: TokenLogprob) -> common_pb2.Logprob:
    return common_pb2.Logprob(token_id=entry.token_id, logprob=entry.logprob, rank=entry.rank)


def _sequence_end_message(end: SequenceEnd) -> scheduler_pb2.SequenceEnd:
    message = scheduler_pb2.SequenceEnd(
        handle=end.handle,
        sequence_index=end.sequence_index,
        num_tokens=end.num_tokens,
        reason=_FINISH_REASONS[end.reason],
    )
    if end.stop_token_id is not None:
        message.stop_token_id = end.stop_token_id
    return message


def _request_end_message(end: RequestEnd) -> scheduler_pb2.RequestEnd:
    usage = common_pb2.Usage(
        prompt_tokens=end.usage.prompt_tokens,
        cached_tokens=end.usage.cached_tokens,
        generated_tokens=end.usage.generated_tokens,
        queue_ms=end.usage.queue_s * 1e3,
        prefill_ms=end.usage.prefill_s * 1e3,
        decode_ms=end.usage.decode_s * 1e3,
        preemptions=end.usage.preemptions,
    )
    return scheduler_pb2.RequestEnd(handle=end.handle, usage=usage)
