"""What the contract knows and this version does not do. Asking for it is an error; it is never ignored."""

from gateway.limits import SUPPORTED_N
from gateway.request import RequestOptions
from quire.rpc.errors import FieldViolation


def unsupported_fields(request: RequestOptions) -> list[FieldViolation]:
    """The fields of a valid request that ask for it. A value that changes nothing (n = 1, a penalty of 0) is fine."""
    sampling, stopping, output = request.sampling, request.stopping, request.output
    asked = {
        "sampling.n": (sampling.n or 1) > SUPPORTED_N,
        "sampling.best_of": (sampling.best_of or 1) > SUPPORTED_N,
        "sampling.beam_search": sampling.beam_search is not None,
        "sampling.presence_penalty": (sampling.presence_penalty or 0) != 0,
        "sampling.frequency_penalty": (sampling.frequency_penalty or 0) != 0,
        "sampling.repetition_penalty": sampling.repetition_penalty not in (None, 1),
        "sampling.logit_bias": bool(sampling.logit_bias),
        "sampling.allowed_token_ids": bool(sampling.allowed_token_ids),
        "sampling.bad_words": bool(sampling.bad_words),
        "stopping.min_tokens": (stopping.min_tokens or 0) > 0,
        "stopping.include_stop_string": stopping.include_stop_string,
        "output.prompt_logprobs": output.prompt_logprobs is not None,
        "durable": request.durable,
    }
    return [FieldViolation(field, "is not supported by this version") for field, is_asked in asked.items() if is_asked]
