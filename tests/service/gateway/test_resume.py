"""Durable streams are resumed through any gateway: two of them, a real scheduler, a fake worker."""

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

from quire.common.v1 import common_pb2
from quire.gateway.v1 import generation_pb2
from tests.support.gateway_process import refusal_of, stream_request
from tests.support.metrics import read_metric, read_metrics
from tests.support.rig import REASONED_IDS, WEATHER_SCHEMA
from tests.support.scheduler_process import wait_nothing_in_use
from tests.support.two_gateways import TwoGateways, two_gateways


def parts_of(responses: list[Any]) -> dict[str, Any]:
    """The parts of a stream's only sequence by name: its tokens, and its texts joined."""
    parts: dict[str, Any] = defaultdict(str, token_ids=[])
    for chunk in (response.chunk for response in responses):
        parts["token_ids"] += chunk.token_ids
        texts = {"text": chunk.text, "reasoning": chunk.reasoning}
        for call in chunk.tool_calls:
            texts |= {f"{call.index} {name}": getattr(call, name) for name in ("id", "name", "arguments")}
        for name, text in texts.items():
            parts[name] += text
    return parts


async def read(call: AsyncIterator[Any]) -> list[Any]:
    """All of a stream, which must end within 30 seconds."""
    async with asyncio.timeout(30):
        return [response async for response in call]


@pytest.fixture
async def two(tmp_path) -> AsyncIterator[TwoGateways]:
    async with two_gateways(tmp_path) as gateways:
        yield gateways
        with contextlib.suppress(grpc.aio.AioRpcError):
            await gateways.first.generation.Cancel(generation_pb2.CancelRequest(request_id="story"))
        await wait_nothing_in_use(gateways.scheduler)


def durable_request() -> generation_pb2.GenerateStreamRequest:
    request = stream_request(max_tokens=24, request_id="story", durable=True)
    request.sampling.seed = 5
    request.sampling.temperature = 1.0
    return request


def resume_request(**sequences) -> generation_pb2.ResumeStreamRequest:
    return generation_pb2.ResumeStreamRequest(request_id="story", **sequences)


async def test_the_rest_of_a_chat_comes_in_the_same_parts(tmp_path, model):
    """Reasoning, text and tool calls; ids of calls follow from the id of their request."""
    request = generation_pb2.ChatStreamRequest(request_id="story", durable=True, stopping={"max_tokens": 300})
    request.messages.add(role="user", content="Is it warm in Rome?")
    request.tools.add(name="get_weather", parameters=json.dumps(WEATHER_SCHEMA))
    async with two_gateways(tmp_path, script=REASONED_IDS, model=model) as two:
        responses = await read(two.first.generation.ChatStream(request))
        whole, (*_, finished, completed) = parts_of(responses), responses
        assert (whole["reasoning"], whole["text"]) == ("I need it.", "Let me see.")
        for index in (0, 1):
            assert (whole[f"{index} name"], whole[f"{index} arguments"]) == ("get_weather", '{"city": "Rome"}')
        assert finished.finished.finish_reason == common_pb2.FINISH_REASON_TOOL_CALLS
        usage = completed.completed.usage
        assert 0 < usage.reasoning_tokens < usage.generated_tokens == len(REASONED_IDS)
        for num_had in range(0, len(responses) - 1, 9):
            had = parts_of(responses[:num_had])
            # Characters of all texts of the model, which exclude the ids of calls.
            texts = [text for name, text in had.items() if name != "token_ids" and not name.endswith(" id")]
            offset = {"offset": len(had["token_ids"]), "num_characters": sum(map(len, texts))}
            resume = resume_request(offsets=[generation_pb2.SequenceOffset(**offset)])
            rest = await read(two.both[num_had % 2].generation.ResumeStream(resume))
            assert parts_of([*responses[:num_had], *rest]) == whole
            assert (rest[-2].finished, rest[-1].completed.usage) == (finished.finished, usage)


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
    assert await read_metric(port, 'quire_gateway_live_requests{model="quire-tiny"}') == 1
    assert len(parts_of([first, *await read(resumed)])["token_ids"]) == 200
    assert len(parts_of(await read(two.second.generation.ResumeStream(resume_request())))["token_ids"]) == 200
    metrics = await read_metrics(port)
    assert metrics['quire_gateway_live_requests{model="quire-tiny"}'] == 0
    assert metrics['quire_gateway_requests_total{model="quire-tiny",outcome="completed"}'] == 2
    # The gateway that first read earlier tokens has counted them; tokens that are read again are not counted again.
    assert 0 < metrics['quire_gateway_generated_tokens_total{model="quire-tiny"}'] < 200
    assert metrics['quire_gateway_prompt_tokens_total{model="quire-tiny"}'] == 0


async def test_impossible_offsets_are_refused_by_name(two):
    for _ in range(2):
        # The second request takes the place of the first, which is over.
        await read(two.first.generation.GenerateStream(durable_request()))
    for offset, name in (({"sequence_index": 1}, "sequence_index"), ({"offset": 25}, "offset")):
        asked = resume_request(offsets=[generation_pb2.SequenceOffset(**offset)])
        await refusal_of(two.second.generation.ResumeStream(asked), f"offsets[0].{name}")
