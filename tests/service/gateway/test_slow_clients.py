"""Clients that stop in the middle of sending or of reading."""

import asyncio
import contextlib
import json
import socket

import grpc
import pytest
import pytest_asyncio

from quire.gateway.v1 import generation_pb2_grpc
from quire.rpc.errors import DeadlineExceeded, InvalidArgument
from tests.support.gateway_process import collect, error_of, running_gateway, stream_request
from tests.support.raw_http import connection_to, read_answer, read_to_end, request
from tests.support.scheduler_process import until

SHORT_S = 0.3
# The end of an answer that is not cut off.
LAST_CHUNK = b"0\r\n\r\n"


@pytest_asyncio.fixture(loop_scope="session")
async def gateway(scheduler):
    async with running_gateway(scheduler, slow_reader_timeout=SHORT_S, slow_sender_timeout=SHORT_S) as running:
        yield running


async def test_a_grpc_client_that_stops_reading_loses_its_request(gateway, scheduler):
    scheduler.step_delay_s = 0.002
    asked = stream_request("slow", max_tokens=900, request_id="slow")
    asked.output.logprobs = 20
    options = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
    async with grpc.aio.insecure_channel(gateway.gateway.grpc_address, options) as channel:
        responses = aiter(generation_pb2_grpc.GenerationServiceStub(channel).GenerateStream(asked))
        await anext(responses)
        await scheduler.until(lambda: scheduler.aborted)
        assert scheduler.aborted == ["slow"]
        error = await error_of(responses)
    assert isinstance(error, DeadlineExceeded)
    assert error.reason == "SLOW_READER"


@pytest.mark.parametrize("method", ["Generate", "GenerateStream", "Cancel"])
async def test_a_grpc_client_that_sends_no_request_is_cut_off(gateway, method):
    call = gateway.channel.stream_stream(f"/quire.gateway.v1.GenerationService/{method}")(timeout=30)
    await call.wait_for_connection()
    error = await error_of(call)
    assert isinstance(error, DeadlineExceeded)
    assert error.reason == "SLOW_SENDER"


@pytest.mark.parametrize(
    "method", ["inference.GRPCInferenceService/ModelStreamInfer", "quire.gateway.v1.GenerationService/Generate"]
)
async def test_of_too_many_calls_without_a_request_the_oldest_end(scheduler, method):
    async with running_gateway(scheduler, max_message_bytes=10_000, max_total_body_bytes=20_000) as gateway:
        calls = [gateway.channel.stream_stream(f"/{method}")(timeout=60) for _ in range(70)]

        async def have_ended() -> bool:
            return sum(call.done() for call in calls) == 70 - 64

        await until(have_ended)
        for call in calls:
            assert not call.done() or (await error_of(call)).reason == "BODIES_FULL"
        assert await collect(gateway.generation.GenerateStream(stream_request("hello", max_tokens=2)))
        for call in calls:
            call.cancel()


async def test_of_too_many_calls_that_need_no_key_the_oldest_end_and_metadata_counts(scheduler):
    """Any client may watch the health of a gateway without end, by the maximum number of streams."""
    max_bytes = 4 << 20
    num_calls, num_held = 200, max_bytes // ((32 << 10) + 20_000)
    async with running_gateway(scheduler, max_message_bytes=10_000, max_total_body_bytes=max_bytes) as gateway:
        watch = gateway.channel.unary_stream("/grpc.health.v1.Health/Watch")
        calls = [watch(b"", metadata=[("x", "y" * 15_000)], timeout=60) for _ in range(num_calls)]
        ends = [asyncio.create_task(error_of(call)) for call in calls]

        async def have_ended() -> bool:
            return sum(end.done() for end in ends) >= num_calls - num_held

        await until(have_ended)
        ended = [end.result() for end in ends if end.done()]
        assert {error.reason for error in ended} == {"BODIES_FULL"}
        assert len(ended) < num_calls - num_held // 2
        assert await collect(gateway.generation.GenerateStream(stream_request("hello", max_tokens=2)))
        for call in calls:
            call.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


async def test_a_call_that_ends_without_a_request_is_malformed(gateway):
    call = gateway.channel.stream_unary("/quire.gateway.v1.GenerationService/Cancel")(iter([]), timeout=30)
    error = await error_of(call)
    assert isinstance(error, InvalidArgument)
    assert error.reason == "MALFORMED_MESSAGE"


async def test_an_http_client_that_stops_reading_loses_its_request_and_its_connection(gateway, scheduler):
    # The request must not end by itself before the connection is cut.
    scheduler.step_delay_s = 0.005
    with large_answer(gateway, stream=True) as connection:
        await scheduler.until(lambda: scheduler.aborted)
        answer = await read_to_end(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert b"[DONE]" not in answer
    assert not answer.endswith(LAST_CHUNK)


async def test_an_http_client_that_reads_slowly_gets_all_of_one_large_answer(gateway):
    with large_answer(gateway) as connection:
        loop, answer = asyncio.get_running_loop(), b""
        began = loop.time()
        async with asyncio.timeout(30):
            while not is_whole(answer):
                answer += await loop.sock_recv(connection, 3000)
                await asyncio.sleep(SHORT_S / 10)
        assert loop.time() - began > 3 * SHORT_S


@pytest.mark.parametrize("is_stream", [False, True])
async def test_long_answers_that_nobody_takes_have_a_limit_together(scheduler, is_stream):
    size = 1_000_000
    async with running_gateway(scheduler, max_message_bytes=2 * size, max_total_body_bytes=4 * size) as gateway:

        async def is_over() -> bool:
            return not gateway.gateway._http.bodies.num_bytes

        # A tool that the gateway ignores, but repeats in the response.
        tool = {"type": "web_search", "filters": "x" * size}
        body = {"input": "hi", "max_output_tokens": 1, "tools": [tool], "background": is_stream}
        path = f"/v1/responses/{(await gateway.http.post('/v1/responses', json=body)).json()['id']}"
        events = path + ("?stream=true" if is_stream else "")
        await until(is_over)
        answer, statuses = (await gateway.http.get(events)).content, list[int]()
        with contextlib.ExitStack() as stack:
            for _ in range(8):
                connection = stack.enter_context(slow_reader(gateway))
                connection.sendall(request(f"GET {events}"))
                head = await asyncio.get_running_loop().sock_recv(connection, 20)
                statuses.append(int(head.split()[1]))
            # Events of one write to the store are read at once.
            assert statuses[0] == 200 if is_stream else statuses[:3] == [200] * 3
            assert statuses[3:] == [429] * 5
        await until(is_over)
        assert (await gateway.http.get(events)).content == answer


@pytest.mark.parametrize("sent", [b"", b'{"prompt": '])
async def test_an_http_client_that_does_not_send_its_body_is_told_so(gateway, scheduler, sent):
    with await connection_to(gateway) as connection:
        connection.sendall(request("POST /v1/completions", {"content-length": "100"}, sent))
        answer = await read_answer(connection)
    assert (answer.status, answer.error["code"]) == (408, "slow_sender")
    assert not scheduler.submits


def large_answer(gateway, **fields) -> socket.socket:
    """The connection of a client that requested hundreds of kilobytes; the kernel buffers little of them."""
    connection = slow_reader(gateway)
    asked = {"prompt": "slow", "max_tokens": 1000, "ignore_eos": True, "logprobs": 5}
    body = json.dumps(asked | fields).encode()
    connection.sendall(request("POST /v1/completions", {"content-length": str(len(body))}, body))
    return connection


def slow_reader(gateway) -> socket.socket:
    """A connection for which the kernel buffers little."""
    # Accepted connections inherit it.
    gateway.gateway._http._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    host, _, port = gateway.gateway.http_address.rpartition(":")
    connection.connect((host, int(port)))
    connection.setblocking(False)
    return connection


def is_whole(answer: bytes) -> bool:
    """Whether a response has its last chunk: a large one is sent while it is made, without its length before it."""
    headers, _, body = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding: chunked" in headers.lower() or not body
    return body.endswith(b"\r\n" + LAST_CHUNK)


async def test_a_client_that_reads_is_never_too_slow_however_long_its_answer_takes(gateway, scheduler):
    scheduler.step_delay_s = SHORT_S / 10
    answer = await collect(gateway.generation.GenerateStream(stream_request(max_tokens=30)))
    assert len(answer.token_ids) == 30
