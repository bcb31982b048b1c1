"""Every list, map and text that callers send, filled up to the limits: no other caller notices.

`tests/support/sweep.py` makes the calls from the contracts and from /openapi.json, so that a new field is swept, too.
"""

import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable

import grpc.aio
import httpx
import pytest
import pytest_asyncio

from gateway.request.counting import EntryLimits
from quire.gateway.v1 import generation_pb2, model_pb2, prefix_pb2
from quire.inference import open_inference_pb2
from tests.support.fake_scheduler import FakeScheduler
from tests.support.measured_gateway import MeasuredGateway, measured_gateway
from tests.support.sweep import grpc_calls, http_calls

LONGEST_TURN_MS = 100
MAX_MEMORY_MIB = 400
SERVICES = [
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"],
    model_pb2.DESCRIPTOR.services_by_name["ModelService"],
    prefix_pb2.DESCRIPTOR.services_by_name["PrefixService"],
    open_inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"],
]
LIMITS = EntryLimits(max_messages=1024)

Call = Callable[[], Awaitable[object]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def gateway() -> AsyncIterator[MeasuredGateway]:
    async with FakeScheduler(max_model_len=60_000) as scheduler, measured_gateway(scheduler) as gateway:
        yield gateway


async def sweep(gateway: MeasuredGateway, calls: Iterable[tuple[str, Call]]) -> int:
    """Makes the calls, one after the other. Returns how many."""
    num_calls = 0
    for name, call in calls:
        num_calls += 1
        await gateway.assert_short_turns(name, call, LONGEST_TURN_MS)
        assert gateway.process.returncode is None, f"{name} ended the gateway"
    assert gateway.peak_memory_mib() < MAX_MEMORY_MIB
    return num_calls


def over_grpc(channel: grpc.aio.Channel) -> Iterable[tuple[str, Call]]:
    for each in grpc_calls(SERVICES, LIMITS):

        async def call(each=each) -> None:
            with contextlib.suppress(grpc.aio.AioRpcError):
                if each.streams:
                    async for _ in channel.unary_stream(each.method)(each.make()):
                        pass
                else:
                    await channel.unary_unary(each.method)(each.make())

        yield each.name, call


async def over_http(http: httpx.AsyncClient) -> list[tuple[str, Call]]:
    async def call(path: str, body: bytes) -> None:
        answer = await http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code < 500, answer.text

    document = (await http.get("/openapi.json")).json()
    return [(each.name, lambda each=each: call(each.path, each.make())) for each in http_calls(document, LIMITS)]


async def test_some_fields_of_grpc_calls_at_their_limits(gateway):
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        calls = list(over_grpc(channel))
        assert await sweep(gateway, calls[::20]) > 30


async def test_some_fields_of_http_bodies_at_their_limits(gateway):
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http:
        assert await sweep(gateway, (await over_http(http))[::30]) > 30


@pytest.mark.extended
async def test_all_fields_of_grpc_calls_at_their_limits(gateway):
    async with grpc.aio.insecure_channel(gateway.grpc_address) as channel:
        assert await sweep(gateway, over_grpc(channel)) > 700


@pytest.mark.extended
async def test_all_fields_of_http_bodies_at_their_limits(gateway):
    async with httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http:
        assert await sweep(gateway, await over_http(http)) > 800
