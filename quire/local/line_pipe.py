"""A pipe into which a child process writes lines."""

import asyncio
import os
from collections.abc import Callable
from typing import Self


class LinePipe:
    """Reads in a task of its own until all who hold the other end are gone.

    Not asyncio's pipes of a subprocess, since asyncio tells of the end of a process only when its pipes are closed too,
    and what a process has started may hold them open for ever.
    """

    def __init__(self, write_end: int, transport: asyncio.ReadTransport, reading: asyncio.Task[None]) -> None:
        self.write_end = write_end
        self._transport = transport
        self._reading = reading

    @classmethod
    async def open(cls, on_line: Callable[[str], None]) -> Self:
        """`on_line` takes each line without its end; bytes that are not UTF-8 are replaced."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(read_end, "rb", buffering=0)
        )
        return cls(write_end, transport, asyncio.create_task(_read_lines(reader, on_line)))

    def close_write_end(self) -> None:
        """Closes our own copy of the other end, once the child has its copy, or will never have one."""
        os.close(self.write_end)

    async def finish(self, grace_s: float) -> None:
        """Reads what is still on its way, for at most `grace_s` seconds, and closes the pipe."""
        await asyncio.wait([self._reading], timeout=grace_s)
        self._reading.cancel()
        self._transport.close()


async def _read_lines(reader: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    while True:
        try:
            line = await reader.readline()
        except ValueError:  # longer than the reader's buffer: not a line for us
            continue
        if not line:
            return
        on_line(line.decode(errors="replace").rstrip("\n"))
