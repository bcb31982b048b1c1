"""Beam search and what contradicts it; tests/service/gateway/test_bad_input.py goes through every rule by gRPC."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request.prepare import resolve
from gateway.request.validation import check_request
from quire.common.v1.common_pb2 import (
    EARLY_STOPPING_FALSE,
    EARLY_STOPPING_NEVER,
    BeamSearchParameters,
    SamplingParameters,
)
from quire.rpc.errors import InvalidArgument
from tests.support.parameters import make_options
from tests.unit.gateway.request.test_validation import LIMITS

EVERYTHING_ELSE = {
    "temperature": 0.0,
    "top_k": 0,
    "top_p": 1.0,
    "min_p": 0.0,
    "seed": 1,
    "presence_penalty": 1.0,
    "frequency_penalty": -1.0,
    "repetition_penalty": 2.0,
    "logit_bias": {3: 1.0},
    "allowed_token_ids": [1, 2],
    "bad_words": ["x"],
}


def check(width=4, *, stopping=None, limits=LIMITS, beam=None, **sampling):
    sampling["beam_search"] = {"beam_width": width, **(beam or {})}
    check_request(make_options(sampling=sampling, stopping=stopping), limits, "served")


def fields_refused(*args, **fields):
    with pytest.raises(InvalidArgument) as caught:
        check(*args, **fields)
    return [violation.field for violation in caught.value.violations]


def test_beam_search_with_all_that_applies_to_it_passes():
    check(n=4, best_of=4, beam={"length_penalty": -10.0, "early_stopping": EARLY_STOPPING_NEVER})
    sampling = {**EVERYTHING_ELSE, "beam_search": {"beam_width": 2}}
    stopping = {"max_tokens": 5, "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": True}
    check_request(make_options(sampling=sampling, stopping=stopping), LIMITS, "served")


def test_the_widest_beam_is_what_a_scheduler_runs_at_once():
    limits = dataclasses.replace(LIMITS, max_n=3)
    check(3, limits=limits)
    assert fields_refused(4, limits=limits) == ["sampling.beam_search.beam_width"]


def test_a_width_that_only_json_can_bring_is_refused():
    assert fields_refused(-1) == ["sampling.beam_search.beam_width"]


def test_each_contradiction_is_named_once():
    found = fields_refused(2, n=3, best_of=1, temperature=-1.0, top_k=5, top_p=0.0, min_p=2.0, stopping={"stop": ["x"]})
    assert found == [
        "sampling.n",
        "sampling.best_of",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.min_p",
        "stopping.stop",
    ]


def test_a_stop_string_says_what_to_use_instead():
    with pytest.raises(InvalidArgument, match="stop cannot be used with beam search; use stop_token_ids"):
        check(stopping={"stop": ["x"]})


@settings(deadline=None)
@given(st.floats())
def test_length_penalty_is_finite_and_bounded(value):
    if -10 <= value <= 10:
        check(beam={"length_penalty": value})
    else:
        assert fields_refused(beam={"length_penalty": value}) == ["sampling.beam_search.length_penalty"]


def test_the_models_defaults_of_drawing_do_not_apply_and_its_penalty_does():
    defaults = SamplingParameters(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.5)
    sampling = resolve(make_options(sampling={"beam_search": {"beam_width": 2}}), defaults, ()).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 1, 0)
    assert (sampling.repetition_penalty, sampling.n, sampling.best_of) == (1.5, 1, 2)
    assert sampling.beam_search == BeamSearchParameters(
        beam_width=2, length_penalty=1.0, early_stopping=EARLY_STOPPING_FALSE
    )
    assert not resolve(make_options(), defaults, ()).sampling.HasField("beam_search")


def test_many_stop_tokens_in_a_wide_search_are_too_many_candidates():
    limits = dataclasses.replace(LIMITS, max_stop_token_ids=64)
    check(16, stopping={"stop_token_ids": list(range(60))}, limits=limits)
    with pytest.raises(InvalidArgument, match=r"stop_token_ids has 60 entries.*64 beams.*3,904 candidates.*2,048"):
        check(64, stopping={"stop_token_ids": list(range(60))}, limits=limits)
