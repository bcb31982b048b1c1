"""Bodies of HTTP requests: endless ones, ones that no handler reads, and the memory that all of them may take."""

import asyncio
import contextlib
import json
import socket
from typing import Any

import pytest

from quire.model_files.progress import shown_bytes
from tests.support.gateway_process import running_gateway
from tests.support.keys import KeysFile
from tests.support.raw_http import connection_to, read_answer, read_to_end, request

SHORT_S = 0.3
MAX_BYTES = 20_000


@pytest.mark.parametrize("sent", [b"", b"x"])
@pytest.mark.parametrize("head", ["GET /health", "POST /health", "POST /nothing", "HEAD /version"])
async def test_a_connection_closes_behind_an_answer_to_a_body_that_nobody_reads(scheduler, head, sent):
    async with running_gateway(scheduler, slow_sender_timeout=SHORT_S) as gateway:
        with await connection_to(gateway) as connection:
            connection.sendall(request(head, {"content-length": "9"}))
            answer = await read_answer(connection, has_body=not head.startswith("HEAD"))
            assert answer.headers["connection"] == "close"
            connection.sendall(sent)
            assert await read_to_end(connection) == b""


@pytest.mark.parametrize("framing", [{"content-length": "100"}, {"transfer-encoding": "chunked"}])
async def test_a_caller_without_a_key_who_sends_half_a_body_is_answered_and_cut_off(scheduler, tmp_path, framing):
    keys = KeysFile(tmp_path / "keys.json").path
    async with running_gateway(scheduler, slow_sender_timeout=SHORT_S, keys_files=(keys,)) as gateway:
        with await connection_to(gateway) as connection:
            connection.sendall(request("POST /v1/completions", framing) + b"5\r\nxx")
            answer = await read_answer(connection)
            assert (answer.status, answer.headers["connection"]) == (401, "close")
            assert await read_to_end(connection) == b""


async def test_a_body_that_nobody_reads_is_taken_in_for_a_while_so_that_its_sender_gets_the_answer(scheduler, tmp_path):
    keys = KeysFile(tmp_path / "keys.json").path
    async with running_gateway(scheduler, keys_files=(keys,)) as gateway:
        for _ in range(3):
            answer = await gateway.http.post("/v1/completions", content=b" " * 3_000_000)
            assert (answer.status_code, answer.headers["connection"]) == (401, "close")


async def test_a_body_that_comes_byte_by_byte_has_no_longer_than_one_that_stops(scheduler):
    async with running_gateway(scheduler, slow_sender_timeout=SHORT_S) as gateway:
        with await connection_to(gateway) as connection:
            connection.sendall(request("POST /v1/completions", {"content-length": "100000"}))
            answering = asyncio.ensure_future(read_answer(connection))
            while not answering.done():
                connection.sendall(b" ")
                await asyncio.wait([answering], timeout=SHORT_S / 10)
            assert answering.result().status == 408


async def test_a_body_in_very_many_short_chunks_is_refused_and_other_ones_are_not(scheduler):
    body = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
    async with running_gateway(scheduler) as gateway:
        # Fewer short chunks, and more long ones.
        for chunks in (pieces(body.ljust(8000), 1), pieces(body.ljust(2_700_000), 300)):
            assert (await gateway.http.post("/v1/completions", content=chunks)).status_code == 200
        with await connection_to(gateway) as connection:
            connection.setblocking(True)
            connection.sendall(request("POST /v1/completions", {"transfer-encoding": "chunked"}))
            sending = asyncio.create_task(asyncio.to_thread(send_chunks, connection, 60_000))
            await sending
            connection.setblocking(False)
            answer = await read_to_end(connection)
        assert answer[:12] in (b"", b"HTTP/1.1 400")
        assert not scheduler.live
        assert (await gateway.http.get("/health")).status_code == 200


@pytest.mark.parametrize("behind_an_answer", [False, True])
async def test_what_is_no_http_closes_the_connection_without_a_fault_here(
    scheduler, tmp_path, caplog, behind_an_answer
):
    keys = (KeysFile(tmp_path / "keys.json").path,) if behind_an_answer else ()
    async with running_gateway(scheduler, keys_files=keys) as gateway:
        with await connection_to(gateway) as connection:
            connection.sendall(request("POST /v1/completions", {"transfer-encoding": "chunked"}) + b"1\r\n")
            if behind_an_answer:
                assert (await read_answer(connection)).status == 401
            connection.sendall(b"xyz\r\n")
            assert (await read_to_end(connection))[:12] == (b"" if behind_an_answer else b"HTTP/1.1 400")
    faults = [each.getMessage() for each in caplog.records if each.levelname == "ERROR"]
    # The message of asyncio for an exception in `data_received`.
    assert not [each for each in faults if each.startswith("Fatal error")]


CHUNKED = ("transfer-encoding: chunked",)
SMUGGLED = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.mark.parametrize(
    ("version", "headers", "body"),
    [
        ("1.1", ("content-length: 5", *CHUNKED), b"0\r\n\r\n"),
        ("1.1", (*CHUNKED, "content-length: 0"), b"0\r\n\r\n"),
        ("1.1", (*CHUNKED, *CHUNKED), b"0\r\n\r\n"),
        ("1.1", ("transfer-encoding: gzip, chunked",), b"0\r\n\r\n"),
        ("1.1", ("transfer-encoding: identity",), b""),
        ("1.0", ("connection: keep-alive", *CHUNKED), b"0\r\n\r\n"),
        ("1.1", ("content-length: 0", "content-length: 5"), b""),
        ("1.1", ("content-length: 0, 5",), b""),
        ("1.1", ("content-length: +0",), b""),
        ("1.1", ("content-length : 0",), b""),
        ("1.1", CHUNKED, b"zz\r\n"),
        ("1.1", CHUNKED, b"-1\r\n"),
        ("1.1", CHUNKED, b"0x1\r\nx\r\n0\r\n\r\n"),
        ("1.1", CHUNKED, b"1\r\nxyz0\r\n\r\n"),
        ("1.1", CHUNKED, b"1" * 30 + b"\r\n"),
        ("1.1", CHUNKED, b"2;a\rb\r\n{}\r\n0\r\n\r\n"),
        ("1.1", CHUNKED, b"2;a\nb\r\n{}\r\n0\r\n\r\n"),
        ("1.1", (" folded: first",), b""),
        ("1.1", ("no colon",), b""),
        ("1.1", ("nul: \0",), b""),
    ],
)
async def test_nothing_behind_a_body_of_faulty_length_is_a_request(gateway, version, headers, body):
    head = "\r\n".join((f"POST /v1/completions HTTP/{version}", "host: localhost", *headers, "", ""))
    if headers == (" folded: first",):
        head = head.replace("host: localhost\r\n", "")
    with await connection_to(gateway) as connection:
        connection.sendall(head.encode() + body + SMUGGLED)
        answers = await read_to_end(connection)
    assert answers.startswith(b"HTTP/1.1 400")
    assert b"connection: close" in answers.lower()
    assert answers.count(b"HTTP/1.1 ") == 1
    assert json.loads(answers.partition(b"\r\n\r\n")[2])["error"]["code"] == "malformed_http"


async def pieces(body: bytes, size: int):
    for begin in range(0, len(body), size):
        yield body[begin : begin + size]


def send_chunks(connection: socket.socket, num_chunks: int) -> None:
    """Sends chunks and blocks until all are sent or the other side refuses more."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        for _ in range(num_chunks // 1000):
            connection.sendall(b"1\r\n \r\n" * 1000)


async def test_of_too_many_bodies_the_one_that_has_come_for_longest_is_refused_and_a_quick_one_is_served(scheduler):
    body = json.dumps({"prompt": "hello", "max_tokens": 2}).encode().ljust(MAX_BYTES // 2)
    limits: dict[str, Any] = {"max_message_bytes": MAX_BYTES, "max_total_body_bytes": 2 * MAX_BYTES}
    async with running_gateway(scheduler, **limits) as gateway:
        slow = [await connection_to(gateway) for _ in range(3)]
        try:
            head = request("POST /v1/completions", {"content-length": str(MAX_BYTES)})
            for connection in slow:
                connection.sendall(head + b" " * (MAX_BYTES - 1))
            # Two of the bodies fill the memory, so the first one is refused for the third.
            refused = await read_answer(slow[0])
            assert (refused.status, refused.headers["retry-after"], refused.headers["connection"]) == (
                429,
                "1",
                "close",
            )
            assert refused.error["code"] == "bodies_full"
            assert shown_bytes(2 * MAX_BYTES) in refused.error["message"]
            answers = [await gateway.http.post("/v1/completions", content=body) for _ in range(4)]
            assert [answer.status_code for answer in answers] == [200] * 4
        finally:
            for connection in slow:
                connection.close()


async def test_bodies_of_requests_that_run_count_until_they_are_over(scheduler):
    scheduler.emits.clear()
    body = json.dumps({"prompt": "hello", "max_tokens": 2}).encode().ljust(MAX_BYTES)
    async with running_gateway(scheduler, max_message_bytes=MAX_BYTES, max_total_body_bytes=MAX_BYTES) as gateway:
        running = asyncio.create_task(gateway.http.post("/v1/completions", content=body))
        await scheduler.until(lambda: scheduler.live)
        refused = await gateway.http.post("/v1/completions", content=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "bodies_full")
        scheduler.emits.set()
        assert (await running).status_code == 200
        assert (await gateway.http.post("/v1/completions", content=body)).status_code == 200
