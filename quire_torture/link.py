"""A TCP port or unix socket in front of another one, whose connections can be cut, held, delayed and slowed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path

_CHUNK_BYTES = 64 * 1024


class Link:
    """Passes bytes on in both directions, in a way that can be changed at any time.

    Attributes:
        address: HOST:PORT or unix:PATH, once it listens.
        delay_s: Delay of each piece of data.
        bytes_per_s: Maximum speed of each direction; None is unlimited.
        num_touched: Pieces of data that were held, delayed or slowed, which shows that there was traffic.
    """

    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self._server: asyncio.Server | None = None
        self._accepts = True
        self.address = ""
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.num_touched = 0

    @contextlib.asynccontextmanager
    async def listening(self, path: Path | None = None) -> AsyncIterator["Link"]:
        await self.start(path)
        try:
            yield self
        finally:
            self.let_pass()
            self.close()

    async def start(self, path: Path | None = None) -> None:
        """Listens at a unix socket, or at a free port."""
        if path is None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        else:
            server = await asyncio.start_unix_server(self._serve, path)
            self.address = f"unix:{path}"
        self._server = server

    def close(self) -> None:
        """Cuts the link for good, as if the machine behind it died. May be called again."""
        assert self._server is not None, "it does not listen"
        self._accepts = False
        self._server.close()
        self.reset()

    def reset(self) -> int:
        """Resets its connections; new ones are passed on as before. Returns the number of open sockets."""
        count = len(self._open)
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()
        return count

    def hold(self) -> None:
        """No byte passes from now on, and neither side is notified."""
        self._passes.clear()

    def let_pass(self) -> None:
        self._passes.set()
        self.delay_s, self.bytes_per_s = 0.0, None

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await _connect(self._target())
        except (OSError, LookupError):
            writer.transport.abort()
            return
        ends = {writer, back}
        self._open |= ends
        if not self._accepts:
            self.reset()
        # asyncio prints a traceback if the task is cancelled, as at the end of the event loop.
        with contextlib.suppress(OSError, asyncio.CancelledError):
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))
        self._open -= ends

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(_CHUNK_BYTES):
                wait_s = self.delay_s + (len(data) / self.bytes_per_s if self.bytes_per_s else 0.0)
                self.num_touched += bool(wait_s) or not self._passes.is_set()
                await self._passes.wait()
                if wait_s:
                    await asyncio.sleep(wait_s)
                writer.write(data)
                await writer.drain()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host.strip("[]"), int(port))
