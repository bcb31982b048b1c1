"""The watchdog and a supervised process that serves gRPC health, and then does not."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from quire.local import watchdog
from quire.local.backoff import RestartBackoff
from quire.local.supervised_process import ServiceSpec, SupervisedProcess
from quire.local.watchdog import watch
from tests.support.processes import until_true

HANG_TIMEOUT_S = 0.9
SERVICE = """
import asyncio, sys
from quire.rpc.server import RpcServer
async def serve():
    server = await RpcServer.start(sys.argv[1], lambda _: None, [])
    server.set_serving(sys.argv[2] == "serving")
    print("up", flush=True)
    await asyncio.Event().wait()
asyncio.run(serve())
"""


class Watched:
    """A service under supervision and watch; `state` is "serving" or "loading"."""

    def __init__(self, directory: Path, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
        address = f"unix:{directory / 's'}"
        command = [sys.executable, "-c", SERVICE, address, state]
        self.reports: list[str] = []
        self.output: list[str] = []
        self._state = getattr(health_pb2.HealthCheckResponse, "SERVING" if state == "serving" else "NOT_SERVING")
        self._seen_start = 0
        self._check = watchdog._check
        monkeypatch.setattr(watchdog, "_check", self._check_and_note)
        spec = ServiceSpec("thing", lambda: command, dict(os.environ), self.output.append)
        self.process = SupervisedProcess(spec, report=lambda line: None, backoff=RestartBackoff(first_s=0.01))
        self.tasks = [
            self.process.start(),
            asyncio.create_task(watch(self.process, address, HANG_TIMEOUT_S, self.reports.append)),
        ]

    async def start(self) -> None:
        """Returns when the watch was told the state of the service that runs now."""
        await until_true(lambda: "up" in self.output, timeout_s=20)
        await until_true(lambda: self._seen_start == self.process.starts)

    async def _check_and_note(self, stub: Any, timeout_s: float) -> int | None:
        start = self.process.starts
        status = await self._check(stub, timeout_s)
        if status == self._state:
            self._seen_start = start
        return status

    async def stop(self) -> None:
        self.tasks[1].cancel()
        await self.process.stop(0)
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def make_watched(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator:
    made: list[Watched] = []

    def make(state: str) -> Watched:
        made.append(Watched(tmp_path_factory.mktemp("w"), state, monkeypatch))
        return made[-1]

    yield make
    for watched in made:
        await watched.stop()


async def test_a_service_that_hangs_is_killed_and_started_again(make_watched) -> None:
    watched = make_watched("serving")
    await watched.start()
    assert watched.process.starts == 1
    watched.output.clear()
    os.kill(watched.process.pid, signal.SIGSTOP)
    await until_true(lambda: watched.process.starts == 2)
    assert watched.reports == ["thing answers no health check for 0.9 s; killing it"]
    await watched.start()
    assert watched.process.starts == 2


async def test_a_service_that_has_not_served_yet_is_left_alone(make_watched) -> None:
    watched = make_watched("loading")
    await watched.start()
    os.kill(watched.process.pid, signal.SIGSTOP)
    await asyncio.sleep(2 * HANG_TIMEOUT_S)
    assert watched.process.starts == 1
    assert watched.reports == []


async def test_a_pause_that_is_short_enough_is_forgiven(make_watched) -> None:
    watched = make_watched("serving")
    await watched.start()
    pid = watched.process.pid
    os.kill(pid, signal.SIGSTOP)
    await asyncio.sleep(HANG_TIMEOUT_S / 3)
    os.kill(pid, signal.SIGCONT)
    await asyncio.sleep(2 * HANG_TIMEOUT_S)
    assert watched.process.pid == pid
    assert watched.reports == []
