"""Durable streams are resumed through any gateway, from any offset: two gateways, a real scheduler, a fake worker."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest

from quire.client import AsyncClient, GenerationOptions, TokenChunk
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import Aborted, AlreadyExists, InvalidArgument, NotFound, Unavailable
from tests.support.gateway_process import error_of, stream_request
from tests.support.metrics import read_metric, read_metrics
from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.two_gateways import TwoGateways, two_gateways


@pytest.fixture
async def two(tmp_path) -> AsyncIterator[TwoGateways]:
    async with two_gateways(tmp_path) as gateways:
        yield gateways
        for request_id in ("story", "other"):
            with contextlib.suppress(Exception):
                await gateways.first.generation.Cancel(generation_pb2.CancelRequest(request_id=request_id))
        await wait_nothing_in_use(gateways.scheduler)


def durable_request(**fields) -> generation_pb2.GenerateStreamRequest:
    request = stream_request(max_tokens=24, request_id="story", durable=True, **fields)
    request.sampling.seed = 5
    request.sampling.temperature = 1.0
    return request


@dataclass
class Parts:
    """What a stream brought of each sequence."""

    token_ids: dict[int, list[int]]
    texts: dict[int, str]
    logprobs: dict[int, list]
    finished: dict[int, generation_pb2.SequenceFinished]


async def parts_of(call) -> Parts:
    parts = Parts({}, {}, {}, {})
    async with asyncio.timeout(30):
        async for response in call:
            match response.WhichOneof("event"):
                case "chunk":
                    chunk = response.chunk
                    index = chunk.sequence_index
                    parts.token_ids[index] = parts.token_ids.get(index, []) + list(chunk.token_ids)
                    parts.texts[index] = parts.texts.get(index, "") + chunk.text
                    parts.logprobs[index] = parts.logprobs.get(index, []) + list(chunk.logprobs)
                case "finished":
                    parts.finished[response.finished.sequence_index] = response.finished
    return parts


def resume_request(**sequences) -> generation_pb2.ResumeStreamRequest:
    return generation_pb2.ResumeStreamRequest(request_id="story", **sequences)


@pytest.mark.parametrize("kind", ["plain", "stop string", "two sequences", "logprobs"])
async def test_from_every_offset_the_rest_comes(two, kind):
    request = durable_request()
    if kind == "two sequences":
        request.sampling.n = 2
    if kind == "logprobs":
        request.output.logprobs = 2
    if kind == "stop string":
        whole = await parts_of(two.first.generation.GenerateStream(request))
        request.stopping.stop.append(whole.texts[0][12:15])
    whole = await parts_of(two.first.generation.GenerateStream(request))
    for index, token_ids in whole.token_ids.items():
        text = whole.texts[index]
        for offset in range(len(token_ids) + 1):
            asked = resume_request()
            num_characters = len(text) * offset // len(token_ids)
            asked.offsets.add(sequence_index=index, offset=offset, num_characters=num_characters)
            rest = await parts_of(two.second.generation.ResumeStream(asked))
            assert rest.token_ids.get(index, []) == token_ids[offset:]
            assert rest.texts.get(index, "") == text[num_characters:]
            assert rest.logprobs.get(index, []) == whole.logprobs[index][offset:]
            assert rest.finished == whole.finished


async def test_another_call_takes_over_and_the_earlier_one_ends(two):
    request = durable_request()
    request.stopping.max_tokens = 200
    request.stopping.ignore_eos = True
    for gateway in (two.second, two.first):
        earlier = two.first.generation.GenerateStream(request)
        await earlier.initial_metadata()
        later = gateway.generation.ResumeStream(resume_request())
        error = await error_of(earlier)
        assert isinstance(error, Aborted)
        assert error.reason == "REQUEST_TAKEN_OVER"
        assert len((await parts_of(later)).token_ids[0]) == 200


async def test_resuming_leaves_another_request_alone_that_runs_under_the_same_id(two):
    await parts_of(two.first.generation.GenerateStream(durable_request()))
    other = stream_request("hello hello", max_tokens=200, request_id="story")
    other.stopping.ignore_eos = True
    running = two.first.generation.GenerateStream(other)
    first = await anext(aiter(running))
    error = await error_of(two.first.generation.ResumeStream(resume_request()))
    assert isinstance(error, AlreadyExists)
    assert error.reason == "REQUEST_ID_IN_USE"
    # The other gateway knows nothing of it.
    assert len((await parts_of(two.second.generation.ResumeStream(resume_request()))).token_ids[0]) == 24
    rest = await parts_of(running)
    assert len(first.chunk.token_ids) + len(rest.token_ids[0]) == 200


async def test_the_id_is_known_at_once_and_cancel_works_through_any_gateway(two):
    request = durable_request()
    request.stopping.max_tokens = 900
    request.stopping.ignore_eos = True
    call = two.first.generation.GenerateStream(request)
    assert dict(await call.initial_metadata())["quire-request-id"] == "story"
    call.cancel()
    await two.second.generation.Cancel(generation_pb2.CancelRequest(request_id="story"))
    error = await error_of(two.second.generation.ResumeStream(resume_request()))
    assert isinstance(error, NotFound)
    again = two.first.generation.Cancel(generation_pb2.CancelRequest(request_id="story"))
    assert isinstance(await error_of(again), NotFound)


async def test_a_resumed_stream_counts_among_the_requests_of_its_gateway(two):
    port = int(two.second.http_url.rpartition(":")[2])
    request = durable_request()
    request.stopping.max_tokens = 200
    request.stopping.ignore_eos = True
    call = two.first.generation.GenerateStream(request)
    await anext(aiter(call))
    call.cancel()
    resumed = two.second.generation.ResumeStream(resume_request())
    first = await anext(aiter(resumed))
    assert await read_metric(port, "quire_gateway_live_requests") == 1
    rest = await parts_of(resumed)
    assert len(first.chunk.token_ids) + len(rest.token_ids[0]) == 200
    again = await parts_of(two.second.generation.ResumeStream(resume_request()))
    assert len(again.token_ids[0]) == 200
    metrics = await read_metrics(port)
    assert metrics["quire_gateway_live_requests"] == 0
    assert metrics['quire_gateway_requests_total{outcome="completed"}'] == 2
    # What there was before is counted where it was read first, and what is read again is not generated again.
    assert 0 < metrics["quire_gateway_generated_tokens_total"] < 200
    assert metrics["quire_gateway_prompt_tokens_total"] == 0


async def test_impossible_offsets_are_refused_by_name(two):
    await parts_of(two.first.generation.GenerateStream(durable_request()))
    for offset, field in (({"sequence_index": 1}, "sequence_index"), ({"offset": 25}, "offset")):
        asked = resume_request(offsets=[generation_pb2.SequenceOffset(**offset)])
        error = await error_of(two.second.generation.ResumeStream(asked))
        assert isinstance(error, InvalidArgument)
        assert error.violations[0].field == f"offsets[0].{field}"


async def test_the_client_goes_on_after_its_gateway_breaks_the_stream(two):
    options = GenerationOptions(seed=5, temperature=1.0, max_tokens=100, ignore_eos=True)
    async with AsyncClient(two.first.gateway.grpc_address) as client:
        whole = (await client.generate("hello", options)).sequences[0]
        token_ids, text = [], ""
        async with client.generate_stream("hello", options, request_id="story", durable=True) as stream:
            async for event in stream:
                if isinstance(event, TokenChunk):
                    if token_ids and len(token_ids) < 20:
                        for live in two.first.gateway._ledger:
                            live.fail(Unavailable("the connection broke"))
                    assert event.offset == len(token_ids)
                    token_ids += event.token_ids
                    text += event.text
    assert (tuple(token_ids), text) == (tuple(whole.token_ids), whole.text)
