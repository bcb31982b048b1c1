"""What holds where a request does not say: the model's own defaults, then the contract's."""

import secrets
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass

from gateway.requests.limits import NUMBERS
from gateway.requests.request import RequestOptions
from quire.common.v1.common_pb2 import (
    EARLY_STOPPING_FALSE,
    OutputOptions,
    RowSampling,
    SamplingParameters,
    StoppingParameters,
    TokenIds,
)

# The contract's own defaults.
_SAMPLING = SamplingParameters()
for _name, _number in NUMBERS.items():
    setattr(_SAMPLING, _name, _number.default)
# What the scheduler decides on, and the gateway alone knows.
_NOT_FOR_WORKERS = ("seed", "n", "best_of", "beam_search", "bad_words")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters with every default set but for what depends on the prompt, as `GenerationRequest` has them. The
    requests of one call share them."""

    sampling: SamplingParameters
    stopping: StoppingParameters
    output: OutputOptions
    eos_token_ids: tuple[int, ...]
    row_sampling: bytes

    def stopping_at(self, max_tokens: int) -> StoppingParameters:
        """When the sequences of a request end that generates so many tokens at most."""
        if self.stopping.max_tokens == max_tokens:
            return self.stopping
        stopping = StoppingParameters(max_tokens=max_tokens)
        stopping.MergeFrom(self.stopping)
        return stopping


def resolve(
    options: RequestOptions,
    model_defaults: SamplingParameters,
    eos_token_ids: tuple[int, ...],
    bad_sequences: Sequence[Sequence[int]] = (),
) -> Parameters:
    """What valid options mean. `bad_sequences` are the bad words as tokens."""
    sampling = _sampling(options.sampling, model_defaults)
    stopping = StoppingParameters(min_tokens=0, ignore_eos=False, include_stop_string=False)
    stopping.MergeFrom(options.stopping)
    output = OutputOptions(include_special_tokens=False)
    output.MergeFrom(options.output)
    _keep_each_once(stopping.stop_token_ids)
    ending = () if stopping.ignore_eos else eos_token_ids
    return Parameters(sampling, stopping, output, ending, _row_sampling(sampling, stopping, ending, bad_sequences))


def drawn_seed(sampling: SamplingParameters) -> int:
    """The seed of a request: the one that it names, or one of its own."""
    return sampling.seed if sampling.HasField("seed") else secrets.randbits(64)


def num_candidates(sampling: SamplingParameters) -> int:
    """The sequences among which those that are returned are chosen."""
    if sampling.HasField("beam_search"):
        return sampling.beam_search.beam_width
    return sampling.best_of or sampling.n or 1


def _sampling(asked: SamplingParameters, model_defaults: SamplingParameters) -> SamplingParameters:
    sampling = SamplingParameters()
    for message in (_SAMPLING, model_defaults, asked):
        sampling.MergeFrom(message)
    sampling.ClearField("seed")
    sampling.n = asked.n or 1
    sampling.best_of = num_candidates(asked)
    if asked.HasField("beam_search"):
        for name, number in NUMBERS.items():
            # The model's defaults of how to draw do not apply where nothing is drawn.
            if number.in_beam_search is not None:
                setattr(sampling, name, number.in_beam_search)
        beam = sampling.beam_search
        beam.length_penalty = beam.length_penalty if beam.HasField("length_penalty") else 1.0
        beam.early_stopping = beam.early_stopping or EARLY_STOPPING_FALSE
    _keep_each_once(sampling.allowed_token_ids)
    return sampling


def _keep_each_once(token_ids: MutableSequence[int]) -> None:
    distinct = dict.fromkeys(token_ids[:])
    if len(distinct) < len(token_ids):
        token_ids[:] = distinct


def _row_sampling(
    sampling: SamplingParameters,
    stopping: StoppingParameters,
    eos_token_ids: Sequence[int],
    bad_sequences: Sequence[Sequence[int]],
) -> bytes:
    row = RowSampling(sampling=sampling, bad_token_sequences=[TokenIds(ids=each) for each in bad_sequences])
    for name in _NOT_FOR_WORKERS:
        row.sampling.ClearField(name)
    if stopping.min_tokens:
        row.stopping.min_tokens = stopping.min_tokens
        row.stopping.stop_token_ids.extend({*stopping.stop_token_ids, *eos_token_ids})
    return row.SerializeToString(deterministic=True)
