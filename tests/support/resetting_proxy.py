"""A port whose first connections are reset, as those are that a gateway has not taken yet when it closes its port."""

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass

_RESET = struct.pack("ii", 1, 0)


@dataclass
class ResettingProxy:
    """Counts connections; those that are not reset reach `target`."""

    address: str
    target: str
    num_resets: int
    num_connections: int = 0


@contextlib.asynccontextmanager
async def resetting_proxy(target: str, num_resets: int) -> AsyncIterator[ResettingProxy]:
    """Listens on a free port; `target` is HOST:PORT."""
    proxy = ResettingProxy("", target, num_resets)
    running: set[asyncio.Task[None]] = set()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        running.add(task)
        with contextlib.suppress(ConnectionError, asyncio.CancelledError):
            await _serve(proxy, reader, writer)
        writer.close()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    proxy.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running)


async def _serve(proxy: ResettingProxy, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    proxy.num_connections += 1
    if proxy.num_connections <= proxy.num_resets:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        return
    host, _, port = proxy.target.rpartition(":")
    onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
    try:
        await asyncio.gather(_copy(reader, onward_writer), _copy(onward_reader, writer))
    finally:
        onward_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
