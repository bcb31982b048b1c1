"""Messages of quire.scheduler.v1 to values and back."""

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
from google.protobuf.message import DecodeError

from gateway.replicas.events import (
    EventBatch,
    FinishReason,
    PromptRun,
    RequestEnded,
    RequestFailed,
    SequenceEnded,
    TokenRun,
    Usage,
    Welcome,
)
from gateway.replicas.live import LiveRequest, SequenceStream
from gateway.request.types import GenerationRequest
from quire import compatibility
from quire.arrays import decode_int32, decode_logprobs, encode_int32
from quire.common.v1 import common_pb2
from quire.compatibility import ModelFingerprint, ProtocolVersions
from quire.rpc.errors import InvalidArgument, error_for_code, invalid_field
from quire.scheduler.v1 import scheduler_pb2
from quire.tracing import TraceContext

_REASONS = {
    common_pb2.FINISH_REASON_STOP: FinishReason.STOP,
    common_pb2.FINISH_REASON_LENGTH: FinishReason.LENGTH,
    common_pb2.FINISH_REASON_CANCELLED: FinishReason.CANCELLED,
    common_pb2.FINISH_REASON_ERROR: FinishReason.ERROR,
}
_USAGE_FIELDS = tuple(field.name for field in fields(Usage))
# Fields of a welcome that the message has under the same name, as the same type.
_WELCOME_FIELDS = tuple(
    field.name for field in fields(Welcome) if field.name not in ("durable_grace_s", "protocol", "model")
)


def hello_message(gateway_id: str, grace_period_ms: int, model: ModelFingerprint) -> scheduler_pb2.ConnectRequest:
    return scheduler_pb2.ConnectRequest(
        hello=scheduler_pb2.Hello(
            gateway_id=gateway_id,
            grace_period_ms=grace_period_ms,
            protocol=compatibility.SCHEDULER_PROTOCOL.message(),
            model=model.message(),
        )
    )


def abort_message(handle: int, sequence_index: int | None, *, wants_usage: bool) -> scheduler_pb2.ConnectRequest:
    """Without an index it ends the whole request."""
    abort = scheduler_pb2.Abort(handle=handle, sequence_index=sequence_index, wants_usage=wants_usage)
    return scheduler_pb2.ConnectRequest(abort=abort)


def submit_message(live: LiveRequest) -> scheduler_pb2.ConnectRequest:
    """The request with all defaults, and the tokens that the gateway has of it already."""
    request = live.request
    submit = scheduler_pb2.Submit(
        handle=live.handle,
        request_id=request.request_id,
        # Part of the prefix cache's keys, as it is for pins.
        tenant=request.tenant,
        priority=request.priority,
        prompt_token_ids=encode_int32(request.prompt_token_ids),
        sampling=_decided_on(request),
        stopping=request.stopping,
        output=request.output,
        eos_token_ids=request.eos_token_ids,
        row_sampling=request.row_sampling,
        durable=request.durable,
        trace_context=None if request.trace is None else _trace_message(request.trace),
        emitted=[_emitted_message(stream) for stream in live.sequences if stream.token_ids],
        nonce=request.nonce,
        resubmitted=live.submissions > 1,
        num_prompt_logprobs=len(live.prompt_logprobs),
    )
    if not request.durable:
        # The scheduler sees no text, unless it keeps the request for another gateway.
        submit.stopping.ClearField("stop")
    return scheduler_pb2.ConnectRequest(submit=submit)


def request_from_submit(submit: scheduler_pb2.Submit) -> GenerationRequest:
    """A durable request that any gateway can go on with; the inverse of `submit_message`.

    Raises InvalidArgument if it is malformed.
    """
    prompt = decode_int32(submit.prompt_token_ids, "prompt_token_ids", minimum=0)
    try:
        sampling = common_pb2.RowSampling.FromString(submit.row_sampling).sampling
    except DecodeError as error:
        raise invalid_field("row_sampling", f"is no RowSampling: {error}") from error
    sampling.MergeFrom(submit.sampling)
    sampling.ClearField("seed")
    return GenerationRequest(
        request_id=submit.request_id,
        tenant=submit.tenant,
        prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        sampling=sampling,
        stopping=submit.stopping,
        output=submit.output,
        seed=submit.sampling.seed,
        eos_token_ids=tuple(submit.eos_token_ids),
        row_sampling=submit.row_sampling,
        priority=submit.priority,
        durable=True,
        nonce=submit.nonce,
        trace=_trace_from(submit.trace_context) if submit.HasField("trace_context") else None,
    )


def _decided_on(request: GenerationRequest) -> common_pb2.SamplingParameters:
    """What the scheduler itself needs of the sampling."""
    asked = request.sampling
    beam_search = asked.beam_search if asked.HasField("beam_search") else None
    return common_pb2.SamplingParameters(seed=request.seed, n=asked.n, best_of=asked.best_of, beam_search=beam_search)


def _emitted_message(stream: SequenceStream) -> scheduler_pb2.EmittedSequence:
    return scheduler_pb2.EmittedSequence(
        sequence_index=stream.index, token_ids=encode_int32(stream.token_ids), finished=stream.finished is not None
    )


def _trace_message(trace: TraceContext) -> scheduler_pb2.TraceContext:
    return scheduler_pb2.TraceContext(traceparent=trace.traceparent, tracestate=trace.tracestate)


def _trace_from(trace: scheduler_pb2.TraceContext) -> TraceContext:
    return TraceContext(trace.traceparent, trace.tracestate if trace.HasField("tracestate") else None)


def welcome_from(message: scheduler_pb2.Welcome) -> Welcome:
    return Welcome(
        **{name: getattr(message, name) for name in _WELCOME_FIELDS},
        durable_grace_s=message.durable_grace_ms / 1e3,
        protocol=ProtocolVersions.of(message.protocol),
        model=ModelFingerprint.of(message.model),
    )


def event_batch_from(message: scheduler_pb2.TokenEvents) -> EventBatch:
    """Raises InvalidArgument if the message is malformed."""
    return EventBatch(
        runs=_token_runs(message),
        ended=[_sequence_ended(end) for end in message.finished],
        completed=[_request_ended(end) for end in message.completed],
        failed=[_request_failed(failure) for failure in message.failed],
        prompt_runs=[_prompt_run(entry) for entry in message.prompt_logprobs],
    )


def _token_runs(message: scheduler_pb2.TokenEvents) -> list[TokenRun]:
    handles = decode_int32(message.handles, "handles", minimum=0).tolist()
    indices = decode_int32(message.sequence_indices, "sequence_indices", minimum=0).tolist()
    offsets = decode_int32(message.offsets, "offsets", minimum=0).tolist()
    token_ids = decode_int32(message.token_ids, "token_ids", minimum=0).tolist()
    if not len(handles) == len(indices) == len(offsets) == len(token_ids):
        raise InvalidArgument(
            f"columns differ in length: handles {len(handles)}, sequence_indices {len(indices)}, "
            f"offsets {len(offsets)}, token_ids {len(token_ids)}"
        )
    runs: list[TokenRun] = []
    run: TokenRun | None = None
    for handle, index, offset, token_id in zip(handles, indices, offsets, token_ids, strict=True):
        if (
            run is None
            or run.handle != handle
            or run.sequence_index != index
            or run.offset + len(run.token_ids) != offset
        ):
            run = TokenRun(handle, index, offset, [])
            runs.append(run)
        run.token_ids.append(token_id)
    if message.HasField("token_logprobs"):
        _add_logprobs(runs, message.token_logprobs, len(handles))
    return runs


def _add_logprobs(runs: Sequence[TokenRun], message: scheduler_pb2.TokenLogprobs, num_events: int) -> None:
    """Splits the columns into those of the runs. Either all tokens of a run have log probabilities, or none."""
    events = decode_int32(message.events, "token_logprobs.events", minimum=0, below=num_events)
    columns = decode_logprobs(message)
    if len(events) != len(columns) or not (events[1:] > events[:-1]).all():
        raise InvalidArgument(
            f"token_logprobs has {len(columns)} positions for {len(events)} events; "
            "they must be equally many, in rising order"
        )
    ends = np.cumsum([len(run.token_ids) for run in runs])
    counts = np.diff(np.searchsorted(events, ends), prepend=0).tolist()
    for run, count, part in zip(runs, counts, columns.split(counts), strict=True):
        if count not in (0, len(run.token_ids)):
            raise InvalidArgument(f"handle {run.handle}: {len(run.token_ids)} tokens, {count} logprobs")
        run.logprobs = part if count else None


def _prompt_run(message: scheduler_pb2.PromptLogprobs) -> PromptRun:
    if not message.first_position:
        raise InvalidArgument(f"prompt_logprobs.first_position is 0 for handle {message.handle}; it must be at least 1")
    token_ids = decode_int32(message.token_ids, "prompt_logprobs.token_ids", minimum=0)
    columns = decode_logprobs(message)
    if len(token_ids) != len(columns):
        raise InvalidArgument(
            f"handle {message.handle}: log probabilities of {len(columns)} of {len(token_ids)} tokens"
        )
    return PromptRun(message.handle, message.first_position, token_ids, columns)


def _sequence_ended(message: scheduler_pb2.SequenceEnd) -> SequenceEnded:
    if message.reason not in _REASONS:
        raise InvalidArgument(f"finished.reason is {message.reason} for handle {message.handle}")
    return SequenceEnded(
        handle=message.handle,
        sequence_index=message.sequence_index,
        num_tokens=message.num_tokens,
        reason=_REASONS[message.reason],
        stop_token_id=message.stop_token_id if message.HasField("stop_token_id") else None,
        cumulative_logprob=message.cumulative_logprob if message.HasField("cumulative_logprob") else None,
    )


def _request_ended(message: scheduler_pb2.RequestEnd) -> RequestEnded:
    return RequestEnded(message.handle, _usage(message.usage) if message.HasField("usage") else None)


def _request_failed(message: scheduler_pb2.RequestFailure) -> RequestFailed:
    retry_after_ms = message.retry_after_ms if message.HasField("retry_after_ms") else None
    error = error_for_code(message.code, message.message, reason=message.reason or None, retry_after_ms=retry_after_ms)
    return RequestFailed(message.handle, error)


def _usage(message: common_pb2.Usage) -> Usage:
    return Usage(**{name: getattr(message, name) for name in _USAGE_FIELDS})
