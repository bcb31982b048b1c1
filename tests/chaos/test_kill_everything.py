"""kill -9 of every process at once, the supervisor included: durable streams go on once the server runs again."""

import asyncio
import contextlib
import signal
import sys
from collections.abc import AsyncIterator
from os import kill
from pathlib import Path

import pytest

from quire.client import AsyncClient, RetryPolicy
from tests.support.killing import Outputs, Streams, until_hit
from tests.support.ports import free_port
from tests.support.processes import is_alive, until_true

pytestmark = pytest.mark.extended

PROGRAM = "import sys; from quire_cli.main import main; sys.exit(main(['serve', *sys.argv[1:]]))"
FLAGS = ["--dtype=float32", "--num-threads=1", "--num-gpu-blocks=512", "--log-level=warning", "--drain-timeout=1"]


class Server:
    """`quire serve` on a port that stays the same."""

    def __init__(self, port: int) -> None:
        self._flags = [*FLAGS, f"--grpc-port={port}", "--http-port=0"]

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", PROGRAM, *self._flags, stdout=asyncio.subprocess.PIPE
        )
        assert self._process.stdout is not None
        async with asyncio.timeout(120):
            assert (await self._process.stdout.readline()).startswith(b"quire: ready")

    async def kill(self) -> None:
        pids = [self._process.pid, *_descendants(self._process.pid)]
        assert len(pids) >= 4, "supervisor, worker, scheduler and gateway"
        for pid in pids:
            kill(pid, signal.SIGKILL)
        await self._process.wait()
        await until_true(lambda: not any(map(is_alive, pids)), timeout_s=60)

    async def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()
        await self._process.wait()


def _descendants(pid: int) -> list[int]:
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, children.read_text().split()):
            found += [child, *_descendants(child)]
    return found


@contextlib.asynccontextmanager
async def served() -> AsyncIterator[tuple[Server, AsyncClient]]:
    port = free_port()
    server = Server(port)
    await server.start()
    try:
        async with AsyncClient(f"127.0.0.1:{port}", retry=RetryPolicy(resume_for_s=120)) as client:
            yield server, client
    finally:
        await server.stop()


async def test_durable_streams_outlive_every_process() -> None:
    async with served() as (server, client):
        undisturbed = await Streams(durable=True).read(client)

        async def disturbed() -> Outputs:
            streams = Streams(durable=True)
            reading = asyncio.create_task(streams.read(client))
            try:
                await streams.advance()
                await server.kill()
                await server.start()
                return await asyncio.wait_for(reading, timeout=180)
            finally:
                reading.cancel()

        assert await until_hit(disturbed) == undisturbed
