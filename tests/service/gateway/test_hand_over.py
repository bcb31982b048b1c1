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
from tests.support.ports import free_port
from tests.support.processes import until_true
from tests.support.two_gateways import two_gateways

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
    async with (
        running_gateway(scheduler, reuse_port=True, hand_over=True) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http,
    ):
        before = await http.post("/v1/completions", json=COMPLETION)
        assert "connection" not in before.headers
        async with draining(gateway):
            last = await http.post("/v1/completions", json=COMPLETION)
            assert last.status_code == 200
            assert last.headers["connection"] == "close"
            with pytest.raises(httpx.ConnectError):
                await http.post("/v1/completions", json=COMPLETION)


async def test_without_it_a_gateway_that_drains_answers_that_it_does(scheduler):
    scheduler.emits.clear()
    async with (
        running_gateway(scheduler, reuse_port=True) as gateway,
        httpx.AsyncClient(base_url=gateway.http_url, timeout=60) as http,
    ):
        live = asyncio.create_task(collect(gateway.generation.GenerateStream(stream_request())))
        await scheduler.until(lambda: scheduler.live)
        stopping = asyncio.create_task(gateway.gateway.stop(60))
        await asyncio.sleep(0)
        async with own_stub(gateway.gateway.grpc_address) as stub:
            error = await error_of(stub.Generate(generation_pb2.GenerateRequest(text="x")))
        assert isinstance(error, Unavailable)
        assert error.reason == "DRAINING"
        refused = await http.post("/v1/completions", json=COMPLETION)
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        scheduler.emits.set()
        await live
        await stopping


async def test_a_drain_without_time_ends_at_once(scheduler):
    async with running_gateway(scheduler, reuse_port=True, hand_over=True) as gateway, asyncio.timeout(30):
        await gateway.gateway.stop(0)


async def test_clients_of_both_kinds_go_on_at_the_other_gateway(tmp_path):
    grpc_port, http_port = free_port(), free_port()
    shared = {"reuse_port": True, "hand_over": True, "max_connection_age": 0.5}
    async with two_gateways(tmp_path, grpc_port=grpc_port, http_port=http_port, **shared) as two:
        counts = [0] * 8

        async def call_grpc(index: int) -> None:
            async with own_stub(two.first.gateway.grpc_address) as stub:
                request = generation_pb2.GenerateRequest(text="x")
                request.stopping.max_tokens = 4
                while True:
                    await stub.Generate(request, timeout=30)
                    counts[index] += 1
                    await asyncio.sleep(0.01)

        async def call_http(index: int) -> None:
            async with httpx.AsyncClient(base_url=two.first.http_url, timeout=60) as http:
                while True:
                    answer = await http.post("/v1/completions", json=COMPLETION, timeout=30)
                    assert answer.status_code == 200
                    counts[index] += 1
                    await asyncio.sleep(0.01)

        # Enough that some are connected to either.
        callers = [asyncio.create_task((call_grpc, call_http)[index % 2](index)) for index in range(len(counts))]
        await until_true(lambda: min(counts) > 3)
        await two.first.gateway.stop(60)
        before = list(counts)
        await until_true(lambda: all(now > then + 3 for now, then in zip(counts, before, strict=True)))
        for caller in callers:
            assert not caller.done(), caller.exception()
            caller.cancel()
        await asyncio.wait(callers)


def test_only_a_gateway_that_shares_its_ports_can_hand_them_over():
    with pytest.raises(ValueError, match="--hand-over leaves the ports to gateways that share them; give --reuse-port"):
        GatewaySettings(hand_over=True)
