"""A unary call that takes longer than the interval of its client's pings."""

import asyncio
import time

import grpc.aio

from quire.gateway.v1 import generation_pb2, generation_pb2_grpc

# The most often that the gateway lets clients ping; docs/api.md says so.
PING_INTERVAL_S = 5.0


async def test_a_long_unary_call_survives_its_client_s_pings(gateway, scheduler) -> None:
    scheduler.emits.clear()
    options = [
        ("grpc.keepalive_time_ms", int(PING_INTERVAL_S * 1000)),
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(gateway.gateway.grpc_address, options=options) as channel:
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        request = generation_pb2.GenerateRequest(text="hello", stopping={"max_tokens": 3})
        started = time.monotonic()
        call = asyncio.ensure_future(stub.Generate(request))
        # Nothing to await: what is shown is that nothing happens for more than two pings.
        await asyncio.sleep(2.3 * PING_INTERVAL_S)
        assert not call.done()
        scheduler.emits.set()
        answer = await asyncio.wait_for(call, 30)
    assert len(answer.sequences[0].token_ids) == 3
    assert time.monotonic() - started > 2 * PING_INTERVAL_S
