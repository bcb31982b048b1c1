"""What holds where a request does not say: the model's own defaults, then the contract's."""

import dataclasses
import secrets
from typing import TypeVar

from gateway.requests.request import BeamSearch, BeamSearchOptions, EarlyStopping, Sampling, SamplingOptions

T = TypeVar("T")


def resolve_sampling(
    asked: SamplingOptions, defaults: SamplingOptions, bad_sequences: tuple[tuple[int, ...], ...] = ()
) -> Sampling:
    """Each value as asked, else the model's default, else the contract's; a seed is drawn where none is given.

    `bad_sequences` are the bad words as tokens. Beam search draws nothing, so the model's defaults of how to draw do
    not apply to it.
    """
    if asked.beam_search is not None:
        defaults = dataclasses.replace(defaults, temperature=0.0, top_k=None, top_p=None, min_p=None)
    return Sampling(
        temperature=_first(asked.temperature, defaults.temperature, 1.0),
        top_k=_first(asked.top_k, defaults.top_k, 0),
        top_p=_first(asked.top_p, defaults.top_p, 1.0),
        min_p=_first(asked.min_p, defaults.min_p, 0.0),
        seed=_seed(asked),
        presence_penalty=_first(asked.presence_penalty, defaults.presence_penalty, 0.0),
        frequency_penalty=_first(asked.frequency_penalty, defaults.frequency_penalty, 0.0),
        repetition_penalty=_first(asked.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=dict(asked.logit_bias),
        allowed_token_ids=tuple(dict.fromkeys(asked.allowed_token_ids)),
        bad_token_sequences=bad_sequences,
        beam_search=None if asked.beam_search is None else _resolve_beam_search(asked.beam_search),
    )


def sampling_of_another(asked: SamplingOptions, resolved: Sampling) -> Sampling:
    """The sampling of another request that asks the same; `resolved` is that of the first one."""
    return resolved if asked.seed is not None else dataclasses.replace(resolved, seed=_seed(asked))


def _seed(asked: SamplingOptions) -> int:
    """A negative one is the number of 64 bits that has the same bits, as torch has it."""
    return secrets.randbits(64) if asked.seed is None else asked.seed % 2**64


def _resolve_beam_search(asked: BeamSearchOptions) -> BeamSearch:
    assert isinstance(asked.early_stopping, EarlyStopping), "the validator lets nothing else pass"
    return BeamSearch(asked.beam_width, _first(asked.length_penalty, None, 1.0), asked.early_stopping)


def num_candidates(asked: SamplingOptions) -> int:
    """The sequences among which those that are returned are chosen."""
    if asked.beam_search is not None:
        return asked.beam_search.beam_width
    return asked.best_of or asked.n or 1


def _first(asked: T | None, model_default: T | None, default: T) -> T:
    if asked is not None:
        return asked
    return default if model_default is None else model_default
