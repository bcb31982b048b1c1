"""Every rule of the validator, with the field, the value and the limit that it names."""

import dataclasses
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gateway.request.limits import MAX_CALL_PARAMETER_ENTRIES, MAX_CALL_STOP_BYTES, Limits, Pool
from gateway.request.validation import check_call, check_request, resolve_max_tokens
from gateway.request.violations import Violations
from gateway.types import ChatMessage, ChatPrompt, Prompt, TextPrompt, TokenPrompt
from quire.common.v1.common_pb2 import EARLY_STOPPING_NEVER, Constraint
from quire.gateway.v1.generation_pb2 import Tool, ToolChoice
from quire.rpc.errors import InvalidArgument
from scheduler_svc.core.request import max_blocks
from tests.support.core_driver import make_config, make_request
from tests.support.parameters import make_options

LIMITS = Limits(
    pools=(Pool(num_blocks=16, block_size=4),),
    vocab_size=100,
    max_model_len=50,
    shown_model_len=50,
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


def refused(call, *args, **fields):
    """The violations. The message has each of them word for word."""
    with pytest.raises(InvalidArgument) as caught:
        call(*args, **fields)
    assert all(f"{each.field} {each.description}" in caught.value.message for each in caught.value.violations)
    return caught.value.violations


def fields_refused(*args, **fields):
    return [violation.field for violation in refused(*args, **fields)]


def test_a_plain_request_passes():
    check()
    check(TokenPrompt([0, 99]), model="served", request_id="a.b:c-d_1", priority=-100)
    check(ChatPrompt([ChatMessage("user", "")]))
    # At the limits; the other numbers are drawn below.
    stopping = {"max_tokens": 49, "stop": ["0123456789", "x"], "stop_token_ids": [0, 1, 99]}
    sampling = {"top_k": 0, "n": 1, "repetition_penalty": 1e-30}
    check(sampling=sampling, stopping=stopping, output={"logprobs": 5})


NAN, INFINITY = float("nan"), float("inf")
SURROGATE = "\ud800"


def beams(
    width: int, *, length_penalty: float | None = None, early_stopping: int | None = None, **sampling: Any
) -> Any:
    beam = {"beam_width": width, "length_penalty": length_penalty, "early_stopping": early_stopping}
    return sampling | {"beam_search": {name: value for name, value in beam.items() if value is not None}}


# The group of parameters, its values, the faulty parameter, and a text of the message.
BAD_PARAMETERS = [
    ("sampling", beams(2, early_stopping=9), "beam_search.early_stopping", "is 9"),
    ("sampling", {"temperature": 100.5}, "temperature", "100.5"),
    ("sampling", {"min_p": -1}, "min_p", "[0, 1]"),
    ("sampling", {"top_k": -1}, "top_k", "-1"),
    ("sampling", {"n": 0}, "n", "is 0"),
    ("sampling", {"n": -1}, "n", "-1"),
    ("sampling", {"presence_penalty": 2.5}, "presence_penalty", "[-2, 2]"),
    ("sampling", {"presence_penalty": NAN}, "presence_penalty", "nan"),
    ("sampling", {"frequency_penalty": NAN}, "frequency_penalty", "nan"),
    ("sampling", {"n": 4, "best_of": 2}, "best_of", "[4, 128]"),
    ("sampling", {"repetition_penalty": 9e-31}, "repetition_penalty", "[1e-30, 10]"),
    ("sampling", {"repetition_penalty": 10.5}, "repetition_penalty", "10.5"),
    ("sampling", {"logit_bias": {100: 1.0}}, "logit_bias[100]", "100"),
    ("sampling", {"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias", "1,024"),
    ("sampling", {"allowed_token_ids": [1, 100]}, "allowed_token_ids[1]", "is 100"),
    ("sampling", {"allowed_token_ids": [1] * 101}, "allowed_token_ids", "the max is 100"),
    ("sampling", {"bad_words": ["ok", "x" * 129]}, "bad_words[1]", "129 bytes; the max is 128"),
    ("sampling", {"bad_words": ["x"] * 129}, "bad_words", "129 entries; the max is 128"),
    ("sampling", beams(0), "beam_search.beam_width", "is 0"),
    ("sampling", beams(-1), "beam_search.beam_width", "-1"),
    ("sampling", beams(2, length_penalty=NAN), "beam_search.length_penalty", "nan"),
    ("sampling", beams(2, length_penalty=-10.5), "beam_search.length_penalty", "[-10, 10]"),
    ("sampling", beams(2, n=0), "n", "is 0"),
    ("sampling", beams(2, n=3), "n", "[1, 2]"),
    ("sampling", beams(2, best_of=3), "best_of", "must be absent or beam_width, which is 2"),
    ("sampling", beams(2, temperature=NAN), "temperature", "nan"),
    ("sampling", beams(2, min_p=0.5), "min_p", "absent or 0"),
    ("sampling", beams(2, repetition_penalty=0), "repetition_penalty", "[1e-30, 10]"),
    ("stopping", {"max_tokens": 50}, "max_tokens", "is 50"),
    ("stopping", {"max_tokens": 5, "min_tokens": 6}, "min_tokens", "[0, 5]"),
    ("stopping", {"stop": ["x"] * 3}, "stop", "the max is 2"),
    ("stopping", {"stop": ["é" * 6]}, "stop[0]", "12 bytes"),
    ("stopping", {"stop": [SURROGATE]}, "stop[0]", "surrogate"),
    ("stopping", {"stop_token_ids": [0] * 4}, "stop_token_ids", "the max is 3"),
    ("output", {"prompt_logprobs": 6}, "prompt_logprobs", "[0, 5]"),
]


@pytest.mark.parametrize(("group", "asked", "parameter", "says"), BAD_PARAMETERS)
def test_a_bad_parameter_is_named_with_its_value_and_its_limit(group, asked, parameter, says):
    (violation,) = refused(check, **{group: asked})
    assert violation.field == f"{group}.{parameter}"
    assert says in violation.description


HELLO = ChatMessage("user", "hello")


@pytest.mark.parametrize(
    ("prompt", "fields", "field", "says"),
    [
        (TokenPrompt([]), {}, "token_ids.ids", "empty"),
        (TokenPrompt([1, 2, 100]), {}, "token_ids.ids[2]", "is 100"),
        (TokenPrompt([1, -5]), {}, "token_ids.ids[1]", "is -5"),
        (TokenPrompt([5] * 50), {}, "token_ids.ids", "50 tokens; a prompt may have at most 49"),
        (TextPrompt("é" * 246), {}, "text", "has at least 50 tokens; a prompt may have at most 49"),
        (TextPrompt("a" + SURROGATE), {}, "text", "surrogate"),
        (ChatPrompt([]), {}, "messages", "empty"),
        (ChatPrompt([HELLO] * 3), {}, "messages", "the max is 2"),
        (ChatPrompt([ChatMessage("", "hi")]), {}, "messages[0].role", "empty"),
        (ChatPrompt([ChatMessage("user", SURROGATE)]), {}, "messages[0].content", "surrogate"),
        (ChatPrompt([ChatMessage("user", "hi", "x" * 65)]), {}, "messages[0].name", "65 characters; the max is 64"),
        (ChatPrompt([ChatMessage("user", "hi", SURROGATE)]), {}, "messages[0].name", "surrogate"),
        (ChatPrompt([ChatMessage("user", "x" * 243)] * 2), {}, "messages", "has at least 50 tokens"),
        (PLAIN_PROMPT, {"request_id": ""}, "request_id", "1 to 128"),
        (PLAIN_PROMPT, {"request_id": "x" * 129}, "request_id", "1 to 128"),
    ],
)
def test_a_bad_prompt_or_name_is_named_with_its_value_and_its_limit(prompt, fields, field, says):
    with pytest.raises(InvalidArgument) as caught:
        check(prompt, **fields)
    assert [violation.field for violation in caught.value.violations] == [field]
    assert says in caught.value.violations[0].description
    assert len(caught.value.message) < 300


def test_a_large_constraint_is_refused_before_it_is_copied():
    large = Constraint(lark="x" * (1 << 20))
    assert fields_refused(check, ChatPrompt([ChatMessage("user", "")], response_format=large)) == ["response_format"]
    options = make_options(PLAIN_PROMPT)
    options.sampling.constraint.CopyFrom(large)
    with pytest.raises(InvalidArgument, match=r"sampling.constraint has 1,048,580 bytes; the max is 1,048,576"):
        check_request(options, LIMITS, "served")


@settings(deadline=None)
@example(0.0, 1.0, 1.0, 2.0)
@example(100.0, 1e-300, 0.0, -2.0)
@example(None, 7e-46, None, None)
@example(None, 1e-45, None, None)
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
        assert fields_refused(check, sampling=sampling) == wrong
    else:
        check(sampling=sampling)


@pytest.mark.parametrize(
    ("seed", "is_refused"), [(-(2**63) - 1, True), (-(2**63), False), (2**64 - 1, False), (2**64, True)]
)
def test_seeds_are_numbers_of_64_bits_with_or_without_a_sign(seed, is_refused):
    expected = pytest.raises(InvalidArgument, match=r"sampling.seed is .* in \[-9,223,372,036,854,775,808, 18,446,744")
    with expected if is_refused else nullcontext():
        check(sampling={"seed": seed})


def test_max_tokens_is_what_the_context_has_left():
    assert resolve_max_tokens("text", [1] * 20, None, 1, LIMITS) == 30
    assert resolve_max_tokens("text", [1] * 20, 30, 1, LIMITS) == 30
    assert resolve_max_tokens("text", [1] * 49, None, 1, LIMITS) == 1


def test_max_tokens_is_what_the_pool_has_for_each_of_several_sequences():
    # 5 blocks are shared; of the other 11 each of 4 sequences can have 2, and a last token that needs no block.
    assert resolve_max_tokens("text", [1] * 20, None, 4, LIMITS) == 2 * 4 + 1
    assert resolve_max_tokens("text", [1] * 21, None, 4, LIMITS) == 2 * 4
    # The scheduler refuses larger values and names the maximum.
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


def test_beam_search_with_all_that_applies_to_it_passes():
    check_beams(n=4, best_of=4, beam={"length_penalty": -10.0, "early_stopping": EARLY_STOPPING_NEVER})
    sampling = {**EVERYTHING_ELSE, "beam_search": {"beam_width": 2}}
    stopping = {"max_tokens": 5, "min_tokens": 2, "stop_token_ids": [3], "ignore_eos": True}
    check_request(make_options(sampling=sampling, stopping=stopping), LIMITS, "served")


def test_the_widest_beam_is_what_a_scheduler_runs_at_once():
    limits = dataclasses.replace(LIMITS, max_n=3)
    check_beams(3, limits=limits)
    assert fields_refused(check_beams, 4, limits=limits) == ["sampling.beam_search.beam_width"]


def test_each_contradiction_is_named_once():
    found = fields_refused(
        check_beams, 2, n=3, best_of=1, temperature=-1.0, top_k=5, top_p=0.0, min_p=2.0, stopping={"stop": ["x"]}
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


def test_many_stop_tokens_in_a_wide_search_are_too_many_candidates():
    limits = dataclasses.replace(LIMITS, max_stop_token_ids=64)
    check_beams(16, stopping={"stop_token_ids": list(range(60))}, limits=limits)
    with pytest.raises(InvalidArgument, match=r"stop_token_ids has 60 entries.*64 beams.*3,904 candidates.*2,048"):
        check_beams(64, stopping={"stop_token_ids": list(range(60))}, limits=limits)


def call_options(sampling=None, stop=()):
    return make_options(sampling=sampling, stopping={"stop": list(stop)})


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
    (violation,) = refused(check_call, call_options(sampling), num_prompts, LIMITS)
    assert violation.field == field
    for part in (f"{num_prompts} prompts", "sequences together", "at most 256", "send fewer prompts"):
        assert part in violation.description
    check_call(call_options(sampling), num_prompts - 1, LIMITS)


def test_groups_of_layers_share_the_pool():
    welcome: Any = SimpleNamespace(num_gpu_blocks=49, block_size=4, full_groups=1, windowed_groups=2, state_blocks=0)
    pool = Pool.of(welcome)
    assert pool == Pool(16, 4, has_windows=True)
    # Sequences of one request hold all blocks of windows; the scheduler bounds one that is by itself.
    assert pool.longest_sequence(8, 2) == Pool(16, 4).longest_sequence(8, 2)
    assert pool.longest_sequence(8, 1) > 10**6
    # A scheduler of an earlier release does not say.
    welcome.full_groups = welcome.windowed_groups = 0
    assert Pool.of(welcome) == Pool(49, 4)


def test_states_take_blocks_of_each_sequence_and_are_counted_as_by_the_scheduler():
    sizes = {"block_size": 4, "full_groups": 1, "windowed_groups": 0, "state_blocks": 3}
    pool = Pool.of(cast(Any, SimpleNamespace(num_gpu_blocks=50, **sizes)))
    config = make_config(num_blocks=50, state_blocks=3, max_model_len=1000)
    for count in (1, 2, 4, 9):
        longest = pool.longest_sequence(1, count)
        needed = [
            max_blocks(make_request(1, prompt=[1], max_tokens=length - 1, num_sequences=count), config)
            for length in (longest, longest + 1)
            if length > 1
        ]
        assert needed[-1] > 50
        assert all(each <= 50 for each in needed[:-1])
    assert config.max_len + 1 == pool.longest_sequence(1, 1)


def test_errors_show_no_long_texts_of_the_caller():
    long = "x" * 100_000
    limits = dataclasses.replace(LIMITS, max_model_len=10**6, max_prompt_tokens=10**6, pools=(Pool(10**6, 4),))
    for choice in [ToolChoice(name=long), ToolChoice(allowed=[long] * 9), ToolChoice(name="f")]:
        prompt = ChatPrompt([ChatMessage("user", "hi")], tools=[Tool(name=f"?{long}")], tool_choice=choice)
        violations = refused(check_request, make_options(prompt), limits, "served")
        assert {each.field.partition(".")[0] for each in violations} == {"tools[0]", "tool_choice"}
        assert max(len(each.description) for each in violations) < 1000
    violations = Violations()
    violations.add(f"a.{long}", long)
    assert len(violations.found[0].field) == 256
    assert len(violations.found[0].description) == 2048


def test_stop_strings_of_all_sequences_are_bounded_together():
    stop = ["x" * (MAX_CALL_STOP_BYTES // 256)]
    check_call(call_options({"n": 4}, stop), 64, LIMITS)
    (violation,) = refused(check_call, call_options({"n": 4}, [stop[0] + "x"]), 64, LIMITS)
    assert violation.field == "stopping.stop"
    assert "256 sequences" in violation.description


def test_parameters_of_all_prompts_are_bounded_together():
    limits_of_one = LIMITS.vocab_size
    num_prompts = MAX_CALL_PARAMETER_ENTRIES // limits_of_one + 1
    allowed = call_options({"allowed_token_ids": list(range(limits_of_one))})
    assert "sampling.allowed_token_ids" in fields_refused(check_call, allowed, num_prompts, LIMITS)


def test_what_one_request_may_not_have_is_left_to_its_own_check():
    check_call(call_options({"n": 10**9}), 1, LIMITS)
    # The longest integer of a body; one digit more, and Python does not write it.
    longest = 10**4299
    check_call(call_options({"n": longest}, stop=["0123456789"]), 2, LIMITS)
    with pytest.raises(InvalidArgument, match="beam_width is 1,000,"):
        check_beams(longest, stopping={"stop_token_ids": list(range(9))})
    check_call(call_options(stop=["x" * 10**6] * 100), 1, LIMITS)
