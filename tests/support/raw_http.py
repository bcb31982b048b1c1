"""HTTP over a bare socket, for clients that behave like no library."""

import asyncio
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tests.support.gateway_process import RunningGateway


@dataclass(frozen=True)
class RawAnswer:
    """One answer. Header names are in lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def error(self) -> dict[str, Any]:
        return json.loads(self.body)["error"]


def request(head: str, headers: Mapping[str, str] | None = None, body: bytes = b"") -> bytes:
    """A request of HTTP/1.1 by its method and path; its body has no length unless the headers say one."""
    lines = [f"{head} HTTP/1.1"]
    lines += [f"{name}: {value}" for name, value in ({"host": "localhost"} | dict(headers or {})).items()]
    return "\r\n".join((*lines, "", "")).encode() + body


async def connection_to(gateway: RunningGateway, address: str | None = None) -> socket.socket:
    """A non-blocking connection to the HTTP port, or to another address."""
    host, _, port = (address or gateway.gateway.http_address).rpartition(":")
    connection = socket.socket()
    connection.setblocking(False)
    await asyncio.get_running_loop().sock_connect(connection, (host, int(port)))
    return connection


async def read_answer(connection: socket.socket, *, has_body: bool = True) -> RawAnswer:
    """The next answer, which must have a content-length and come within a minute."""
    async with asyncio.timeout(60):
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += await _received(connection, 1)
        status, *lines = head.decode("latin-1").rstrip().split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        length, body = int(headers["content-length"]) if has_body else 0, b""
        while len(body) < length:
            body += await _received(connection, length - len(body))
    return RawAnswer(int(status.split()[1]), headers, body)


async def read_to_end(connection: socket.socket) -> bytes:
    """Bytes until the other side closes the connection, which must be within a minute."""
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(60):
        try:
            while piece := await loop.sock_recv(connection, 65536):
                data += piece
        except ConnectionResetError:
            pass
    return data


async def _received(connection: socket.socket, num_bytes: int) -> bytes:
    data = await asyncio.get_running_loop().sock_recv(connection, num_bytes)
    assert data, "the connection was closed in the middle of an answer"
    return data
