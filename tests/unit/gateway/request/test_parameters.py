"""Defaults, seeds and bad words: from validated options to the submitted request."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from gateway.request.generation_config import NO_DEFAULTS, ModelDefaults
from gateway.request.parameters import (
    CallParameters,
    LastParameters,
    bad_token_sequences,
    check_choice,
    drawn_seed,
    resolve,
)
from quire.common.v1.common_pb2 import EARLY_STOPPING_FALSE, BeamSearchParameters, RowSampling, SamplingParameters
from quire.rpc.errors import InvalidArgument
from tests.support.parameters import make_options
from tests.support.tokenizers import byte_level, wrapped


def ids_of(text):
    return tuple(byte_level().encode(text, add_special_tokens=False).ids)


async def test_a_word_is_banned_at_the_start_and_after_a_space():
    found = await bad_token_sequences(wrapped(byte_level()), ["cat", " cat", "the"], 2048)
    assert found == tuple(dict.fromkeys(map(ids_of, ("cat", " cat", "the", " the"))))
    assert len(found) > 2


async def test_a_word_without_tokens_is_refused_by_name():
    tokenizer = Tokenizer.from_str(byte_level().to_str())
    tokenizer.normalizer = normalizers.Replace("\u00ad", "")
    with pytest.raises(InvalidArgument) as raised:
        await bad_token_sequences(wrapped(tokenizer), ["cat", "\u00ad"], 2048)
    assert raised.value.violations[0].field == "sampling.bad_words[1]"


def test_asked_wins_over_the_model_and_the_model_over_the_contract():
    options = make_options(sampling={"temperature": 0.0, "seed": 0, "repetition_penalty": 1})
    defaults = SamplingParameters(temperature=0.6, top_k=20, repetition_penalty=1.25)
    sampling = resolve(options, ModelDefaults(defaults), ()).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 20, 1, 0)
    assert sampling.repetition_penalty == 1
    assert drawn_seed(options.sampling) == 0


async def test_calls_share_the_parameters_of_the_last_request_if_they_ask_for_the_same():
    chat = SimpleNamespace(reasoning_format=None)
    model: Any = SimpleNamespace(tokenizer=wrapped(byte_level()), chat=chat, defaults=NO_DEFAULTS, eos_token_ids=(2,))
    limits: Any = SimpleNamespace(vocab_size=2048, max_model_len=64)
    last = LastParameters()

    async def completed(limits=limits, **sampling):
        return await CallParameters(last).complete(make_options(sampling=sampling), model, limits, "t")

    first = await completed(temperature=0.5)
    assert await completed(temperature=0.5) is first
    other = await completed(temperature=0.7)
    assert (first.sampling.temperature, other.sampling.temperature) == (0.5, pytest.approx(0.7))
    assert await completed(temperature=0.7) is other
    assert await completed(SimpleNamespace(vocab_size=64, max_model_len=64), temperature=0.7) is not other


def test_the_models_defaults_of_drawing_do_not_apply_and_its_penalty_does():
    numbers = SamplingParameters(temperature=0.7, top_k=40, top_p=0.9, min_p=0.1, repetition_penalty=1.5)
    defaults = ModelDefaults(numbers)
    sampling = resolve(make_options(sampling={"beam_search": {"beam_width": 2}}), defaults, ()).sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0, 0, 1, 0)
    assert (sampling.repetition_penalty, sampling.n, sampling.best_of) == (1.5, 1, 2)
    assert sampling.beam_search == BeamSearchParameters(
        beam_width=2, length_penalty=1.0, early_stopping=EARLY_STOPPING_FALSE
    )
    assert not resolve(make_options(), defaults, ()).sampling.HasField("beam_search")


@pytest.mark.parametrize(
    ("bad_sequences", "min_tokens", "is_refused"),
    [((), 0, False), (((3,), (4,)), 0, True), (((3,), (4, 4)), 0, False), (((3,),), 1, True), (((3,),), 0, False)],
)
def test_allowed_tokens_must_leave_a_choice(bad_sequences, min_tokens, is_refused):
    options = make_options(
        sampling={"allowed_token_ids": [3, 4]}, stopping={"stop_token_ids": [4], "min_tokens": min_tokens}
    )
    parameters = resolve(options, NO_DEFAULTS, eos_token_ids=())
    with pytest.raises(InvalidArgument) if is_refused else nullcontext():
        check_choice(parameters, bad_sequences)


def test_parameters_of_workers_have_no_text_and_nothing_that_the_scheduler_decides_on():
    options = make_options(
        sampling={"seed": 3, "n": 2, "best_of": 4, "temperature": 0.5, "bad_words": ["secret"], "logit_bias": {7: 1.5}},
        stopping={"stop_token_ids": [9, 9, 8], "min_tokens": 2},
    )
    parameters = resolve(options, NO_DEFAULTS, (1,), [(5, 6)])
    assert list(parameters.stopping.stop_token_ids) == [9, 8]
    row = RowSampling.FromString(parameters.row_sampling)
    assert not any(row.sampling.HasField(name) for name in ("seed", "n", "best_of", "beam_search"))
    assert (list(row.sampling.bad_words), [list(each.ids) for each in row.bad_token_sequences]) == ([], [[5, 6]])
    assert (row.sampling.temperature, row.sampling.top_p, dict(row.sampling.logit_bias)) == (0.5, 1, {7: 1.5})
    assert (row.stopping.min_tokens, sorted(row.stopping.stop_token_ids)) == (2, [1, 8, 9])
    assert b"secret" not in parameters.row_sampling


async def test_what_the_model_has_no_tokens_for_is_left_out():
    limit = max(ids_of(" cat"))
    assert await bad_token_sequences(wrapped(byte_level()), ["cat"], limit) == (ids_of("cat"),)
