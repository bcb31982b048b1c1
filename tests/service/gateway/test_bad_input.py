"""Every bad request gets a clear status, names what is wrong, reaches no scheduler and disturbs nobody."""

import asyncio
from typing import Any

import grpc
import pytest

from gateway.text.tokenizer import Tokenizer
from quire.arrays import decode_int32
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import (
    AlreadyExists,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    from_rpc_error,
)
from tests.support.gateway_process import collect, error_of, stream_request

NAN, INFINITY = float("nan"), float("inf")


def sampling(**fields) -> dict[str, Any]:
    return {"sampling": common_pb2.SamplingParameters(**fields)}


def beam_search(width, *, length_penalty=None, early_stopping=None, **fields):
    beam = common_pb2.BeamSearchParameters(
        beam_width=width, length_penalty=length_penalty, early_stopping=early_stopping
    )
    return sampling(beam_search=beam, **fields)


def stopping(**fields) -> dict[str, Any]:
    return {"stopping": common_pb2.StoppingParameters(**fields)}


def output(**fields):
    return {"output": common_pb2.OutputOptions(**fields)}


def token_ids(*ids) -> dict[str, Any]:
    return {"token_ids": common_pb2.TokenIds(ids=ids)}


# What is asked besides a good text prompt; the field at fault; what the message must say.
BAD_PARAMETERS = [
    (sampling(temperature=NAN), "sampling.temperature", "nan"),
    (sampling(temperature=INFINITY), "sampling.temperature", "[0, 100]"),
    (sampling(temperature=-0.5), "sampling.temperature", "-0.5"),
    (sampling(temperature=100.5), "sampling.temperature", "100.5"),
    (sampling(top_p=0), "sampling.top_p", "(0, 1]"),
    (sampling(top_p=1.5), "sampling.top_p", "1.5"),
    (sampling(top_p=NAN), "sampling.top_p", "nan"),
    (sampling(min_p=-1), "sampling.min_p", "[0, 1]"),
    (sampling(min_p=NAN), "sampling.min_p", "nan"),
    (sampling(n=0), "sampling.n", "is 0"),
    (sampling(n=1_000_000), "sampling.n", "1,000,000"),
    (sampling(n=4, best_of=2), "sampling.best_of", "[4, 128]"),
    (
        sampling(n=63, best_of=64) | output(logprobs=20) | stopping(max_tokens=200),
        "output.logprobs",
        "is 20; 63 chosen sequences of up to 200 tokens would have 264,600 log probabilities, which come at once, and "
        "at most 262,144 may",
    ),
    (beam_search(64, n=63) | output(logprobs=20) | stopping(max_tokens=200), "output.logprobs", "264,600"),
    (sampling(n=2, best_of=3) | stopping(stop=["x"]), "stopping.stop", "which is 3, is above n, which is 2"),
    (sampling(best_of=2) | stopping(stop=["x"]), "stopping.stop", "use stop_token_ids"),
    (beam_search(0), "sampling.beam_search.beam_width", "is 0"),
    (beam_search(129), "sampling.beam_search.beam_width", "[1, 128]"),
    (beam_search(2, length_penalty=NAN), "sampling.beam_search.length_penalty", "nan"),
    (beam_search(2, length_penalty=-10.5), "sampling.beam_search.length_penalty", "[-10, 10]"),
    (beam_search(2, early_stopping=9), "sampling.beam_search.early_stopping", "is 9"),
    (beam_search(2, n=3), "sampling.n", "[1, 2]"),
    (beam_search(2, n=0), "sampling.n", "is 0"),
    (beam_search(2, best_of=3), "sampling.best_of", "must be absent or beam_width, which is 2"),
    (beam_search(2, best_of=1), "sampling.best_of", "is 1"),
    (beam_search(2, temperature=0.5), "sampling.temperature", "absent or 0"),
    (beam_search(2, temperature=NAN), "sampling.temperature", "nan"),
    (beam_search(2, top_k=1), "sampling.top_k", "absent or 0"),
    (beam_search(2, top_p=0.5), "sampling.top_p", "absent or 1"),
    (beam_search(2, min_p=0.5), "sampling.min_p", "absent or 0"),
    (beam_search(2, repetition_penalty=0), "sampling.repetition_penalty", "[1e-30, 10]"),
    (beam_search(2) | stopping(stop=["x"]), "stopping.stop", "use stop_token_ids"),
    (sampling(presence_penalty=2.5), "sampling.presence_penalty", "[-2, 2]"),
    (sampling(frequency_penalty=NAN), "sampling.frequency_penalty", "nan"),
    (sampling(repetition_penalty=0), "sampling.repetition_penalty", "[1e-30, 10]"),
    (sampling(logit_bias={5: 101.0}), "sampling.logit_bias[5]", "[-100, 100]"),
    (sampling(logit_bias={5: NAN}), "sampling.logit_bias[5]", "nan"),
    (sampling(logit_bias={2080: 1.0}), "sampling.logit_bias[2080]", "2,080"),
    (sampling(logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias", "1,024"),
    (sampling(allowed_token_ids=[1, 2080]), "sampling.allowed_token_ids[1]", "2080"),
    (sampling(repetition_penalty=10.5), "sampling.repetition_penalty", "10.5"),
    (sampling(presence_penalty=NAN), "sampling.presence_penalty", "nan"),
    (sampling(allowed_token_ids=[1] * 2081), "sampling.allowed_token_ids", "2,080"),
    (sampling(bad_words=[""]), "sampling.bad_words[0]", "empty"),
    (sampling(bad_words=["ok", "x" * 129]), "sampling.bad_words[1]", "129 bytes; the max is 128"),
    (sampling(bad_words=["x"] * 129), "sampling.bad_words", "129 entries; the max is 128"),
    (
        sampling(allowed_token_ids=[3, 4]) | stopping(min_tokens=2, stop_token_ids=[3, 4]),
        "sampling.allowed_token_ids",
        "nothing to choose",
    ),
    (stopping(max_tokens=0), "stopping.max_tokens", "is 0"),
    (stopping(max_tokens=1024), "stopping.max_tokens", "1,024"),
    (stopping(max_tokens=5, min_tokens=6), "stopping.min_tokens", "[0, 5]"),
    (stopping(stop=["x"] * 17), "stopping.stop", "16"),
    (stopping(stop=["ok", ""]), "stopping.stop[1]", "empty"),
    (stopping(stop=["é" * 513]), "stopping.stop[0]", "1,026 bytes"),
    (stopping(stop_token_ids=[3, 2080]), "stopping.stop_token_ids[1]", "2080"),
    (stopping(stop_token_ids=range(129)), "stopping.stop_token_ids", "128"),
    (output(logprobs=21), "output.logprobs", "[0, 20]"),
    (output(prompt_logprobs=21), "output.prompt_logprobs", "[0, 20]"),
    ({"request_id": ""}, "request_id", "1 to 128"),
    ({"request_id": "a b"}, "request_id", '"a b"'),
    ({"request_id": "x" * 129}, "request_id", "1 to 128"),
    ({"priority": 101}, "priority", "[-100, 100]"),
]
BAD_PROMPTS = [
    ({}, "prompt", "missing"),
    (token_ids(), "token_ids.ids", "empty"),
    (token_ids(1, 2, 2080), "token_ids.ids[2]", "is 2080"),
    (token_ids(2**32 - 1), "token_ids.ids[0]", "4294967295"),
    (token_ids(*[5] * 1024), "token_ids.ids", "1,024 tokens; a prompt may have at most 1,023"),
    ({"text": "hello wo" * 500_000}, "text", "has at least 210,527 tokens; a prompt may have at most 1,023"),
    ({"text": "a " * 3000}, "text", "a prompt may have at most 1,023"),
    (
        token_ids(*[5] * 1000) | stopping(max_tokens=25),
        "stopping.max_tokens",
        "1,025; a sequence can have at most 1,024 tokens here",
    ),
]


@pytest.fixture
async def neighbour(gateway, scheduler):
    """A stream that is running while the test does its worst, and that must not notice."""
    scheduler.step_delay_s = 0.005
    reading = asyncio.create_task(
        collect(gateway.generation.GenerateStream(stream_request("neighbour", max_tokens=40)))
    )
    await scheduler.until(lambda: scheduler.live)
    yield
    stream = await reading
    assert len(stream.token_ids) == 40
    assert len(scheduler.submits) == 1


async def assert_all_refused(gateway, cases, kind):
    for fields, field, says in cases:
        error = await error_of(gateway.generation.GenerateStream(generation_pb2.GenerateStreamRequest(**fields)))
        assert isinstance(error, kind), (fields, error)
        assert [violation.field for violation in error.violations] == [field]
        assert field in error.message
        assert says in error.message
        assert says in error.violations[0].description


@pytest.mark.usefixtures("neighbour")
async def test_bad_parameters_are_named_with_value_and_limit(gateway):
    cases = [({"text": "hello"} | fields, field, says) for fields, field, says in BAD_PARAMETERS]
    await assert_all_refused(gateway, cases, InvalidArgument)


@pytest.mark.usefixtures("neighbour")
async def test_bad_prompts_are_named_with_value_and_limit(gateway):
    await assert_all_refused(gateway, BAD_PROMPTS, InvalidArgument)


async def test_values_that_change_nothing_are_fine(gateway):
    request = stream_request(
        **sampling(
            n=1, best_of=1, presence_penalty=0, frequency_penalty=0, repetition_penalty=1, top_k=2**32 - 1, seed=0
        )
    )
    request.stopping.min_tokens = 0
    assert len((await collect(gateway.generation.GenerateStream(request))).token_ids) == 8


async def test_all_violations_are_reported_at_once(gateway):
    request = generation_pb2.GenerateRequest(token_ids=common_pb2.TokenIds(), **sampling(temperature=-1, top_p=2))
    error = await error_of(gateway.generation.Generate(request))
    assert [violation.field for violation in error.violations] == [
        "token_ids.ids",
        "sampling.temperature",
        "sampling.top_p",
    ]


async def test_unknown_model_is_refused_and_the_served_one_named(gateway):
    error = await error_of(gateway.generation.GenerateStream(stream_request(model="gpt-5")))
    assert isinstance(error, InvalidArgument)
    assert (error.reason, [violation.field for violation in error.violations]) == ("MODEL_NOT_FOUND", ["model"])
    assert '"gpt-5"' in error.message
    assert '"quire-tiny"' in error.message


async def test_named_model_that_is_served_is_fine(gateway):
    await collect(gateway.generation.GenerateStream(stream_request(model="quire-tiny")))


@pytest.mark.parametrize(
    ("messages", "field"),
    [
        ([], "messages"),
        ([{"role": "", "content": "hi"}], "messages[0].role"),
        ([{"role": "user", "content": "hi"}] * 1025, "messages"),
    ],
)
async def test_bad_conversations(gateway, messages, field):
    request = generation_pb2.ChatRequest(messages=[generation_pb2.ChatMessage(**message) for message in messages])
    error = await error_of(gateway.generation.Chat(request))
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == [field]


async def test_too_many_messages_are_refused_before_they_are_converted(gateway, monkeypatch):
    monkeypatch.setattr("gateway.api.grpc.gateway_messages.ChatMessage", None)
    messages = [generation_pb2.ChatMessage()] * 65_536
    chat = generation_pb2.ChatMessages(messages=messages)
    for call, field in [
        (gateway.generation.Chat(generation_pb2.ChatRequest(messages=messages)), "messages"),
        (gateway.generation.Tokenize(generation_pb2.TokenizeRequest(chat=chat)), "chat.messages"),
    ]:
        error = await error_of(call)
        assert isinstance(error, InvalidArgument)
        assert [violation.field for violation in error.violations] == [field]
        assert "more than 1,024 entries" in error.message


async def test_texts_that_cannot_fit_are_refused_before_they_are_tokenized(gateway, monkeypatch):
    async def encode(*args, **kwargs):
        raise AssertionError("the tokenizer was asked")

    monkeypatch.setattr(Tokenizer, "encode", encode)
    text = "hello wo" * 500_000
    messages = [generation_pb2.ChatMessage(role="user", content=text[:2_000_000])] * 2
    generation = gateway.generation
    for call, field, says in [
        (generation.Generate(generation_pb2.GenerateRequest(text=text)), "text", "at least 210,527 tokens"),
        (generation.Chat(generation_pb2.ChatRequest(messages=messages)), "messages", "at least 210,527 tokens"),
        (generation.Tokenize(generation_pb2.TokenizeRequest(text=text)), "text", "the max is 262,144"),
        (
            generation.Tokenize(generation_pb2.TokenizeRequest(chat=generation_pb2.ChatMessages(messages=messages))),
            "chat.messages",
            "the max is 262,144",
        ),
    ]:
        error = await error_of(call)
        assert isinstance(error, InvalidArgument)
        assert [violation.field for violation in error.violations] == [field]
        assert says in error.violations[0].description


@pytest.mark.usefixtures("neighbour")
async def test_invalid_utf8_is_invalid_argument(gateway):
    for method in ("Generate", "Tokenize"):
        tag = {"Generate": b"\x0a", "Tokenize": b"\x12"}[method]
        error = await error_of(gateway.raw_unary(method, tag + b"\x03a\xff\xfe"))
        assert isinstance(error, InvalidArgument), error
        assert error.reason == "MALFORMED_MESSAGE"
        assert "UTF-8" in error.message
        assert [violation.field for violation in error.violations] == [f"quire.gateway.v1.{method}Request"]


@pytest.mark.usefixtures("neighbour")
@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x7fshort", b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x0b"])
async def test_garbage_is_invalid_argument(gateway, data):
    error = await error_of(gateway.raw_unary("Generate", data))
    assert isinstance(error, InvalidArgument)
    assert [violation.field for violation in error.violations] == ["quire.gateway.v1.GenerateRequest"]


async def test_the_last_of_text_and_token_ids_counts(gateway, scheduler):
    """As protobuf defines it for fields that exclude each other."""
    text = generation_pb2.GenerateRequest(text="hello").SerializeToString()
    ids = generation_pb2.GenerateRequest(**token_ids(5, 6), **stopping(max_tokens=2)).SerializeToString()
    await gateway.raw_unary("Generate", text + ids)
    assert decode_int32(scheduler.submits[-1].prompt_token_ids, "prompt").tolist() == [5, 6]


async def test_raw_bytes_of_a_good_request_are_answered(gateway):
    request = generation_pb2.GenerateRequest(text="hello", **stopping(max_tokens=3))
    answer = await gateway.raw_unary("Generate", request.SerializeToString())
    assert len(generation_pb2.GenerateResponse.FromString(answer).sequences[0].token_ids) == 3


@pytest.mark.usefixtures("neighbour")
async def test_oversized_message_is_resource_exhausted(gateway):
    error = await error_of(gateway.generation.GenerateStream(stream_request("x" * (4 * 1024 * 1024 + 1))))
    assert isinstance(error, ResourceExhausted)


async def test_request_id_in_use_already_exists(gateway, scheduler):
    scheduler.emits.clear()
    first = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request(request_id="twin"))))
    await scheduler.until(lambda: scheduler.live)
    error = await error_of(gateway.generation.GenerateStream(stream_request(request_id="twin")))
    assert isinstance(error, AlreadyExists)
    assert "twin" in error.message
    scheduler.emits.set()
    await first
    await collect(gateway.generation.GenerateStream(stream_request(request_id="twin")))


async def test_every_error_carries_the_domain(gateway):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.generation.Cancel(generation_pb2.CancelRequest(request_id="nobody"))
    details: Any = dict(caught.value.trailing_metadata())["grpc-status-details-bin"]
    assert b"google.rpc.ErrorInfo" in details
    assert b"quire" in details
    assert isinstance(from_rpc_error(caught.value), NotFound)
