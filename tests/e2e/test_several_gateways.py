"""`quire serve --gateways 2`, as its clients see it."""

import asyncio
import os
import signal

import grpc.aio
import pytest

from quire.client import AsyncClient, GenerationOptions, TokenChunk
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from tests.support.processes import until_true
from tests.support.serving import serving
from tests.support.shared_port import clients_of_both

pytestmark = pytest.mark.extended

PROMPT = "Once upon a time"


def options_of(max_tokens: int) -> GenerationOptions:
    return GenerationOptions(temperature=1.0, seed=3, max_tokens=max_tokens, ignore_eos=True)


async def test_one_gateway_that_is_stopped_hands_its_clients_over_and_starts_anew():
    settings = {"gateways": 2, "max_connection_age": 1.0, "drain_timeout": 60.0}
    async with serving(**settings) as served, clients_of_both(served.server) as clients:
        calls = [0] * 6
        callers = [
            asyncio.create_task(call_on(served.server.grpc_address, calls, index)) for index in range(len(calls))
        ]
        await until_true(lambda: min(calls) > 3)
        stopped = served.server.process("gateway-1")
        counts = dict.fromkeys(clients, 0)
        with served.standing_still():
            streams = [asyncio.create_task(count(client, counts, name)) for name, client in clients.items()]
            await served.until_live(len(streams) + len(callers))
            os.kill(stopped.pid, signal.SIGTERM)
        await until_true(lambda: stopped.starts > 1)
        before = list(calls)
        await until_true(lambda: all(now > then + 3 for now, then in zip(calls, before, strict=True)))
        for caller in callers:
            assert not caller.done(), caller.exception()
            caller.cancel()
        await asyncio.gather(*streams)
        assert set(counts.values()) == {400}
        await asyncio.wait(callers)
        await served.server.wait_ready()
        assert served.server.process("gateway").starts == 1


async def call_on(address: str, calls: list[int], index: int) -> None:
    """Calls again and again over one channel, which has a connection of its own."""
    request = generation_pb2.GenerateRequest(text=PROMPT)
    request.stopping.max_tokens = 2
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        while True:
            await stub.Generate(request, timeout=60)
            calls[index] += 1


async def count(client: AsyncClient, counts: dict[str, int], name: str) -> None:
    """Counts the tokens of a stream as they come."""
    async with client.generate_stream(PROMPT, options_of(400)) as stream:
        async for event in stream:
            if isinstance(event, TokenChunk):
                counts[name] += len(event.token_ids)
