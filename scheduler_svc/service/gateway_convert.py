"""Between the messages of gateways and the values of the core. Arrays are checked before any use."""

from collections.abc import Collection, Iterator
from typing import TypeVar

from google.rpc import code_pb2

from quire.arrays import decode_int32, encode_int32
from quire.common.v1 import common_pb2
from quire.rpc.errors import FieldViolation, InvalidArgument, QuireError
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.beam import BeamParameters, EarlyStopping
from scheduler_svc.core.logprobs import PositionLogprobs, TokenLogprob
from scheduler_svc.core.request import ClientId, EmittedSequence, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step_plan import ClientEvents, RequestEnd, RequestFailure, SequenceEnd
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.prompt_logprobs import PromptLogprobs
from scheduler_svc.service.replica import ReplicaInfo

TokenIds = TypeVar("TokenIds", bound=Collection[int])

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


def request_from_submit(submit: scheduler_pb2.Submit, client: ClientId, vocab_size: int) -> Request:
    """A gateway's submission. Raises InvalidArgument."""
    num_returned = submit.sampling.n or 1
    beam = _beam_from(submit.sampling)
    num_sequences = submit.sampling.best_of or (num_returned if beam is None else beam.width)
    prompt = decode_int32(submit.prompt_token_ids, "prompt_token_ids", minimum=0, below=vocab_size)
    return Request(
        key=RequestKey(client, Handle(submit.handle)),
        request_id=submit.request_id,
        prompt=prompt.tolist(),
        sampling=_sampling_from(submit, vocab_size),
        max_tokens=submit.stopping.max_tokens,
        stop_token_ids=frozenset((*submit.stopping.stop_token_ids, *submit.eos_token_ids)),
        emitted=_emitted_from(submit, num_sequences, vocab_size),
        tenant=submit.tenant,
        num_sequences=num_sequences,
        num_returned=num_returned,
        priority=submit.priority,
        beam=beam,
    )


def _beam_from(sampling: common_pb2.SamplingParameters) -> BeamParameters | None:
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


def _sampling_from(submit: scheduler_pb2.Submit, vocab_size: int) -> RowSampling:
    sampling, stopping, output = submit.sampling, submit.stopping, submit.output
    ending = sorted({*stopping.stop_token_ids, *submit.eos_token_ids})
    return RowSampling(
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p if sampling.HasField("top_p") else 1.0,
        min_p=sampling.min_p,
        logprobs=output.logprobs if output.HasField("logprobs") else None,
        prompt_logprobs=output.prompt_logprobs if output.HasField("prompt_logprobs") else None,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty if sampling.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple(sorted(_below(vocab_size, "sampling.logit_bias", sampling.logit_bias).items())),
        allowed_token_ids=tuple(_below(vocab_size, "sampling.allowed_token_ids", sampling.allowed_token_ids)),
        bad_token_sequences=tuple(
            tuple(_below(vocab_size, f"bad_token_sequences[{index}]", sequence.ids))
            for index, sequence in enumerate(submit.bad_token_sequences)
        ),
        min_tokens=stopping.min_tokens,
        # An eos id beyond the logits cannot be drawn anyway.
        stop_token_ids=tuple(each for each in ending if each < vocab_size) if stopping.min_tokens else (),
    )


def _below(vocab_size: int, field: str, token_ids: TokenIds) -> TokenIds:
    """The token ids, or a map by them. A worker ends the stream over an id that it does not know."""
    if token_ids and max(token_ids) >= vocab_size:
        description = f"holds token {max(token_ids)}; token ids of this model are below {vocab_size}"
        raise InvalidArgument(f"{field} {description}", violations=[FieldViolation(field, description)])
    return token_ids


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


def gateway_messages(outgoing: Outgoing) -> Iterator[scheduler_pb2.ConnectResponse]:
    """What goes out as messages, one of each kind at most."""
    if outgoing.is_ready is not None:
        yield scheduler_pb2.ConnectResponse(state=scheduler_pb2.ReplicaState(ready=outgoing.is_ready))
    if outgoing.has_events:
        yield events_message(outgoing)


def events_message(outgoing: Outgoing) -> scheduler_pb2.ConnectResponse:
    """All that happened to a gateway's requests since the last message, oldest first, in one."""
    batches: list[ClientEvents] = outgoing.batches
    message = scheduler_pb2.TokenEvents(step_id=outgoing.step_id)
    message.handles = encode_int32([handle for batch in batches for handle in batch.handles])
    message.sequence_indices = encode_int32([index for batch in batches for index in batch.sequence_indices])
    message.offsets = encode_int32([offset for batch in batches for offset in batch.offsets])
    message.token_ids = encode_int32([token_id for batch in batches for token_id in batch.token_ids])
    message.prompt_logprobs.extend(map(_prompt_logprobs_message, outgoing.prompt_logprobs))
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


def _prompt_logprobs_message(entry: PromptLogprobs) -> scheduler_pb2.PromptLogprobs:
    return scheduler_pb2.PromptLogprobs(
        handle=entry.handle,
        first_position=entry.first_position,
        positions=[_position_logprobs_message(each) for each in entry.positions],
    )


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
    if end.cumulative_logprob is not None:
        message.cumulative_logprob = end.cumulative_logprob
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
