"""Bodies to options, and the validator's field names back."""

from typing import Any

import pytest

from gateway.api.generation_fields import CompletionBody, completion_options, names_of
from gateway.api.openai.front import CompletionCall
from gateway.api.openai.schemas import ChatBody, chat_names, chat_options, completion_prompts
from quire.common.v1.common_pb2 import (
    EARLY_STOPPING_FALSE,
    EARLY_STOPPING_NEVER,
    EARLY_STOPPING_TRUE,
    BeamSearchParameters,
)
from quire.rpc.errors import InvalidArgument
from tests.support.openai_bodies import parse

# Calls of token ids need none.
NO_GENERATOR: Any = None


def completion(**fields) -> CompletionBody:
    return parse(CompletionBody, {"prompt": "hello"} | fields)


def chat(content: Any = "hello", **fields) -> ChatBody:
    return parse(ChatBody, {"messages": [{"role": "user", "content": content}]} | fields)


def options(**fields):
    body = completion(**fields)
    return completion_options(body, completion_prompts(body)[0], "id")


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"top_p": 1e-50}, "sampling.top_p"),
        ({"temperature": 1e300}, "sampling.temperature"),
        ({"max_tokens": -1}, "stopping.max_tokens"),
        ({"logprobs": 2**40}, "output.logprobs"),
        ({"allowed_token_ids": [1, -1]}, "sampling.allowed_token_ids"),
        ({"stop_token_ids": [2**32]}, "stopping.stop_token_ids"),
        ({"logit_bias": {"5": 1e300}}, "sampling.logit_bias"),
        ({"n": 2**32, "use_beam_search": True}, "sampling.beam_search.beam_width"),
    ],
)
def test_what_a_message_cannot_hold_is_kept_as_it_was_written_for_the_validator(fields, path):
    value = fields.get(path.rpartition(".")[2], fields.get("n"))
    assert options(**fields).asked(path) == ({5: 1e300} if path == "sampling.logit_bias" else value)


def test_a_top_k_of_minus_one_means_all_tokens_as_vllm_has_it():
    assert options(top_k=-1).sampling.top_k == 0
    assert options(top_k=0).sampling.top_k == 0
    assert options(top_k=-1).asked("sampling.top_k") == 0
    assert options().asked("sampling.top_k") is None
    assert options(top_k=-2).asked("sampling.top_k") == -2, "left for the validator to refuse"


def test_an_echo_with_log_probabilities_asks_for_those_of_the_prompt():
    assert options(echo=True, logprobs=2).output.prompt_logprobs == 2
    assert options(echo=True, logprobs=2, prompt_logprobs=1).output.prompt_logprobs == 2
    assert options(logprobs=2).asked("output.prompt_logprobs") is None
    assert options(echo=True).asked("output.prompt_logprobs") is None


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"n": 2}, (2, None, EARLY_STOPPING_FALSE)),
        ({"n": 2, "best_of": 4}, (4, None, EARLY_STOPPING_FALSE)),
        ({}, (1, None, EARLY_STOPPING_FALSE)),
        ({"n": 3, "length_penalty": 0.5, "early_stopping": True}, (3, 0.5, EARLY_STOPPING_TRUE)),
        ({"n": 3, "early_stopping": "never"}, (3, None, EARLY_STOPPING_NEVER)),
    ],
)
def test_beam_search(fields, expected):
    width, length_penalty, early_stopping = expected
    assert options(use_beam_search=True, **fields).sampling.beam_search == BeamSearchParameters(
        beam_width=width, length_penalty=length_penalty, early_stopping=early_stopping
    )
    if not {"length_penalty", "early_stopping"} & fields.keys():
        assert not options(**fields).sampling.HasField("beam_search")


def test_a_seed_of_minus_one_is_none_as_vllm_has_it():
    assert not options(seed=-1).sampling.HasField("seed")
    assert options(seed=0).sampling.HasField("seed")


@pytest.mark.parametrize(
    ("body", "field", "expected"),
    [
        (completion(), "sampling.temperature", "temperature"),
        (completion(), "sampling.logit_bias[5]", "logit_bias[5]"),
        (completion(), "stopping.stop[0]", "stop[0]"),
        (completion(), "stopping.include_stop_string", "include_stop_str_in_output"),
        (completion(), "text", "prompt"),
        (completion(), "token_ids.ids[3]", "prompt[3]"),
        (completion(), "output.logprobs", "logprobs"),
        (completion(echo=True, logprobs=50), "output.prompt_logprobs", "logprobs"),
        (completion(echo=True, logprobs=50, prompt_logprobs=5), "output.prompt_logprobs", "logprobs"),
        (completion(echo=True, logprobs=5, prompt_logprobs=50), "output.prompt_logprobs", "prompt_logprobs"),
        (completion(prompt_logprobs=50), "output.prompt_logprobs", "prompt_logprobs"),
        (completion(), "sampling.beam_search.beam_width", "n"),
        (completion(best_of=2), "sampling.beam_search.beam_width", "best_of"),
        (completion(), "sampling.beam_search.length_penalty", "length_penalty"),
        (chat(logprobs=True), "output.logprobs", "top_logprobs"),
        (chat(), "stopping.max_tokens", "max_tokens"),
        (chat(max_completion_tokens=1), "stopping.max_tokens", "max_completion_tokens"),
        (chat(), "messages[0].content", "messages[0].content"),
    ],
)
def test_errors_name_the_field_that_the_caller_knows(body, field, expected):
    names = chat_names(body) if isinstance(body, ChatBody) else names_of(body)
    assert names(field) == expected


def test_errors_name_the_prompt_among_several():
    call = CompletionCall(completion(prompt=[[1], [2, 9999]]), "m")
    assert call.names(1)("token_ids.ids[1]") == "prompt[1][1]"
    assert call.names(1)("sampling.top_p") == "top_p"
    assert (
        CompletionCall(completion(prompt=["a", "b"], prompt_logprobs=3), "m").names(0)("output.prompt_logprobs")
        == "prompt_logprobs"
    )


@pytest.mark.parametrize(("num_prompts", "limit"), [(2, 126), (10, 126), (11, 125)])
async def test_the_id_of_several_prompts_leaves_room_for_their_numbers(num_prompts, limit):
    def call(num_characters):
        return CompletionCall(completion(prompt=[[5]] * num_prompts, request_id="x" * num_characters), "m")

    requests = await call(limit).requests(NO_GENERATOR)
    assert max(len(request.request_id or "") for request in requests) == 128
    expected = f"request_id has {limit + 1} characters; with {num_prompts} prompts the max is {limit}, since -N is "
    with pytest.raises(InvalidArgument, match=f"^{expected}appended for each$"):
        await call(limit + 1).requests(NO_GENERATOR)


def test_either_name_of_the_length_works():
    assert chat_options(chat(max_tokens=5), "id").stopping.max_tokens == 5
    assert chat_options(chat(max_completion_tokens=5), "id").stopping.max_tokens == 5
    assert chat_options(chat(max_completion_tokens=5, max_tokens=7), "id").stopping.max_tokens == 5


def test_a_negative_seed_is_the_number_that_has_the_same_bits():
    asked = options(seed=-5)
    assert (asked.sampling.seed, asked.asked("sampling.seed")) == (2**64 - 5, -5)


def test_a_completion_without_a_prompt_is_refused():
    with pytest.raises(InvalidArgument, match=r"^prompt is missing$"):
        CompletionCall(completion(prompt=None), "m")
