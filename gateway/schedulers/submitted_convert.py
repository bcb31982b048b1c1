"""A durable request as any gateway can read it from what another one submitted."""

from typing import Any

import numpy as np

from gateway.requests.request import BeamSearch, EarlyStopping, GenerationRequest, Sampling, Stopping
from quire.arrays import decode_int32
from quire.common.v1 import common_pb2
from quire.scheduler.v1 import scheduler_pb2
from quire.tracing import TraceContext

_EARLY_STOPPING = {
    common_pb2.EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    common_pb2.EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    common_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def request_from_submit(submit: scheduler_pb2.Submit) -> GenerationRequest:
    """The inverse of `scheduler_convert.submit_message`. Raises InvalidArgument for a malformed array."""
    stopping, output = submit.stopping, submit.output
    prompt = decode_int32(submit.prompt_token_ids, "prompt_token_ids", minimum=0)
    return GenerationRequest(
        request_id=submit.request_id,
        tenant=submit.tenant,
        prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        sampling=_sampling_from(submit),
        stopping=Stopping(
            max_tokens=stopping.max_tokens,
            stop=tuple(submit.durable.stop),
            stop_token_ids=tuple(stopping.stop_token_ids),
            eos_token_ids=tuple(submit.eos_token_ids),
            min_tokens=stopping.min_tokens,
            include_stop_string=submit.durable.include_stop_string,
        ),
        logprobs=_optional(output, "logprobs"),
        prompt_logprobs=_optional(output, "prompt_logprobs"),
        include_special_tokens=output.include_special_tokens,
        priority=submit.priority,
        ignore_eos=stopping.ignore_eos,
        num_sequences=submit.sampling.n,
        best_of=submit.sampling.best_of,
        durable=True,
        nonce=submit.nonce,
        trace=_trace_from(submit.trace_context) if submit.HasField("trace_context") else None,
    )


def _sampling_from(submit: scheduler_pb2.Submit) -> Sampling:
    sampling = submit.sampling
    return Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        bad_token_sequences=tuple(tuple(sequence.ids) for sequence in submit.bad_token_sequences),
        beam_search=_beam_search_from(sampling.beam_search) if sampling.HasField("beam_search") else None,
    )


def _trace_from(trace: scheduler_pb2.TraceContext) -> TraceContext:
    return TraceContext(trace.traceparent, trace.tracestate if trace.HasField("tracestate") else None)


def _beam_search_from(beam: common_pb2.BeamSearchParameters) -> BeamSearch:
    return BeamSearch(beam.beam_width, beam.length_penalty, _EARLY_STOPPING[beam.early_stopping])


def _optional(message: Any, field: str) -> int | None:
    return getattr(message, field) if message.HasField(field) else None
