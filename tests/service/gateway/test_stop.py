"""A gateway that stops: requests that it accepted do not fail, idle clients do not delay it, and other processes keep
shared ports."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import grpc.aio
import httpx
import pytest
from grpc_reflection.v1alpha import reflection_pb2

from gateway.settings import GatewaySettings
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.errors import Unavailable, from_rpc_error
from tests.support.gateway_process import RunningGateway, collect, error_of, running_gateway, stream_request
from tests.support.grpc_types import reflection_stub
from tests.support.processes import until_true
from tests.support.raw_http import RawAnswer, connection_to, read_answer, request

BODY = b'{"prompt": "hello", "max_tokens": 8}'
COMPLETION = request(
    "POST /v1/completions", {"content-type": "application/json", "content-length": str(len(BODY))}, BODY
)
REFLECTION = reflection_pb2.ServerReflectionRequest(list_services="")


@contextlib.asynccontextmanager
async def idle_calls(gateway: RunningGateway) -> AsyncIterator[list]:
    """A call of reflection that was answered once, and a KServe call and a unary call without a request."""
    async with grpc.aio.insecure_channel(gateway.gateway.grpc_address) as channel:
        reflection = reflection_stub(channel).ServerReflectionInfo()
        await reflection.write(REFLECTION)
        assert await reflection.read()
        inference = channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")()
        unary = channel.stream_stream("/quire.gateway.v1.GenerationService/Generate")()
        for call in (inference, unary):
            await call.wait_for_connection()
        # gRPC itself cancels a call that has not reached its handler.
        await until_true(lambda: len(gateway.gateway._idle_calls._waiting) == 3)
        yield [reflection, inference, unary]


async def test_idle_calls_of_grpc_do_not_hold_a_stop_and_are_told(scheduler, monkeypatch):
    monkeypatch.setattr("gateway.app._STOP_GRACE_S", 60.0)
    async with running_gateway(scheduler) as gateway, idle_calls(gateway) as calls:
        async with asyncio.timeout(30):
            await gateway.gateway.stop(60)
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            error = from_rpc_error(ended.value)
            assert isinstance(error, Unavailable)
            assert error.reason == "DRAINING"


@pytest.mark.parametrize("hand_over", [False, True])
async def test_no_request_over_a_kept_connection_fails_because_its_gateway_stops(scheduler, monkeypatch, hand_over):
    monkeypatch.setattr("gateway.app._HAND_OVER_S", 0.5)
    scheduler.step_delay_s = 0.05
    async with (
        running_gateway(scheduler, reuse_port=True, hand_over=hand_over) as gateway,
        idle_calls(gateway),
        contextlib.AsyncExitStack() as stack,
    ):
        connections = [stack.enter_context(await connection_to(gateway)) for _ in range(40)]
        for connection in connections:
            connection.sendall(request("GET /health"))
            assert (await read_answer(connection)).status == 200
        stopping = asyncio.create_task(gateway.gateway.stop(60))
        await asyncio.sleep(0)
        first = await answer_or_end(connections.pop())
        assert first is not None
        assert first.status == (200 if hand_over else 503)
        # No request runs any more; the other connections send one by one, until long after the stop.
        answers = []
        for connection in connections:
            await asyncio.wait([stopping], timeout=0.04)
            answers.append(asyncio.create_task(answer_or_end(connection)))
        await asyncio.wait_for(stopping, 30)
        got = [answer for answer in (first, *await asyncio.gather(*answers)) if answer is not None]
    statuses = [answer.status for answer in got]
    assert set(statuses) <= {200, 503}
    assert statuses.count(200) == len(scheduler.submits)
    assert all(answer.headers["retry-after"] == "1" for answer in got if answer.status == 503)


async def answer_or_end(connection) -> RawAnswer | None:
    """The answer to a completion; None if the connection is closed without one, so that clients send it again."""
    try:
        connection.sendall(COMPLETION)
        return await read_answer(connection)
    except (AssertionError, ConnectionResetError, BrokenPipeError):
        return None


async def test_a_request_whose_body_is_still_coming_is_told_to_come_back(scheduler, monkeypatch):
    monkeypatch.setattr("gateway.server.connections._GRACE_S", 0.1)
    async with running_gateway(scheduler) as gateway:
        with await connection_to(gateway) as connection:
            connection.sendall(COMPLETION[:-1])
            answering = asyncio.create_task(read_answer(connection))
            await asyncio.wait([answering], timeout=0.1)
            await asyncio.wait_for(gateway.gateway.stop(60), 30)
            answer = await answering
    assert (answer.status, answer.headers["retry-after"], answer.headers["connection"]) == (503, "1", "close")
    assert answer.error["code"] == "draining"


ASKED = {"prompt": "hello", "max_tokens": 4}


@contextlib.asynccontextmanager
async def own_stub(address: str) -> AsyncIterator[generation_pb2_grpc.GenerationServiceStub]:
    # Without it, channels of one process share connections.
    async with grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


async def until_closed(address: str) -> None:
    """Waits until no process listens there."""
    host, _, port = address.rpartition(":")
    async with asyncio.timeout(30):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            except ConnectionResetError:
                # The connection was in the port's queue when the port was closed.
                continue
            writer.close()
            await writer.wait_closed()


@contextlib.asynccontextmanager
async def draining(gateway: RunningGateway) -> AsyncIterator[asyncio.Task[None]]:
    """Yields once both ports are closed, and waits at the end until the gateway has stopped."""
    stopping = asyncio.create_task(gateway.gateway.stop(60))
    await until_closed(gateway.gateway.grpc_address)
    await until_closed(gateway.gateway.http_address)
    yield stopping
    await stopping


async def test_both_ports_close_at_once_live_streams_end_whole_and_grpc_finds_no_fault(scheduler, capfd):
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
    assert "accept" not in capfd.readouterr().err


async def test_a_connection_from_before_is_served_once_more_and_told_to_close(scheduler):
    async with running_gateway(scheduler, reuse_port=True, hand_over=True) as gateway:
        before = await gateway.http.post("/v1/completions", json=ASKED)
        assert "connection" not in before.headers
        async with draining(gateway):
            last = await gateway.http.post("/v1/completions", json=ASKED)
            assert last.status_code == 200
            assert last.headers["connection"] == "close"
            with pytest.raises(httpx.ConnectError):
                await gateway.http.post("/v1/completions", json=ASKED)


def test_only_a_gateway_that_shares_its_ports_can_hand_them_over():
    with pytest.raises(ValueError, match="--hand-over leaves the ports to gateways that share them; give --reuse-port"):
        GatewaySettings(hand_over=True)
