"""What a worker would refuse of a submission's sampling, refused alone and before it is planned.

A gateway checks more than this for its callers. But a worker ends the stream over a step that it refuses, and the same
step would be planned again: one request would stop all of them.
"""

import math

from quire.common.v1 import common_pb2
from quire.rpc.errors import FieldViolation, InvalidArgument
from quire.scheduler.v1 import scheduler_pb2


def check_sampling(submit: scheduler_pb2.Submit, max_logprobs: int) -> None:
    """Raises InvalidArgument that names field, value and limit."""
    sampling = submit.sampling
    _check_finite(sampling)
    if sampling.temperature < 0:
        raise _invalid("sampling.temperature", f"is {sampling.temperature:g}; it must be at least 0")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise _invalid("sampling.top_p", f"is {sampling.top_p:g}; it must be above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise _invalid("sampling.min_p", f"is {sampling.min_p:g}; it must be from 0 to 1")
    if sampling.repetition_penalty < 0:
        raise _invalid("sampling.repetition_penalty", f"is {sampling.repetition_penalty:g}; it must be at least 0")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(submit.output, name) > max_logprobs:
            raise _invalid(f"output.{name}", f"is {getattr(submit.output, name)}; the most is {max_logprobs}")
    for index, sequence in enumerate(submit.bad_token_sequences):
        if not sequence.ids:
            raise _invalid(f"bad_token_sequences[{index}]", "is empty; a sequence has at least 1 token")


def _check_finite(sampling: common_pb2.SamplingParameters) -> None:
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    values = {name: getattr(sampling, name) for name in names}
    values |= {f"logit_bias[{token_id}]": bias for token_id, bias in sampling.logit_bias.items()}
    for name, value in values.items():
        if not math.isfinite(value):
            raise _invalid(f"sampling.{name}", f"is {value}; it must be finite")


def _invalid(field: str, description: str) -> InvalidArgument:
    return InvalidArgument(f"{field} {description}", violations=[FieldViolation(field, description)])
