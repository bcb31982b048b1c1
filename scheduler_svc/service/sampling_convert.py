"""From a submission's sampling to the core's, and what a worker would refuse of it, refused alone before it is planned.

A gateway checks more than this for its callers. But a worker ends the stream over a step that it refuses, and the same
step would be planned again: one request would stop all of them.
"""

import math
from collections.abc import Collection
from typing import TypeVar

from quire.common.v1 import common_pb2
from quire.rpc.errors import InvalidArgument, invalid_field
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.beam import BeamParameters, EarlyStopping
from scheduler_svc.core.request import RowSampling

TokenIds = TypeVar("TokenIds", bound=Collection[int])

_EARLY_STOPPING = {
    common_pb2.EARLY_STOPPING_UNSPECIFIED: EarlyStopping.FALSE,
    common_pb2.EARLY_STOPPING_FALSE: EarlyStopping.FALSE,
    common_pb2.EARLY_STOPPING_TRUE: EarlyStopping.TRUE,
    common_pb2.EARLY_STOPPING_NEVER: EarlyStopping.NEVER,
}


def check_sampling(submit: scheduler_pb2.Submit, max_logprobs: int) -> None:
    """Raises InvalidArgument that names field, value and limit."""
    sampling = submit.sampling
    _check_finite(sampling)
    if sampling.temperature < 0:
        raise invalid_field("sampling.temperature", f"is {sampling.temperature:g}; it must be at least 0")
    if sampling.HasField("top_p") and not 0 < sampling.top_p <= 1:
        raise invalid_field("sampling.top_p", f"is {sampling.top_p:g}; it must be above 0 and at most 1")
    if not 0 <= sampling.min_p <= 1:
        raise invalid_field("sampling.min_p", f"is {sampling.min_p:g}; it must be from 0 to 1")
    if sampling.repetition_penalty < 0:
        raise invalid_field("sampling.repetition_penalty", f"is {sampling.repetition_penalty:g}; it must be at least 0")
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(submit.output, name) > max_logprobs:
            raise invalid_field(f"output.{name}", f"is {getattr(submit.output, name)}; the most is {max_logprobs}")
    for index, sequence in enumerate(submit.bad_token_sequences):
        if not sequence.ids:
            raise invalid_field(f"bad_token_sequences[{index}]", "is empty; a sequence has at least 1 token")


def sampling_from(submit: scheduler_pb2.Submit, vocab_size: int) -> RowSampling:
    """Of a submission that `check_sampling` took. Raises InvalidArgument for a token that the model does not have."""
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


def beam_from(sampling: common_pb2.SamplingParameters) -> BeamParameters | None:
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


def _below(vocab_size: int, field: str, token_ids: TokenIds) -> TokenIds:
    """The token ids, or a map by them. A worker ends the stream over an id that it does not know."""
    if token_ids and max(token_ids) >= vocab_size:
        raise invalid_field(field, f"holds token {max(token_ids)}; token ids of this model are below {vocab_size}")
    return token_ids


def _check_finite(sampling: common_pb2.SamplingParameters) -> None:
    names = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
    values = {name: getattr(sampling, name) for name in names}
    values |= {f"logit_bias[{token_id}]": bias for token_id, bias in sampling.logit_bias.items()}
    for name, value in values.items():
        if not math.isfinite(value):
            raise invalid_field(f"sampling.{name}", f"is {value}; it must be finite")
