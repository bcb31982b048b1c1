"""Durable streams are resumed through any gateway, from any offset: two gateways, a real scheduler, a fake worker."""

import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator

import pytest

from quire.client import AsyncClient, GenerationOptions, TokenChunk
from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import Aborted, AlreadyExists, InvalidArgument, NotFound, Unavailable
from tests.support.chat_models import write_chat_model
from tests.support.gateway_process import error_of, stream_request
from tests.support.metrics import read_metric, read_metrics
from tests.support.rig import EOS, REASONED, TOKENIZER, WEATHER_SCHEMA
from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.stream_parts import Parts, add, parts_of
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


def resume_request(**sequences) -> generation_pb2.ResumeStreamRequest:
    return generation_pb2.ResumeStreamRequest(request_id="story", **sequences)


@pytest.mark.parametrize("kind", ["stop string", "two sequences", "logprobs"])
async def test_from_every_offset_the_rest_comes(two, kind):
    request = durable_request()
    if kind == "two sequences":
        request.sampling.n = 2
    if kind == "logprobs":
        request.output.logprobs = 2
    if kind == "stop string":
        whole = await parts_of(two.first.generation.GenerateStream(request))
        request.stopping.stop.append(whole[0].text[12:15])
    whole = await parts_of(two.first.generation.GenerateStream(request))
    for index, all_of_it in whole.items():
        num_tokens = len(all_of_it.token_ids)
        for offset in range(num_tokens + 1):
            num_characters = len(all_of_it.text) * offset // num_tokens
            asked = resume_request()
            asked.offsets.add(sequence_index=index, offset=offset, num_characters=num_characters)
            rest = (await parts_of(two.second.generation.ResumeStream(asked)))[index]
            assert rest.token_ids == all_of_it.token_ids[offset:]
            assert rest.text == all_of_it.text[num_characters:]
            assert rest.logprobs == all_of_it.logprobs[offset:]
            assert rest.finished == all_of_it.finished


async def test_the_rest_of_a_chat_comes_in_the_same_parts(tmp_path):
    """Reasoning, text and calls of tools; ids of calls are those of their request."""
    model = str(write_chat_model(tmp_path / "model"))
    script = (*TOKENIZER.encode(REASONED, add_special_tokens=False).ids, EOS)
    request = generation_pb2.ChatStreamRequest(request_id="story", durable=True, stopping={"max_tokens": 300})
    request.messages.add(role="user", content="Is it warm in Rome?")
    request.tools.add(name="get_weather", parameters=json.dumps(WEATHER_SCHEMA))
    async with two_gateways(tmp_path, script=script, model=model) as two:
        responses = [response async for response in two.first.generation.ChatStream(request)]
        whole: dict[int, Parts] = defaultdict(Parts)
        for response in responses:
            add(whole, response)
        assert (whole[0].reasoning, whole[0].text) == ("I need it.", "Let me see.")
        assert [call[1:] for call in whole[0].calls.values()] == [["get_weather", '{"city": "Rome"}']] * 2
        assert whole[0].finished.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
        usage = responses[-1].completed.usage
        assert 0 < usage.reasoning_tokens < usage.generated_tokens == len(script)
        for num_had in range(0, len(responses) - 1, 9):
            parts: dict[int, Parts] = defaultdict(Parts)
            for response in responses[:num_had]:
                add(parts, response)
            held = len(parts[0].token_ids), parts[0].num_characters
            resume = resume_request()
            resume.offsets.add(sequence_index=0, offset=held[0], num_characters=held[1])
            rest = [each async for each in two.both[num_had % 2].generation.ResumeStream(resume)]
            for response in rest:
                add(parts, response)
            assert parts == whole
            assert rest[-1].completed.usage == usage


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
        assert len((await parts_of(later))[0].token_ids) == 200


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
    assert len((await parts_of(two.second.generation.ResumeStream(resume_request())))[0].token_ids) == 24
    rest = await parts_of(running)
    assert len(first.chunk.token_ids) + len(rest[0].token_ids) == 200


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
    assert len(first.chunk.token_ids) + len(rest[0].token_ids) == 200
    again = await parts_of(two.second.generation.ResumeStream(resume_request()))
    assert len(again[0].token_ids) == 200
    metrics = await read_metrics(port)
    assert metrics["quire_gateway_live_requests"] == 0
    assert metrics['quire_gateway_requests_total{outcome="completed"}'] == 2
    # What there was before is counted where it was read first, and what is read again is not generated again.
    assert 0 < metrics["quire_gateway_generated_tokens_total"] < 200
    assert metrics["quire_gateway_prompt_tokens_total"] == 0


async def test_impossible_offsets_are_refused_by_name(two):
    await parts_of(two.first.generation.GenerateStream(durable_request()))
    for offset, name in (({"sequence_index": 1}, "sequence_index"), ({"offset": 25}, "offset")):
        asked = resume_request(offsets=[generation_pb2.SequenceOffset(**offset)])
        error = await error_of(two.second.generation.ResumeStream(asked))
        assert isinstance(error, InvalidArgument)
        assert error.violations[0].field == f"offsets[0].{name}"


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
