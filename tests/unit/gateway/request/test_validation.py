"""The validator itself; tests/service/gateway/test_bad_input.py goes through every rule by gRPC."""

import dataclasses
from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.request.limits import MAX_CALL_PARAMETER_ENTRIES, MAX_CALL_STOP_BYTES, Limits, Pool
from gateway.request.validation import check_call, check_request, resolve_max_tokens
from gateway.types import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from quire.common.v1.common_pb2 import EARLY_STOPPING_NEVER
from quire.rpc.errors import InvalidArgument
from tests.support.parameters import make_options

LIMITS = Limits(
    pools=(Pool(num_blocks=16, block_size=4),),
    vocab_size=100,
    max_model_len=50,
    max_prompt_tokens=49,
    longest_token_bytes=10,
    max_message_bytes=1000,
    max_logprobs=5,
    max_stop_strings=2,
    max_stop_string_bytes=10,
    max_stop_token_ids=3,
    max_chat_messages=2,
    max_n=128,
    max_call_sequences=256,
)


PLAIN_PROMPT = TextPrompt("hello")


def check(prompt: Prompt = PLAIN_PROMPT, **fields):
    check_request(make_options(prompt, **fields), LIMITS, "served")


def fields_refused(*args, **fields):
    with pytest.raises(InvalidArgument) as caught:
        check(*args, **fields)
    return [violation.field for violation in caught.value.violations]


def test_a_plain_request_passes():
    check()
    check(TokenPrompt([0, 99]), model="served", request_id="a.b:c-d_1", priority=-100)
    check(ChatPrompt([ChatMessage("user", "")]))


def test_values_at_the_limits_pass():
    check(
        sampling={
            "temperature": 0,
            "top_p": 1,
            "min_p": 1,
            "top_k": 0,
            "seed": 2**64 - 1,
            "n": 1,
            "repetition_penalty": 1,
        },
        stopping={"max_tokens": 49, "stop": ["0123456789", "x"], "stop_token_ids": [0, 1, 99]},
        output={"logprobs": 5},
    )


def test_stop_strings_are_refused_where_the_best_are_chosen_before_their_text_is_known():
    stopping = {"stop": ["x"]}
    for sampling in ({"best_of": 2}, {"n": 2, "best_of": 3}):
        assert fields_refused(sampling=sampling, stopping=stopping) == ["stopping.stop"]
    for sampling in ({"n": 3}, {"best_of": 1}, {"n": 2, "best_of": 2}):
        check(sampling=sampling, stopping=stopping)
    check(sampling={"best_of": 2}, stopping={"stop_token_ids": [1]})


def test_lone_surrogates_are_refused_wherever_text_is():
    assert fields_refused(TextPrompt("a\ud800")) == ["text"]
    assert fields_refused(ChatPrompt([ChatMessage("user", "\udfff")])) == ["messages[0].content"]
    assert fields_refused(stopping={"stop": ["\ud800"]}) == ["stopping.stop[0]"]


def test_texts_of_too_many_bytes_are_refused_before_they_are_tokenized():
    check(TextPrompt("é" * 245))
    check(ChatPrompt([ChatMessage("user", "é" * 243)]))
    with pytest.raises(InvalidArgument, match="text has at least 50 tokens; a prompt may have at most 49"):
        check(TextPrompt("é" * 246))
    with pytest.raises(InvalidArgument, match="messages has at least 50 tokens; a prompt may have at most 49"):
        check(ChatPrompt([ChatMessage("user", "x" * 243), ChatMessage("user", "x" * 240)]))


def test_negative_numbers_that_only_json_can_bring_are_refused():
    sampling = {"top_k": -1, "n": -1}
    assert fields_refused(sampling=sampling) == ["sampling.top_k", "sampling.n"]
    assert fields_refused(TokenPrompt([1, -5])) == ["token_ids.ids[1]"]


def test_a_long_model_name_is_shortened():
    with pytest.raises(InvalidArgument) as caught:
        check(model="x" * 10_000)
    assert len(caught.value.message) < 300


@settings(deadline=None)
@given(
    temperature=st.none() | st.floats(),
    top_p=st.none() | st.floats(),
    min_p=st.none() | st.floats(),
    penalty=st.none() | st.floats(),
)
def test_exactly_what_is_in_range_passes(temperature, top_p, min_p, penalty):
    ranges = {
        "sampling.temperature": (temperature, lambda value: 0 <= value <= 100),
        "sampling.top_p": (top_p, lambda value: 0 < value <= 1 and np.float32(value) > 0),
        "sampling.min_p": (min_p, lambda value: 0 <= value <= 1),
        "sampling.presence_penalty": (penalty, lambda value: -2 <= value <= 2),
    }
    wrong = [field for field, (value, is_valid) in ranges.items() if value is not None and not is_valid(value)]
    sampling = {"temperature": temperature, "top_p": top_p, "min_p": min_p, "presence_penalty": penalty}
    if wrong:
        assert fields_refused(sampling=sampling) == wrong
    else:
        check(sampling=sampling)


@pytest.mark.parametrize(("value", "is_refused"), [(1e-300, True), (7e-46, True), (1e-45, False), (1e-30, False)])
def test_what_single_precision_rounds_to_zero_is_refused(value, is_refused):
    sampling = {"top_p": value}
    if is_refused:
        assert fields_refused(sampling=sampling) == ["sampling.top_p"]
    else:
        check(sampling=sampling)


@pytest.mark.parametrize("value", [0, -1, 1e-300, 1e-45, 9e-31, 10.1, float("nan")])
def test_a_repetition_penalty_that_logits_overflow_by_is_refused_with_its_range(value):
    with pytest.raises(InvalidArgument, match=r"sampling.repetition_penalty is .*; it must be in \[1e-30, 10\]"):
        check(sampling={"repetition_penalty": value})
    for allowed in (1e-30, float(np.float32(1e-30)), 10):
        check(sampling={"repetition_penalty": allowed})


@pytest.mark.parametrize(("seed", "is_refused"), [(-(2**63) - 1, True), (-(2**63), False), (-5, False), (2**64, True)])
def test_seeds_are_numbers_of_64_bits_with_or_without_a_sign(seed, is_refused):
    expected = pytest.raises(InvalidArgument, match=r"sampling.seed is .* in \[-9,223,372,036,854,775,808, 18,446,744")
    with expected if is_refused else nullcontext():
        check(sampling={"seed": seed})


def test_a_number_of_very_many_digits_is_shortened():
    with pytest.raises(InvalidArgument) as caught:
        check(sampling={"seed": 10**4000})
    assert len(caught.value.message) < 300


def test_names_of_speakers_have_a_length_and_are_text():
    check(ChatPrompt([ChatMessage("user", "hello", "x" * 64)]))
    with pytest.raises(InvalidArgument, match=r"messages\[0\].name has 65 characters; the max is 64"):
        check(ChatPrompt([ChatMessage("user", "hello", "x" * 65)]))
    assert fields_refused(ChatPrompt([ChatMessage("user", "hello", "\ud800")])) == ["messages[0].name"]


def test_logit_bias_of_a_negative_token_is_refused():
    assert fields_refused(sampling={"logit_bias": {-1: 1.0, 5: 1.0}}) == ["sampling.logit_bias[-1]"]


def test_max_tokens_is_what_the_context_has_left():
    assert resolve_max_tokens("text", [1] * 20, None, 1, LIMITS) == 30
    assert resolve_max_tokens("text", [1] * 20, 30, 1, LIMITS) == 30
    assert resolve_max_tokens("text", [1] * 49, None, 1, LIMITS) == 1


def test_max_tokens_is_what_the_pool_has_for_each_of_several_sequences():
    # 5 blocks are shared; of the other 11 each of 4 sequences can have 2, and a last token that needs no block.
    assert resolve_max_tokens("text", [1] * 20, None, 4, LIMITS) == 2 * 4 + 1
    assert resolve_max_tokens("text", [1] * 21, None, 4, LIMITS) == 2 * 4
    # Whoever asks for more is told by the scheduler what there is.
    assert resolve_max_tokens("text", [1] * 20, 30, 4, LIMITS) == 30
    assert resolve_max_tokens("text", [1] * 21, None, 100, LIMITS) == 1


@pytest.mark.parametrize(
    ("token_ids", "max_tokens", "field", "says"),
    [
        ([], None, "text", "no tokens"),
        ([1] * 50, None, "text", "50 tokens; a prompt may have at most 49"),
        (
            [1] * 20,
            31,
            "stopping.max_tokens",
            "31 after a prompt of 20 tokens, together 51; a sequence can have at most 50 tokens here",
        ),
        ([1, 100], None, "text", "has the token 100"),
    ],
)
def test_prompts_that_do_not_fit(token_ids, max_tokens, field, says):
    with pytest.raises(InvalidArgument, match=says) as caught:
        resolve_max_tokens("text", token_ids, max_tokens, 1, LIMITS)
    assert caught.value.violations[0].field == field


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


def check_beams(width=4, *, stopping=None, limits=LIMITS, beam=None, **sampling):
    sampling["beam_search"] = {"beam_width": width, **(beam or {})}
    check_request(make_options(sampling=sampling, stopping=stopping), limits, "served")


def beam_fields_refused(*args, **fields):
    with pytest.raises(InvalidArgument) as caught:
        check_beams(*args, **fields)
    return [violation.field for violation in caught.value.violations]


def test_beam_search_with_all_that_applies_to_it_passes():
    check_beams(n=4, best_of=4, beam={"length_penalty": -10.0, "early_stopping": EARLY_STOPPING_NEVER})
    sampling = {**EVERYTHING_ELSE, "beam_search": {"beam_width": 2}}
    stopping = {"max_tokens": 5, "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": True}
    check_request(make_options(sampling=sampling, stopping=stopping), LIMITS, "served")


def test_the_widest_beam_is_what_a_scheduler_runs_at_once():
    limits = dataclasses.replace(LIMITS, max_n=3)
    check_beams(3, limits=limits)
    assert beam_fields_refused(4, limits=limits) == ["sampling.beam_search.beam_width"]


def test_a_width_that_only_json_can_bring_is_refused():
    assert beam_fields_refused(-1) == ["sampling.beam_search.beam_width"]


def test_each_contradiction_is_named_once():
    found = beam_fields_refused(
        2, n=3, best_of=1, temperature=-1.0, top_k=5, top_p=0.0, min_p=2.0, stopping={"stop": ["x"]}
    )
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
        check_beams(stopping={"stop": ["x"]})


@settings(deadline=None)
@given(st.floats())
def test_length_penalty_is_finite_and_bounded(value):
    if -10 <= value <= 10:
        check_beams(beam={"length_penalty": value})
    else:
        assert beam_fields_refused(beam={"length_penalty": value}) == ["sampling.beam_search.length_penalty"]


def test_many_stop_tokens_in_a_wide_search_are_too_many_candidates():
    limits = dataclasses.replace(LIMITS, max_stop_token_ids=64)
    check_beams(16, stopping={"stop_token_ids": list(range(60))}, limits=limits)
    with pytest.raises(InvalidArgument, match=r"stop_token_ids has 60 entries.*64 beams.*3,904 candidates.*2,048"):
        check_beams(64, stopping={"stop_token_ids": list(range(60))}, limits=limits)


def call_options(sampling=None, stop=()):
    return make_options(sampling=sampling, stopping={"stop": list(stop)})


def call_refused(call, num_requests):
    with pytest.raises(InvalidArgument) as caught:
        check_call(call, num_requests, LIMITS)
    return caught.value.violations


@pytest.mark.parametrize(
    ("sampling", "num_prompts", "field"),
    [
        ({}, 257, "sampling.n"),
        ({"n": 2}, 129, "sampling.n"),
        ({"n": 1, "best_of": 128}, 3, "sampling.best_of"),
        ({"beam_search": {"beam_width": 8}}, 33, "sampling.beam_search.beam_width"),
    ],
)
def test_sequences_of_all_prompts_are_bounded_together(sampling, num_prompts, field):
    (violation,) = call_refused(call_options(sampling), num_prompts)
    assert violation.field == field
    for part in (f"{num_prompts} prompts", "sequences together", "at most 256", "send fewer prompts"):
        assert part in violation.description
    check_call(call_options(sampling), num_prompts - 1, LIMITS)


def test_what_one_request_may_not_have_is_left_to_its_own_check():
    check_call(call_options({"n": 10**9}), 1, LIMITS)
    check_call(call_options(stop=["x" * 10**6] * 100), 1, LIMITS)


def test_stop_strings_of_all_sequences_are_bounded_together():
    stop = ["x" * (MAX_CALL_STOP_BYTES // 256)]
    check_call(call_options({"n": 4}, stop), 64, LIMITS)
    (violation,) = call_refused(call_options({"n": 4}, [stop[0] + "x"]), 64)
    assert violation.field == "stopping.stop"
    assert "256 sequences" in violation.description


def test_parameters_of_all_prompts_are_bounded_together():
    limits_of_one = LIMITS.vocab_size
    num_prompts = MAX_CALL_PARAMETER_ENTRIES // limits_of_one + 1
    allowed = call_options({"allowed_token_ids": list(range(limits_of_one))})
    violations = call_refused(allowed, num_prompts)
    assert "sampling.allowed_token_ids" in [violation.field for violation in violations]
