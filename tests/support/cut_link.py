"""A TCP port in front of a service, which can be cut as if its machine died."""

import asyncio
import contextlib

_CHUNK_BYTES = 64 * 1024


class CutLink:
    """Passes bytes on in both directions until it is cut: then its connections are reset and its port is closed."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._is_cut = False
        self.address = ""

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def cut(self) -> None:
        """Cuts the link for good. May be called again."""
        assert self._server is not None
        self._is_cut = True
        self._server.close()
        self.reset()

    def reset(self) -> None:
        """Resets its connections; new ones are passed on as before."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await self._connect()
        self._writers |= {writer, back}
        if self._is_cut:
            self.cut()
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._target.startswith("unix:"):
            return await asyncio.open_unix_connection(self._target.removeprefix("unix:"))
        host, _, port = self._target.rpartition(":")
        return await asyncio.open_connection(host, int(port))

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(_CHUNK_BYTES):
                writer.write(data)
                await writer.drain()
