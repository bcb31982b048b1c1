"""Every bad request gets a clear status, names what is wrong, reaches no scheduler and disturbs no other request."""

import asyncio
from typing import Any

import pytest

from gateway.text.tokenizer import Tokenizer
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from tests.support.gateway_process import collect, error_of, refusal_of, stream_request

MANY = common_pb2.OutputOptions(logprobs=20), common_pb2.StoppingParameters(max_tokens=200)
# Fields in addition to a good text prompt; the field at fault; text that the message must have. Unit tests of the
# validator have every rule of parameters.
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"sampling": {"allowed_token_ids": [3, 4]}, "stopping": {"min_tokens": 2, "stop_token_ids": [3, 4]}},
     "sampling.allowed_token_ids", "nothing to choose"),
    ({"sampling": {"n": 63, "best_of": 64}, "output": MANY[0], "stopping": MANY[1]}, "output.logprobs",
     "is 20; 63 chosen sequences of up to 200 tokens would have 264,600 log probabilities, which come at once, and at "
     "most 262,144 may"),
    ({"sampling": {"n": 63, "beam_search": {"beam_width": 64}}, "output": MANY[0], "stopping": MANY[1]},
     "output.logprobs", "264,600"),
    ({"sampling": {"n": 2, "best_of": 3}, "stopping": {"stop": ["x"]}}, "stopping.stop",
     "which is 3, is above n, which is 2"),
    ({"sampling": {"beam_search": {"beam_width": 2}}, "stopping": {"stop": ["x"]}}, "stopping.stop",
     "use stop_token_ids"),
    ({"text": None}, "prompt", "missing"),
    ({"text": None, "token_ids": {"ids": [2**32 - 1]}}, "token_ids.ids[0]", "4294967295"),
    ({"text": None, "token_ids": {"ids": [5] * 1000}, "stopping": {"max_tokens": 25}}, "stopping.max_tokens",
     "1,025; a sequence can have at most 1,024 tokens here"),
    ({"sampling": {"constraint": {"regex": "a"}}, "stopping": {"ignore_eos": True}}, "stopping.ignore_eos",
     "leave it out, or set stop_token_ids"),
    ({"sampling": {"constraint": {"regex": "a"}}, "stopping": {"min_tokens": 2, "stop": ["b"]}},
     "stopping.min_tokens", "stop strings"),
    ({"output": {"prompt_logprobs": 0, "prompt_logprobs_start": 0}}, "output.prompt_logprobs_start", "is 0"),
    ({"output": {"prompt_logprobs": 0, "prompt_logprobs_start": 400}}, "output.prompt_logprobs_start",
     "is 400; it must be the position of a prompt token"),
    ({"output": {"prompt_logprobs_start": 2}}, "output.prompt_logprobs_start", "is set without output.prompt_logprobs"),
]  # fmt: skip


@pytest.fixture
async def neighbour(gateway, scheduler):
    """A stream that runs during the test and must not be disturbed."""
    scheduler.step_delay_s = 0.005
    reading = asyncio.create_task(
        collect(gateway.generation.GenerateStream(stream_request("neighbour", max_tokens=40)))
    )
    await scheduler.until(lambda: scheduler.live)
    yield
    stream = await reading
    assert len(stream.token_ids) == 40
    assert len(scheduler.submits) == 1


@pytest.mark.usefixtures("neighbour")
async def test_what_is_wrong_is_named_with_value_and_limit_and_disturbs_nobody(gateway):
    for fields, field, says in BAD:
        asked: Any = {"text": "hello"} | fields
        request = generation_pb2.GenerateStreamRequest(**asked)
        error = await refusal_of(gateway.generation.GenerateStream(request), field, says)
        assert field in error.message
        assert says in error.message


async def test_all_violations_are_reported_at_once(gateway):
    """The reason of a prompt that is too long is reported together with all other violations."""
    wrong: Any = {"temperature": -1, "top_p": 2}
    cases: list[tuple[dict[str, Any], str, str]] = [
        ({"token_ids": {}}, "token_ids.ids", "INVALID_ARGUMENT"),
        ({"text": "hello wo" * 400_000}, "text", "CONTEXT_LENGTH_EXCEEDED"),
    ]
    for prompt, field, reason in cases:
        error = await error_of(gateway.generation.Generate(generation_pb2.GenerateRequest(**prompt, sampling=wrong)))
        fields = [field, "sampling.temperature", "sampling.top_p"]
        assert (error.reason, [violation.field for violation in error.violations]) == (reason, fields)


async def test_texts_that_are_too_long_to_tokenize_are_refused_before(gateway, monkeypatch):
    """test_fronts.py tests prompts that cannot fit."""

    async def encode(*args, **kwargs):
        raise AssertionError("the tokenizer was asked")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    text = "hello wo" * 500_000
    messages = [generation_pb2.ChatMessage(role="user", content=text[:2_000_000])] * 2
    chat = generation_pb2.ChatMessages(messages=messages)
    asked = generation_pb2.TokenizeRequest
    for request, field in ((asked(text=text), "text"), (asked(chat=chat), "chat.messages")):
        await refusal_of(gateway.generation.Tokenize(request), field, "the max is 262,144")


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"\xff", ""),
        (b"\x0a\x7fshort", ""),
        (b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", ""),
        (b"\x0b", ""),
        (b"\x0a\x03a\xff\xfe", "UTF-8"),
    ],
)
async def test_garbage_is_invalid_argument(gateway, data, says):
    error = await refusal_of(gateway.raw_unary("Generate", data), "quire.gateway.v1.GenerateRequest")
    assert error.reason == "MALFORMED_MESSAGE"
    assert says in error.message
