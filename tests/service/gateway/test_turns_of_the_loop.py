"""Whatever one caller sends, the gateway's event loop is never kept for long: all others share it.

A turn shall take 20 ms at most. The tests allow more, since shared processors take longer for the same, and try again
where a turn was long: what a call costs shows in each try, and what else the machine does in some. Without what they
are about, each of these calls keeps the loop for a hundred milliseconds to minutes.
"""

import asyncio
import functools
import inspect
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.inference import open_inference_pb2 as pb
from quire.rpc.errors import InvalidArgument
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import error_of
from tests.support.measured_gateway import MeasuredGateway, measured_gateway
from tests.support.processes import until_true

LONGEST_TURN_MS = 150
NUM_TRIES = 5
PATIENCE_S = 60
MAX_MODEL_LEN = 60_000
NUM_PROMPTS = 1024
STOPS = [letter * 999 + "." for letter in "abcd"]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def measured() -> AsyncIterator[tuple[MeasuredGateway, FakeScheduler]]:
    scheduler = FakeScheduler(max_model_len=MAX_MODEL_LEN)
    await scheduler.start()
    async with measured_gateway(scheduler) as gateway:
        yield gateway, scheduler
    await scheduler.stop()


@pytest.fixture
def scheduler(measured) -> FakeScheduler:
    return measured[1]


@pytest_asyncio.fixture(loop_scope="session")
async def http(measured) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=measured[0].http_url, timeout=60) as client:
        yield client


@pytest_asyncio.fixture(loop_scope="session")
async def channel(measured) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(measured[0].grpc_address) as channel:
        yield channel


def short_turns(test: Callable[..., Awaitable[None]]) -> Callable[..., Awaitable[None]]:
    """The test passes in each try, and in one of them no turn of the gateway's loop takes long."""

    @functools.wraps(test)
    async def tried(measured: tuple[MeasuredGateway, FakeScheduler], **arguments: Any) -> None:
        turns = []
        for _ in range(NUM_TRIES):
            await measured[0].longest_turn_ms()
            await test(**arguments)
            turns.append(await measured[0].longest_turn_ms())
            if turns[-1][0] < LONGEST_TURN_MS:
                return
        raise AssertionError(f"the longest turns of {NUM_TRIES} tries took {turns}")

    # pytest reads the names of the fixtures here.
    signature = inspect.signature(test)
    added = inspect.Parameter("measured", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [added, *signature.parameters.values()]
    setattr(tried, "__signature__", signature.replace(parameters=names))  # noqa: B010 (its types do not know it)
    return tried


async def given_up(calling: asyncio.Task[httpx.Response]) -> None:
    """The client closes the connection."""
    calling.cancel()
    await asyncio.gather(calling, return_exceptions=True)


def infer(channel: grpc.aio.Channel, request: pb.ModelInferRequest):
    method = "/inference.GRPCInferenceService/ModelInfer"
    call = channel.unary_unary(method, pb.ModelInferRequest.SerializeToString, pb.ModelInferResponse.FromString)
    return call(request, timeout=60)


def inference(num_prompts: int, *, raw: bytes | None = None, **parameters: Any) -> pb.ModelInferRequest:
    request = pb.ModelInferRequest(model_name="quire-tiny")
    prompts = request.inputs.add(name="text_input", datatype="BYTES", shape=[num_prompts])
    if raw is None:
        prompts.contents.bytes_contents.extend([b"hello"] * num_prompts)
    else:
        request.raw_input_contents.append(raw)
    if parameters:
        tensor = request.inputs.add(name="sampling_parameters", datatype="BYTES", shape=[1])
        tensor.contents.bytes_contents.append(json.dumps(parameters).encode())
    return request


@short_turns
async def test_too_many_sequences_of_a_call_are_refused_over_http(http):
    response = await http.post("/v1/completions", json={"prompt": ["hello"] * NUM_PROMPTS, "n": 128, "stop": STOPS})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "n")
    for part in ("n is 128", "1,024 prompts", "131,072 sequences", "at most 1,024", "send fewer prompts"):
        assert part in error["message"]
    assert "stop has 4,000 bytes" in error["message"]


@short_turns
async def test_too_many_sequences_of_a_call_are_refused_over_kserve(channel):
    error = await error_of(infer(channel, inference(NUM_PROMPTS, n=128, stop=STOPS)))
    assert isinstance(error, InvalidArgument)
    assert error.violations[0].field == 'inputs[1].contents.bytes_contents[0]["n"]'
    assert "131,072 sequences" in error.message


@pytest.mark.parametrize("stream", [False, True])
@short_turns
async def test_a_thousand_prompts_with_long_stop_strings(http, scheduler, stream):
    body = {"prompt": ["hello"] * NUM_PROMPTS, "stop": STOPS, "max_tokens": 2, "stream": stream}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200
    assert response.text.count('"finish_reason":"length"') == NUM_PROMPTS
    assert len({submit.sampling.seed for submit in scheduler.submits[-NUM_PROMPTS:]}) == NUM_PROMPTS


@short_turns
async def test_a_thousand_prompts_with_many_parameters_are_given_up(http, scheduler):
    words = [f"word {number} and what follows it" for number in range(128)]
    body = {
        "prompt": ["hello there " * 100] * NUM_PROMPTS,
        "bad_words": words,
        "logit_bias": {str(token_id): 1 for token_id in range(1024)},
        "allowed_token_ids": list(range(2000)),
    }
    with scheduler.standing_still():
        before = len(scheduler.submits)
        calling = asyncio.create_task(http.post("/v1/completions", json=body))
        await until_true(lambda: len(scheduler.submits) - before >= 100, PATIENCE_S)
        await given_up(calling)
        await until_true(lambda: not scheduler.live, PATIENCE_S)


@short_turns
async def test_a_long_prompt_of_token_ids_is_echoed_by_many_sequences(http, scheduler):
    body = {"prompt": [[7] * 50_000], "n": 128, "echo": True}
    with scheduler.standing_still():
        before = len(scheduler.submits)
        calling = asyncio.create_task(http.post("/v1/completions", json=body))
        await until_true(lambda: len(scheduler.submits) > before, PATIENCE_S)
        # Behind it, so that what is made for the echo was made.
        assert (await http.get("/v1/models")).status_code == 200
        await given_up(calling)
        await until_true(lambda: not scheduler.live, PATIENCE_S)


@short_turns
async def test_many_sequences_with_long_stop_strings_over_grpc(channel, scheduler):
    request = generation_pb2.GenerateRequest(text="hello")
    request.sampling.n = 128
    request.stopping.stop.extend(letter * 1000 for letter in "abcdefghijklmnop")
    with scheduler.standing_still():
        before = len(scheduler.submits)
        call = generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60)
        waiting = asyncio.ensure_future(call)
        await until_true(lambda: len(scheduler.submits) > before, PATIENCE_S)
        waiting.cancel()
        await until_true(lambda: not scheduler.live, PATIENCE_S)


@pytest.mark.parametrize(
    ("field", "fill"),
    [
        ("token_ids.ids", lambda request: request.token_ids.ids.extend([1] * 3_000_000)),
        ("stopping.stop", lambda request: request.stopping.stop.extend(["a"] * 1_000_000)),
        ("sampling.allowed_token_ids", lambda request: request.sampling.allowed_token_ids.extend([1] * 3_000_000)),
    ],
)
@short_turns
async def test_lists_of_millions_are_refused_for_their_length(
    channel, field: str, fill: Callable[[generation_pb2.GenerateRequest], None]
):
    request = generation_pb2.GenerateRequest()
    fill(request)
    error = await error_of(generation_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=60))
    assert isinstance(error, InvalidArgument)
    assert field in [violation.field for violation in error.violations]


COMPLETIONS, CHAT, INFER = "/v1/completions", "/v1/chat/completions", "/v2/models/quire-tiny/infer"


def repeated(head: bytes, unit: bytes, tail: bytes, number: int | None = None) -> bytes:
    """`unit` that often between commas, by default as often as a body has room for it."""
    if number is None:
        number = (4 * 1024 * 1024 - len(head) - len(tail)) // (len(unit) + 1)
    return head + b",".join([unit] * number) + tail


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (
            CHAT,
            repeated(b'{"messages": [', b'{"role": "user", "content": ""}', b"]}", 25_000),
            "messages has 25,000 entries",
        ),
        (
            CHAT,
            repeated(b'{"messages": [{"role": "user", "content": [', b'{"type": "text", "text": ""}', b"]}]}", 25_000),
            "messages.content has 25,000 entries; the max is 8,192",
        ),
        (COMPLETIONS, repeated(b'{"prompt": [', b'"abcdefgh"', b"]}", 100_000), "prompt has 100,000 entries"),
        (
            COMPLETIONS,
            b'{"prompt": "a", ' + b", ".join(b'"f%d": null' % number for number in range(100_000)) + b"}",
            "100,001 fields",
        ),
        (
            INFER,
            repeated(
                b'{"inputs": [{"name": "a", "shape": [9], "datatype": "BYTES", "data": [', b'"a"', b"]}]}", 99_000
            ),
            "inputs.data has 99,000 entries; the max is 8,192",
        ),
        (
            INFER,
            b'{"inputs": [], "parameters": {' + b", ".join(b'"p%d": 1' % number for number in range(99_000)) + b"}}",
            "parameters has 99,000 entries; the max is 65,536",
        ),
        (COMPLETIONS, repeated(b'{"prompt": [', b"7", b"]}"), "tokens"),
        (COMPLETIONS, repeated(b'{"prompt": [', b"12345", b"]}"), "tokens"),
        (COMPLETIONS, b'{"prompt": "' + rb"{\"a\": [1, 2]}\n" * 200_000 + b'"}', "147,369 tokens"),
    ],
    ids=["messages", "parts", "prompts", "fields", "elements", "parameters", "digits", "token ids", "escaped text"],
)
@short_turns
async def test_bodies_of_many_entries_are_refused_for_their_number(http, path, body, message):
    response = await http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert message in response.text


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", INFER])
@pytest.mark.parametrize("unit", [b"[]", b"{}", b'{"a":1}', b'"a"', b"[" * 100 + b"]" * 100])
@short_turns
async def test_bodies_of_very_many_values_are_refused_before_they_are_parsed(http, path, unit):
    body = repeated(b'{"prompt": "a", "messages": [], "inputs": [], "x": [', unit, b"]}")
    response = await http.post(path, content=body, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert "more than 139,264 strings, lists and objects" in response.text


@short_turns
async def test_a_conversation_of_very_many_messages_is_refused_for_their_number(channel):
    request = generation_pb2.ChatRequest(messages=[generation_pb2.ChatMessage(role="user", content="a")] * 380_000)
    error = await error_of(generation_pb2_grpc.GenerationServiceStub(channel).Chat(request, timeout=60))
    assert isinstance(error, InvalidArgument)
    assert "messages has more than 1,024 entries" in error.message


@short_turns
async def test_a_raw_tensor_of_a_million_elements_is_refused_for_its_length(channel):
    error = await error_of(infer(channel, inference(1_000_000, raw=bytes(4) * 1_000_000)))
    assert isinstance(error, InvalidArgument)
    assert "more than 1,024 elements" in error.message


@short_turns
async def test_a_long_text_is_tokenized(http, channel):
    text = "a b " * 100_000
    response = await http.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    answer = response.json()
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"]) > 200_000
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    tokenized = await stub.Tokenize(generation_pb2.TokenizeRequest(text=text), timeout=60)
    assert list(tokenized.token_ids) == answer["tokens"]


@short_turns
async def test_a_conversation_of_many_empty_messages_is_tokenized(http):
    response = await http.post("/tokenize", json={"messages": [{"role": "user", "content": ""}] * 1024})
    assert response.json()["count"] > 1024


@short_turns
async def test_a_long_output_that_comes_at_once(channel, scheduler):
    """As when a stream is resumed."""
    scheduler.tokens_per_step = 40_000
    try:
        request = generation_pb2.GenerateRequest(text="hello")
        request.stopping.max_tokens = 40_000
        request.stopping.ignore_eos = True
        request.stopping.stop.extend(STOPS)
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        answer = await stub.Generate(request, timeout=60)
    finally:
        scheduler.tokens_per_step = 1
    assert len(answer.sequences[0].token_ids) == 40_000


@short_turns
async def test_a_thousand_requests_go_on_when_their_scheduler_is_back(http, scheduler):
    with scheduler.standing_still():
        body = {"prompt": ["hello there " * 100] * NUM_PROMPTS, "max_tokens": 2}
        calling = asyncio.create_task(http.post("/v1/completions", json=body))
        await until_true(lambda: len(scheduler.live) == NUM_PROMPTS, PATIENCE_S)
        before = len(scheduler.submits)
        scheduler.break_streams()
        await until_true(lambda: len(scheduler.submits) - before >= NUM_PROMPTS, PATIENCE_S)
    assert (await calling).status_code == 200
