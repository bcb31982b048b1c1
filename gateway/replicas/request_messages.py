"""Conversion of requests to messages for schedulers, and back. A submission has all data to continue the request."""

import numpy as np
from google.protobuf.message import DecodeError

from gateway.replicas.generation_request import GenerationRequest, NamedAdapter
from gateway.replicas.live import LiveRequest
from gateway.replicas.sequence import SequenceStream
from gateway.text.formats.answer import PLAIN, AnswerFormat
from gateway.text.formats.parser import OfferedTool, Thinking
from gateway.types import optional
from quire.common.v1 import common_pb2
from quire.messages.arrays import decode_int32, encode_int32
from quire.rpc.errors import Unavailable, invalid_field
from quire.scheduler.v1 import scheduler_pb2
from quire.service.compatibility import unknown_field
from quire.tracing import TraceContext


def submit_message(
    live: LiveRequest, *, has_drafts: bool = True, is_offer: bool = False
) -> scheduler_pb2.ConnectRequest:
    """The submission of a request: all parameters, and the tokens that the gateway already has. It has no prediction if
    the replica does not draft. An offer is never durable."""
    is_durable = live.request.durable and not is_offer
    request, asked, trace = live.request, live.request.sampling, live.request.trace
    submit = scheduler_pb2.Submit(
        handle=live.handle,
        request_id=request.request_id,
        # Part of the prefix cache's keys, also for pins.
        tenant=request.tenant,
        priority=request.priority,
        prompt_token_ids=encode_int32(request.prompt_token_ids),
        # Only the fields that the scheduler reads; the rest is in `row_sampling`.
        sampling=common_pb2.SamplingParameters(
            seed=request.seed,
            n=asked.n,
            best_of=asked.best_of,
            beam_search=asked.beam_search if asked.HasField("beam_search") else None,
        ),
        stopping=request.stopping,
        output=request.output,
        eos_token_ids=request.eos_token_ids,
        row_sampling=_row_sampling(request) if has_drafts else request.row_sampling,
        durable=is_durable,
        trace_context=None if trace is None else _trace_message(trace),
        emitted=[_emitted_message(stream) for stream in live.sequences if stream.token_ids],
        nonce=request.nonce,
        resubmitted=is_offer or live.submissions > 1,
        num_prompt_logprobs=len(live.prompt_logprobs),
        has_constraint=asked.HasField("constraint"),
        adapter=adapter_message(request.adapter),
        front_end=request.front_end,
        cache_salt=request.cache_salt,
        kv_source=live.kv_source,
        offer=is_offer,
    )
    if not is_durable:
        # The scheduler sees no text, unless it keeps the request for another gateway.
        submit.stopping.ClearField("stop")
    elif request.answer_format != PLAIN:
        submit.answer_format.CopyFrom(_format_message(request.answer_format))
    return scheduler_pb2.ConnectRequest(submit=submit)


def _trace_message(trace: TraceContext) -> scheduler_pb2.TraceContext:
    return scheduler_pb2.TraceContext(traceparent=trace.traceparent, tracestate=trace.tracestate)


def _row_sampling(request: GenerationRequest) -> bytes:
    """The serialized row sampling with the prediction appended: protobuf merges concatenated messages."""
    if not request.predicted:
        return request.row_sampling
    predicted = common_pb2.RowSampling(predicted_token_ids=encode_int32(request.predicted))
    return request.row_sampling + predicted.SerializeToString()


def request_from_submit(submit: scheduler_pb2.Submit) -> GenerationRequest:
    """The durable request in a submission, for any gateway that continues it; the inverse of `submit_message`.

    Raises:
        InvalidArgument: the submission is malformed.
        Unavailable: a gateway of a newer release submitted it, with a feature that this release lacks.
    """
    if (field := unknown_field(submit)) is not None:
        raise _of_newer_release(f"has {field}")
    try:
        row = common_pb2.RowSampling.FromString(submit.row_sampling)
    except DecodeError as error:
        raise invalid_field("row_sampling", f"is no RowSampling: {error}") from error
    predicted = decode_int32(row.predicted_token_ids, "predicted_token_ids", minimum=0)
    row_sampling = submit.row_sampling
    if len(predicted):
        row.ClearField("predicted_token_ids")
        row_sampling = row.SerializeToString(deterministic=True)
    sampling = row.sampling
    sampling.MergeFrom(submit.sampling)
    sampling.ClearField("seed")
    trace: scheduler_pb2.TraceContext | None = optional(submit, "trace_context")
    return GenerationRequest(
        request_id=submit.request_id,
        tenant=submit.tenant,
        prompt_token_ids=np.asarray(decode_int32(submit.prompt_token_ids, "prompt_token_ids", minimum=0), np.int32),
        sampling=sampling,
        stopping=submit.stopping,
        output=submit.output,
        seed=submit.sampling.seed,
        eos_token_ids=tuple(submit.eos_token_ids),
        row_sampling=row_sampling,
        predicted=tuple(predicted.tolist()),
        priority=submit.priority,
        durable=True,
        nonce=submit.nonce,
        answer_format=_format_from(submit.answer_format) if submit.HasField("answer_format") else PLAIN,
        trace=TraceContext(trace.traceparent, optional(trace, "tracestate")) if trace is not None else None,
        adapter=_adapter_from(submit.adapter) if submit.HasField("adapter") else None,
        cache_salt=submit.cache_salt,
        front_end=submit.front_end,
        is_steady=bool(submit.front_end),
    )


def adapter_message(adapter: NamedAdapter | None) -> scheduler_pb2.Adapter | None:
    if adapter is None:
        return None
    return scheduler_pb2.Adapter(digest=adapter.digest, directory=adapter.directory, name=adapter.name)


def _adapter_from(message: scheduler_pb2.Adapter) -> NamedAdapter:
    return NamedAdapter(message.name, message.digest, message.directory)


def _format_message(answer_format: AnswerFormat) -> scheduler_pb2.AnswerFormat:
    return scheduler_pb2.AnswerFormat(
        tool_format=answer_format.tool_format,
        reasoning_format=answer_format.reasoning_format,
        thinking=answer_format.thinking.value,
        tools=[
            scheduler_pb2.OfferedTool(name=tool.name, text_parameters=sorted(tool.text_parameters))
            for tool in answer_format.tools
        ],
    )


def _format_from(message: scheduler_pb2.AnswerFormat) -> AnswerFormat:
    """Raises Unavailable if this gateway does not know the format."""
    try:
        return AnswerFormat(
            optional(message, "tool_format"),
            optional(message, "reasoning_format"),
            Thinking(message.thinking),
            tuple(OfferedTool(tool.name, frozenset(tool.text_parameters)) for tool in message.tools),
        )
    except ValueError as error:
        raise _of_newer_release(f"has an answer_format in which {error}") from error


def _of_newer_release(what: str) -> Unavailable:
    """A retryable error: the caller may reach another gateway, or this one after an upgrade."""
    return Unavailable(
        f"the request {what}, which this gateway's release lacks; a newer gateway can continue it",
        reason="NEWER_REQUEST",
        retry_after_ms=1000,
    )


def _emitted_message(stream: SequenceStream) -> scheduler_pb2.EmittedSequence:
    return scheduler_pb2.EmittedSequence(
        sequence_index=stream.index, token_ids=encode_int32(stream.token_ids), finished=stream.finished is not None
    )
