"""Limits of connections and calls of a gateway, and of the time that it waits for a client's next bytes."""

import asyncio
import contextlib
import socket
import struct
import time

import grpc.aio
import httpx
import pytest
from grpc_health.v1 import health_pb2

from bench.hostile_callers import frame, headers
from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.errors import ResourceExhausted, Unavailable
from tests.support.gateway_process import error_of, running_gateway
from tests.support.grpc_types import health_stub
from tests.support.processes import until_true
from tests.support.raw_http import connection_to, read_answer, read_to_end, request

CHECK = health_pb2.HealthCheckRequest()
SHORT_S = 0.3
# Type, and type with flags, of HTTP/2 frames.
GOAWAY, PING_ACK = 7, b"\6\1"
PING = frame(6, 0, 0, b"12345678")
# Without it, connections of one process to one address share one.
APART = [("grpc.use_local_subchannel_pool", 1)]


async def test_a_grpc_connection_too_many_is_closed_until_another_one_ends(scheduler):
    # The channel of `running_gateway` connects only when it is used.
    async with running_gateway(scheduler, max_connections=2) as gateway:
        address = gateway.gateway.grpc_address
        async with grpc.aio.insecure_channel(address, APART) as second:
            async with grpc.aio.insecure_channel(address, APART) as first:
                for channel in (first, second):
                    assert await health_stub(channel).Check(CHECK, timeout=30)
                third = grpc.aio.insecure_channel(address, APART)
                assert isinstance(await error_of(health_stub(third).Check(CHECK)), Unavailable)
            assert await health_stub(third).Check(CHECK, wait_for_ready=True, timeout=30)
            await third.close()


async def test_the_body_of_an_answer_waits_for_no_packet_of_the_client(gateway):
    """Also on an asyncio loop, which sets TCP_NODELAY only for sockets that it makes."""
    assert (await gateway.http.get("/health")).status_code == 200
    (connection,) = gateway.gateway._http.state.connections
    accepted = connection.transport.get_extra_info("socket")
    assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


async def test_calls_beyond_those_of_one_connection_wait_in_the_client(scheduler):
    async with running_gateway(scheduler, max_streams_per_connection=2) as gateway:
        health = health_stub(gateway.channel)
        watches = [health.Watch(CHECK) for _ in range(2)]
        for watch in watches:
            assert await asyncio.wait_for(watch.read(), 30)
        late = asyncio.ensure_future(health.Check(CHECK, timeout=30))
        done, _ = await asyncio.wait([late], timeout=SHORT_S)
        assert not done
        watches[0].cancel()
        assert await asyncio.wait_for(late, 30)
        watches[1].cancel()


async def test_an_http_connection_too_many_is_closed_and_counted_until_another_one_ends(scheduler):
    async with running_gateway(scheduler, max_connections=2) as gateway:
        held = [await connection_to(gateway) for _ in range(2)]
        # The answer shows that the connection was accepted.
        held[0].sendall(request("GET /health"))
        assert (await read_answer(held[0])).status == 200
        surplus = await connection_to(gateway)
        assert await read_to_end(surplus) == b""
        held[1].close()
        async with asyncio.timeout(30):
            metrics = await answered(gateway.http, "/metrics")
        assert "quire_gateway_refused_http_connections_total" in metrics
        assert "quire_gateway_refused_http_connections_total 0.0" not in metrics
        surplus.close()
        held[0].close()


async def test_no_timer_holds_a_connection_that_its_client_has_reset(gateway):
    client = await connection_to(gateway)
    client.sendall(request("GET /health"))
    assert (await read_answer(client)).status == 200
    (connection,) = gateway.gateway._http.state.connections
    await until_true(lambda: connection.timeout_keep_alive_task)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()
    await until_true(lambda: not gateway.gateway._http.state.connections)
    assert connection.timeout_keep_alive_task is None


async def answered(client: httpx.AsyncClient, path: str) -> str:
    """The answer of a gateway once it has noticed that a connection ended."""
    while True:
        try:
            return (await client.get(path)).text
        except httpx.TransportError:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("sent", [b"", b"GET", request("GET /health")[:-2]])
async def test_an_http_client_that_does_not_end_its_headers_is_cut_off(scheduler, sent):
    async with running_gateway(scheduler, slow_sender_timeout=SHORT_S) as gateway:
        with await connection_to(gateway) as connection:
            connection.sendall(sent)
            assert await read_to_end(connection) == b""


async def test_headers_that_come_byte_by_byte_have_no_longer_than_those_that_stop(scheduler):
    async with running_gateway(scheduler, slow_sender_timeout=SHORT_S) as gateway:
        with await connection_to(gateway) as connection:
            # The second request restarts the clock.
            connection.sendall(request("GET /health"))
            assert (await read_answer(connection)).status == 200
            began = time.monotonic()
            reading = asyncio.ensure_future(read_to_end(connection))
            while not reading.done():
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    connection.sendall(b"G")
                await asyncio.wait([reading], timeout=SHORT_S / 10)
            assert await reading == b""
        assert time.monotonic() - began >= SHORT_S * 0.9


async def test_headers_that_never_end_are_refused_before_they_fill_the_memory(scheduler):
    async with running_gateway(scheduler) as gateway:
        loop = asyncio.get_running_loop()
        connection = await connection_to(gateway)
        reading = asyncio.ensure_future(read_to_end(connection))
        num_sent = 0
        while not reading.done() and num_sent < 10_000_000:
            try:
                await loop.sock_sendall(connection, b"x" * 10_000)
            except (BrokenPipeError, ConnectionResetError):
                break
            num_sent += 10_000
        assert num_sent < 10_000_000
        answer = await reading
        assert not answer or (answer[:12] == b"HTTP/1.1 431" and b"headers have more than 64.0 KiB" in answer)
        connection.close()


@pytest.mark.parametrize("in_trailers", [False, True])
@pytest.mark.parametrize(("num_lines", "status"), [(1000, b"200"), (1100, b"431")])
async def test_very_many_headers_or_trailers_are_refused_however_short_they_are(
    gateway, in_trailers, num_lines, status
):
    lines = b"x: y\r\n" * num_lines
    head = request("POST /tokenize", {"transfer-encoding": "chunked", "connection": "close"})
    if not in_trailers:
        head, lines = head[:-2] + lines + head[-2:], b""
    with await connection_to(gateway) as connection:
        connection.sendall(head + b'e\r\n{"prompt":"a"}\r\n0\r\n' + lines + b"\r\n")
        answer = await read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 " + status), answer


async def test_a_connection_that_is_not_set_up_in_time_is_closed(scheduler):
    async with running_gateway(scheduler, handshake_timeout=SHORT_S) as gateway:
        with await connection_to(gateway, gateway.gateway.grpc_address) as connection:
            await read_to_end(connection)


async def test_an_http_connection_without_a_further_request_is_closed_after_a_while(scheduler, monkeypatch):
    monkeypatch.setattr("gateway.server.connections._KEEP_ALIVE_S", SHORT_S)
    async with running_gateway(scheduler) as gateway:
        with await connection_to(gateway) as connection:
            connection.sendall(request("GET /health"))
            assert b" 200 " in await read_to_end(connection)


async def test_a_long_unary_call_survives_its_client_s_pings(scheduler):
    """gRPC lets clients ping at most every second."""
    scheduler.emits.clear()
    pings = [("grpc.keepalive_time_ms", 50), ("grpc.http2.max_pings_without_data", 0), *APART]
    async with (
        running_gateway(scheduler) as gateway,
        grpc.aio.insecure_channel(gateway.gateway.grpc_address, pings) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = asyncio.ensure_future(stub.Generate(generation_pb2.GenerateRequest(text="hello")))
        # There is no event to wait for: the test shows that nothing happens during a few pings.
        await asyncio.wait([call], timeout=3.5)
        assert not call.done()
        scheduler.emits.set()
        assert (await asyncio.wait_for(call, 30)).sequences


@pytest.mark.parametrize("flood", [PING, frame(4, 0, 0), frame(0, 0, 1)], ids=["pings", "settings", "empty data"])
async def test_a_flood_of_frames_is_answered_and_nothing_else_is_written(scheduler, flood):
    """gRPC's own defence writes a GOAWAY for each ping, keeps memory for each, and may not end."""
    num_frames = 100_000
    start = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + headers(1, b"/grpc.health.v1.Health/Watch")
    async with running_gateway(scheduler) as gateway:
        host, _, port = gateway.gateway.grpc_address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(start + flood * num_frames + PING)
        num_acks = 0
        async with asyncio.timeout(30):
            while num_acks < (num_frames + 1 if flood is PING else 1):
                head = await reader.readexactly(9)
                assert head[3] != GOAWAY
                await reader.readexactly(int.from_bytes(head[:3]))
                num_acks += head[3:5] == PING_ACK
        writer.close()
        assert await health_stub(gateway.channel).Check(CHECK, timeout=30)


async def test_metadata_beyond_the_limit_is_refused_and_below_it_is_not(scheduler):
    async with running_gateway(scheduler) as gateway:
        health = health_stub(gateway.channel)
        assert await health.Check(CHECK, metadata=[("x", "y" * 15_000)], timeout=30)
        error = await error_of(health.Check(CHECK, metadata=[("x", "y" * 21_000)], timeout=30))
        assert isinstance(error, ResourceExhausted)
        assert await health.Check(CHECK, timeout=30)


async def test_compressed_requests_are_refused_before_they_are_unpacked(scheduler):
    compression = grpc.Compression.Gzip
    async with (
        running_gateway(scheduler) as gateway,
        grpc.aio.insecure_channel(gateway.gateway.grpc_address, options=APART, compression=compression) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await stub.Generate(generation_pb2.GenerateRequest(text="a" * 1000), timeout=30)
        assert failed.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert "gzip" in str(failed.value.details())
        assert not scheduler.live
