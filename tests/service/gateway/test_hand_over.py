"""A gateway that shares its ports leaves them to the others when it drains."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import httpx
import pytest

from gateway.settings import GatewaySettings
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.errors import Unavailable
from tests.support.gateway_process import RunningGateway, collect, error_of, running_gateway, stream_request

COMPLETION = {"prompt": "hello", "max_tokens": 4}


@contextlib.asynccontextmanager
async def own_stub(address: str) -> AsyncIterator[generation_pb2_grpc.GenerationServiceStub]:
    # Channels of one process share connections otherwise.
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def until_closed(address: str) -> None:
    """Waits until nobody listens there."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                # It was in the queue of the port as that was closed.
                continue
            writer.close()
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def draining(gateway: RunningGateway) -> AsyncIterator[asyncio.Task[None]]:
    """From the moment both ports are closed until the gateway has stopped."""
    stopping = asyncio.create_task(gateway.gateway.stop(60))
    await until_closed(gateway.gateway.grpc_address)
    await until_closed(gateway.gateway.http_address)
    yield stopping
    await stopping


async def test_both_ports_close_at_once_and_live_streams_end_whole(scheduler):
    scheduler.emits.clear()
    async with running_gateway(scheduler, reuse_port=True, hand_over=True) as gateway:
        live = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request(max_tokens=30))))
        await scheduler.until(lambda: scheduler.live)
        async with draining(gateway) as stopping:
            async with own_stub(gateway.gateway.grpc_address) as stub:
                assert isinstance(await error_of(stub.Generate(generation_pb2.GenerateRequest(text="x"))), Unavailable)
            assert not stopping.done()
            scheduler.emits.set()
            assert len((await live).token_ids) == 30


async def test_grpc_finds_no_fault_in_a_port_that_was_left(scheduler, capfd):
    async with (
        running_gateway(scheduler, reuse_port=True, hand_over=True) as gateway,
        draining(gateway),
        own_stub(gateway.gateway.grpc_address) as stub,
    ):
        assert isinstance(await error_of(stub.Generate(generation_pb2.GenerateRequest(text="x"))), Unavailable)
    assert "accept" not in capfd.readouterr().err


async def test_a_connection_from_before_is_served_once_more_and_told_to_close(scheduler):
    async with running_gateway(scheduler, reuse_port=True, hand_over=True) as gateway:
        before = await gateway.http.post("/v1/completions", json=COMPLETION)
        assert "connection" not in before.headers
        async with draining(gateway):
            last = await gateway.http.post("/v1/completions", json=COMPLETION)
            assert last.status_code == 200
            assert last.headers["connection"] == "close"
            with pytest.raises(httpx.ConnectError):
                await gateway.http.post("/v1/completions", json=COMPLETION)


def test_only_a_gateway_that_shares_its_ports_can_hand_them_over():
    with pytest.raises(ValueError, match="--hand-over leaves the ports to gateways that share them; give --reuse-port"):
        GatewaySettings(hand_over=True)
