"""Signals that stop services in order, one or all, under load. Tests of the supervisor cover services that hang."""

import asyncio
import os
import signal
from contextlib import suppress

import pytest

from quire.client import AsyncClient, GenerationOptions
from quire.rpc.errors import QuireError
from quire_cli.supervisor import LocalServer, ServeSettings
from tests.support.processes import until_true
from tests.support.serving import forked_programs

OPTIONS = GenerationOptions(max_tokens=100, ignore_eos=True)


async def keep_busy(client: AsyncClient) -> None:
    while True:
        with suppress(QuireError):
            await client.generate("Once upon a time", OPTIONS)
        await asyncio.sleep(0.05)


async def test_ordered_stops_under_load_log_no_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    settings = ServeSettings(
        grpc_port=0, http_port=0, num_gpu_blocks=64, num_threads=1, drain_timeout=0.5, log_level="info"
    )
    async with LocalServer(settings, programs=forked_programs()) as server, AsyncClient(server.grpc_address) as client:
        await server.wait_ready()
        load = [asyncio.create_task(keep_busy(client)) for _ in range(8)]
        for name, number in (("worker", signal.SIGTERM), ("scheduler", signal.SIGINT), ("gateway", signal.SIGTERM)):
            process = server.process(name)
            starts = process.starts
            os.kill(process.pid, number)
            # The next service is stopped while this one begins to listen.
            await until_true(lambda process=process, starts=starts: process.starts > starts, timeout_s=60)
        await server.wait_ready()
        # All services, in the middle of requests.
        await server.stop()
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    said = capfd.readouterr().err
    assert "worker ended with status 0" in said
    assert "Traceback" not in said
