"""Clients whose stubs were generated from the contracts of a release are served by today's gateway."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from quire.gateway.v1 import generation_pb2
from tests.compat.transcript import CONTRACTS, Contracts, releases
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import GENERATION, RunningGateway, collect, error_of, running_gateway, stream_request


def _serialized(request: Any) -> bytes:
    return request.SerializeToString()


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    async with FakeScheduler() as scheduler, running_gateway(scheduler) as running:
        yield running


@pytest.mark.parametrize("release", releases(), ids=lambda release: release.name)
async def test_a_client_of_a_release_reads_a_stream_and_an_error(release: Path, gateway: RunningGateway) -> None:
    contracts = Contracts.read(release / CONTRACTS)
    stream = f"{GENERATION}GenerateStream"
    call = gateway.channel.unary_stream(
        stream,
        request_serializer=_serialized,
        response_deserializer=lambda data: contracts.response(stream, data),
    )
    request = contracts.request(stream, b"")
    assert type(request) is not generation_pb2.GenerateStreamRequest
    request.text = "hello"
    request.sampling.seed = 3
    request.stopping.max_tokens = 8
    ours = stream_request("hello", max_tokens=8)
    ours.sampling.seed = 3
    expected = await collect(gateway.generation.GenerateStream(ours))
    found = await collect(call(request, timeout=60))
    assert (found.text, found.token_ids) == (expected.text, expected.token_ids)
    request.sampling.temperature = -1
    error = await error_of(call(request, timeout=60))
    assert [each.field for each in error.violations] == ["sampling.temperature"]
