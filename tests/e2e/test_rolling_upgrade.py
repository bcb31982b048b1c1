"""Services of another release replace running ones, one by one: streams wait where they must, and none is lost."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import httpx
import pytest

from quire.client import GenerationOptions
from quire_cli.supervisor.commands import Programs
from tests.support.killing import TooLateError, until_hit
from tests.support.scheduler_process import until
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended

NAMES = ("worker", "scheduler", "gateway")
NUM_STREAMS = 4


class Releases:
    """What each service is when it is started next."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        for name in NAMES:
            self.set(name, 1, 1)

    def set(self, name: str, oldest: int, newest: int) -> None:
        (self._directory / name).write_text(f"{oldest} {newest}")

    def programs(self) -> Programs:
        return Programs(*(self._program(name, module) for name, module in zip(NAMES, MODULES, strict=True)))

    def _program(self, name: str, module: str) -> tuple[str, ...]:
        return (sys.executable, "-P", "-m", "tests.support.versioned_service", str(self._directory / name), module)


MODULES = ("worker_svc", "scheduler_svc", "gateway")


async def renew(served: Served, name: str) -> None:
    """Returns when the next one was started."""
    process = served.server.process(name)
    starts = process.starts
    os.kill(process.pid, signal.SIGTERM)
    # Of one that stands still.
    os.kill(process.pid, signal.SIGCONT)

    async def started_again() -> bool:
        return process.starts > starts

    await until(started_again)


async def read(served: Served, index: int, started: asyncio.Event) -> list[int]:
    options = GenerationOptions(temperature=float(index % 2), seed=index, max_tokens=400, ignore_eos=True)
    token_ids: list[int] = []
    async with served.client.generate_stream(f"Once upon a time, story {index}", options) as stream:
        async for event in stream:
            token_ids += getattr(event, "token_ids", ())
            if len(token_ids) > 20:
                started.set()
    return token_ids


async def read_all(served: Served, started: asyncio.Event) -> list[list[int]]:
    return await asyncio.gather(*(read(served, index, started) for index in range(NUM_STREAMS)))


async def not_ready_because(served: Served, words: str) -> None:
    async with httpx.AsyncClient(timeout=60) as http:

        async def says() -> bool:
            answer = (await http.get(f"http://{served.server.http_address}/ready")).json()
            return words in answer.get("reason", "")

        await until(says, timeout_s=100)


async def test_services_are_upgraded_one_by_one_and_streams_wait_for_those_that_fit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    releases = Releases(tmp_path)
    settings = {"num_gpu_blocks": 256, "dtype": "float32", "connect_timeout": 120.0, "drain_timeout": 0.0}
    async with serving(programs=releases.programs(), **settings) as served:
        undisturbed = await read_all(served, asyncio.Event())

        async def under_way() -> asyncio.Task[list[list[int]]]:
            """Streams that stand still in their middle, with the worker."""
            started = asyncio.Event()
            reading = asyncio.create_task(read_all(served, started))
            await started.wait()
            os.kill(served.server.process("worker").pid, signal.SIGSTOP)
            if await served.num_live() < NUM_STREAMS:
                os.kill(served.server.process("worker").pid, signal.SIGCONT)
                await reading
                raise TooLateError
            return reading

        upgraded = await until_hit(under_way)
        # A release that speaks the version before, too, fits both.
        releases.set("worker", 1, 2)
        await renew(served, "worker")
        # One that does not is refused, and says so; what runs waits.
        releases.set("scheduler", 2, 2)
        with served.standing_still():
            await renew(served, "scheduler")
        await not_ready_because(served, "speaks version 1 of quire.scheduler.v1, the scheduler version 2")
        assert not upgraded.done()
        releases.set("scheduler", 1, 2)
        await renew(served, "scheduler")
        assert await upgraded == undisturbed
        # Of the new release only.
        releases.set("gateway", 2, 2)
        await renew(served, "gateway")
        await served.server.wait_ready()
        assert await read_all(served, asyncio.Event()) == undisturbed
        said = capfd.readouterr().err
        assert len([line for line in said.splitlines() if "gateway.replicas" in line and "version 2" in line]) == 1
        assert len([line for line in said.splitlines() if "scheduler_svc" in line and "refused: " in line]) == 1
