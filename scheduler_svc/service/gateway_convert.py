"""Between the messages of gateways and the values of the core. Arrays are checked before any use."""

from collections.abc import Iterator

from google.rpc import code_pb2

from quire import compatibility
from quire.arrays import decode_int32, encode_int32, encode_logprobs
from quire.common.v1 import common_pb2
from quire.logprob_columns import LogprobLog
from quire.rpc.errors import InvalidArgument, QuireError, invalid_field
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.beam_search import BeamParameters, EarlyStopping
from scheduler_svc.core.events import ClientEvents, RequestEnd, RequestFailure, SequenceEnd, Usage
from scheduler_svc.core.request import EmittedSequence, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.prompt_logprobs import PromptLogprobs
from scheduler_svc.service.replica import ReplicaInfo
from scheduler_svc.service.requests import GATEWAYS

MODEL_CHANGED = "MODEL_CHANGED"
"""Reason of the failure of requests that began with another model than the one that is attached now."""

_FAILURE_CODES = {MODEL_CHANGED: code_pb2.FAILED_PRECONDITION, "INVALID_SAMPLING": code_pb2.INVALID_ARGUMENT}
"""Of failures that the request or its model is to blame for; all others are INTERNAL."""

_FINISH_REASONS = {
    FinishReason.STOP: common_pb2.FINISH_REASON_STOP,
    FinishReason.LENGTH: common_pb2.FINISH_REASON_LENGTH,
}
_EARLY_STOPPING = {
    common_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.FALSE,
    common_pb2.EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    common_pb2.EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    common_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


# From gateways


_MAX_HANDLE = 2**31 - 1


def handle_from(handle: int) -> Handle:
    """Raises InvalidArgument for one that events, which carry handles as int32, could not name."""
    if handle > _MAX_HANDLE:
        raise invalid_field("handle", f"is {handle}; it must be at most {_MAX_HANDLE}")
    return Handle(handle)


def request_from_submit(submit: scheduler_pb2.Submit, *, vocab_size: int, max_num_seqs: int) -> Request:
    """A gateway's submission, under the gateway's own handle. Raises InvalidArgument."""
    output = submit.output
    num_returned = submit.sampling.n or 1
    beam = _beam_from(submit.sampling)
    num_sequences = submit.sampling.best_of or (num_returned if beam is None else beam.width)
    if num_sequences > max_num_seqs:
        # Before anything is made of that size.
        raise InvalidArgument(
            f"the request has {num_sequences} sequences; at most {max_num_seqs} run at once", reason="NEVER_FITS"
        )
    prompt = decode_int32(submit.prompt_token_ids, "prompt_token_ids", minimum=0, below=vocab_size)
    return Request(
        key=RequestKey(GATEWAYS, handle_from(submit.handle)),
        request_id=submit.request_id,
        prompt=prompt.tolist(),
        sampling=RowSampling(
            seed=submit.sampling.seed,
            parameters=submit.row_sampling,
            logprobs=output.logprobs if output.HasField("logprobs") else None,
            prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        ),
        max_tokens=submit.stopping.max_tokens,
        stop_token_ids=frozenset((*submit.stopping.stop_token_ids, *submit.eos_token_ids)),
        emitted=_emitted_from(submit, num_sequences, vocab_size),
        tenant=submit.tenant,
        num_sequences=num_sequences,
        num_returned=num_returned,
        priority=submit.priority,
        beam=beam,
        accepted_before=submit.resubmitted,
    )


def _beam_from(sampling: common_pb2.SamplingParameters) -> BeamParameters | None:
    """None where there is no beam search. Raises InvalidArgument."""
    if not sampling.HasField("beam_search"):
        return None
    beam = sampling.beam_search
    length_penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
    try:
        return BeamParameters(beam.beam_width, length_penalty, _EARLY_STOPPING[beam.early_stopping])
    except ValueError as error:
        raise InvalidArgument(f"sampling.beam_search: {error}") from error
    except KeyError as error:
        raise InvalidArgument(f"sampling.beam_search.early_stopping is {beam.early_stopping}") from error


def _emitted_from(submit: scheduler_pb2.Submit, num_sequences: int, vocab_size: int) -> list[EmittedSequence]:
    if not submit.emitted:
        return []
    sequences = [EmittedSequence(())] * num_sequences
    for each in submit.emitted:
        if each.sequence_index >= num_sequences:
            raise InvalidArgument(f"emitted names sequence {each.sequence_index}; the request has {num_sequences}")
        token_ids = decode_int32(each.token_ids, "emitted.token_ids", minimum=0, below=vocab_size).tolist()
        sequences[each.sequence_index] = EmittedSequence(token_ids, each.finished)
    return sequences


# To gateways


def welcome_message(
    epoch: int, info: ReplicaInfo, scheduler: Scheduler, durable_grace_s: float
) -> scheduler_pb2.ConnectResponse:
    """What a gateway needs to know of this replica."""
    return scheduler_pb2.ConnectResponse(
        welcome=scheduler_pb2.Welcome(
            scheduler_epoch=epoch,
            vocab_size=info.vocab_size,
            max_model_len=scheduler.config.max_len,
            block_size=info.block_size,
            num_gpu_blocks=info.num_gpu_blocks,
            num_host_blocks=info.num_host_blocks,
            max_num_seqs=scheduler.config.max_num_seqs,
            max_num_batched_tokens=scheduler.config.max_num_batched_tokens,
            durable_grace_ms=round(durable_grace_s * 1e3),
            architecture=info.architecture,
            dtype=info.dtype,
            max_logprobs=info.max_logprobs,
            protocol=compatibility.SCHEDULER_PROTOCOL.message(),
            model=info.fingerprint.message(),
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
    """The failure of a request that was accepted."""
    code = _FAILURE_CODES.get(failure.reason, code_pb2.INTERNAL)
    return scheduler_pb2.RequestFailure(
        handle=failure.key.handle, code=code, reason=failure.reason, message=failure.message
    )


def gateway_messages(outgoing: Outgoing) -> Iterator[scheduler_pb2.ConnectResponse]:
    """What goes out as messages, one of each kind at most."""
    if outgoing.is_ready is not None:
        yield scheduler_pb2.ConnectResponse(state=scheduler_pb2.ReplicaState(ready=outgoing.is_ready))
    if outgoing.has_events:
        yield events_message(outgoing)


def events_message(outgoing: Outgoing) -> scheduler_pb2.ConnectResponse:
    """What goes out together of that which happened to a gateway's requests, oldest first, in one message."""
    batches: list[ClientEvents] = outgoing.batches
    message = scheduler_pb2.TokenEvents(step_id=outgoing.step_id)
    message.handles = encode_int32([handle for batch in batches for handle in batch.handles])
    message.sequence_indices = encode_int32([index for batch in batches for index in batch.sequence_indices])
    message.offsets = encode_int32([offset for batch in batches for offset in batch.offsets])
    message.token_ids = encode_int32([token_id for batch in batches for token_id in batch.token_ids])
    message.prompt_logprobs.extend(map(_prompt_logprobs_message, outgoing.prompt_logprobs))
    _add_token_logprobs(message, batches)
    for batch in batches:
        message.finished.extend(map(_sequence_end_message, batch.finished))
        message.completed.extend(map(_request_end_message, batch.completed))
        message.failed.extend(map(_failure_message, batch.failed))
    message.completed.extend(_aborted_message(handle, usage) for handle, usage in outgoing.aborted)
    message.failed.extend(_refusal_message(handle, error) for handle, error in outgoing.refusals)
    return scheduler_pb2.ConnectResponse(events=message)


def _add_token_logprobs(message: scheduler_pb2.TokenEvents, batches: list[ClientEvents]) -> None:
    events: list[int] = []
    logprobs = LogprobLog()
    first = 0
    for batch in batches:
        events += [first + event for event in batch.with_logprobs]
        logprobs.extend(batch.logprobs)
        first += len(batch.token_ids)
    if events:
        message.token_logprobs.events = encode_int32(events)
        encode_logprobs(logprobs.columns(), message.token_logprobs)


def _prompt_logprobs_message(entry: PromptLogprobs) -> scheduler_pb2.PromptLogprobs:
    message = scheduler_pb2.PromptLogprobs(
        handle=entry.handle, first_position=entry.first_position, token_ids=encode_int32(entry.token_ids)
    )
    encode_logprobs(entry.columns, message)
    return message


def _sequence_end_message(end: SequenceEnd) -> scheduler_pb2.SequenceEnd:
    message = scheduler_pb2.SequenceEnd(
        handle=end.handle,
        sequence_index=end.sequence_index,
        num_tokens=end.num_tokens,
        reason=_FINISH_REASONS[end.reason],
    )
    if end.stop_token_id is not None:
        message.stop_token_id = end.stop_token_id
    if end.cumulative_logprob is not None:
        message.cumulative_logprob = end.cumulative_logprob
    return message


def _request_end_message(end: RequestEnd) -> scheduler_pb2.RequestEnd:
    return scheduler_pb2.RequestEnd(handle=end.handle, usage=_usage_message(end.usage))


def _aborted_message(handle: int, usage: Usage | None) -> scheduler_pb2.RequestEnd:
    """What answers an Abort."""
    return scheduler_pb2.RequestEnd(handle=handle, usage=None if usage is None else _usage_message(usage))


def _usage_message(usage: Usage) -> common_pb2.Usage:
    return common_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        generated_tokens=usage.generated_tokens,
        queue_ms=usage.queue_s * 1e3,
        prefill_ms=usage.prefill_s * 1e3,
        decode_ms=usage.decode_s * 1e3,
        preemptions=usage.preemptions,
    )
