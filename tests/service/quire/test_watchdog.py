"""The watchdog and a supervised process that serves gRPC health, and then does not."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.local import process
from quire.local.process import HangLimits, RestartBackoff, ServiceSpec, SupervisedProcess, watch
from tests.support.processes import until_true

LIMITS = HangLimits(hang_timeout_s=0.9, start_timeout_s=300.0)
# Says "up" when it listens. Where it is told to stop itself, it never answers.
SERVICE = """
import asyncio, os, signal, sys
from quire.rpc.server import RpcServer
async def serve():
    server = await RpcServer.start(sys.argv[1], lambda _: None, [])
    server.set_serving(sys.argv[2] == "serving")
    print("up", flush=True)
    if sys.argv[2] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    await asyncio.Event().wait()
asyncio.run(serve())
"""
DOES_NOT_LISTEN = "import signal; print('up', flush=True); signal.pause()"
KILLED = "thing answers no health check for 0.9 s; killing it"


class Watched:
    """A service under supervision and watch."""

    def __init__(self, directory: Path, code: str, state: str, limits: HangLimits) -> None:
        socket = directory / "s"
        command = [sys.executable, "-c", code, f"unix:{socket}", state]
        self.reports: list[str] = []
        self.output: list[str] = []
        spec = ServiceSpec("thing", lambda: command, dict(os.environ), self.output.append)
        self.process = SupervisedProcess(spec, report=lambda line: None, backoff=RestartBackoff(first_s=0.01))
        self.tasks = [
            self.process.start(),
            asyncio.create_task(watch(self.process, socket, limits, self.reports.append)),
        ]

    async def start(self) -> None:
        """Returns when the service that runs now listens."""
        await until_true(lambda: "up" in self.output, timeout_s=20)

    async def stop(self) -> None:
        self.tasks[1].cancel()
        await self.process.stop(0)
        await asyncio.gather(*self.tasks, return_exceptions=True)


@pytest.fixture
async def make_watched(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator:
    made: list[Watched] = []

    def make(state: str, *, code: str = SERVICE, limits: HangLimits = LIMITS) -> Watched:
        made.append(Watched(tmp_path_factory.mktemp("w"), code, state, limits))
        return made[-1]

    yield make
    for watched in made:
        await watched.stop()


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each check of the watch found so far."""
    found: list[bool] = []
    check = process._answers

    async def check_and_note(stub: object, timeout_s: float) -> bool:
        found.append(await check(stub, timeout_s))
        return found[-1]

    monkeypatch.setattr(process, "_answers", check_and_note)
    return found


@pytest.mark.parametrize("state", ["serving", "loading"])
async def test_a_service_that_hangs_is_killed_and_started_again(make_watched, state: str) -> None:
    watched = make_watched(state)
    await watched.start()
    assert watched.process.starts == 1
    watched.output.clear()
    os.kill(watched.process.pid, signal.SIGSTOP)
    await until_true(lambda: watched.process.starts == 2)
    assert watched.reports == [KILLED]
    await watched.start()
    assert watched.process.starts == 2


async def test_a_service_that_hangs_before_any_check_was_answered_is_killed(make_watched) -> None:
    watched = make_watched("stopped")
    await watched.start()
    await until_true(lambda: watched.process.starts == 2)
    assert watched.reports == [KILLED]
    # The next one hangs as early.
    await until_true(lambda: watched.process.starts == 3, timeout_s=20)
    assert watched.reports == [KILLED, KILLED]


async def test_a_service_that_does_not_listen_yet_is_left_alone(make_watched, checks: list[bool]) -> None:
    watched = make_watched("", code=DOES_NOT_LISTEN)
    await watched.start()
    await until_true(lambda: len(checks) > 6)
    assert watched.process.starts == 1
    assert watched.reports == []


async def test_a_service_that_never_listens_is_killed_at_the_start_limit(make_watched) -> None:
    watched = make_watched("", code=DOES_NOT_LISTEN, limits=HangLimits(hang_timeout_s=0.9, start_timeout_s=1.5))
    await until_true(lambda: watched.process.starts == 2)
    assert watched.reports == ["thing does not listen after 1.5 s; killing it"]


async def test_a_service_that_is_between_two_starts_is_not_silent(make_watched, checks: list[bool]) -> None:
    watched = make_watched("serving")
    await watched.start()
    watched.process._backoff = RestartBackoff(first_s=300.0)
    os.kill(watched.process.pid, signal.SIGKILL)
    await until_true(lambda: not watched.process.is_running)
    checks.clear()
    await until_true(lambda: len(checks) > 6)
    assert watched.reports == []


async def test_a_pause_that_is_short_enough_is_forgiven(make_watched, checks: list[bool]) -> None:
    watched = make_watched("serving", limits=HangLimits(hang_timeout_s=1.8, start_timeout_s=300.0))
    await until_true(lambda: True in checks, timeout_s=20)
    pid = watched.process.pid
    os.kill(pid, signal.SIGSTOP)
    checks.clear()
    await until_true(lambda: False in checks)
    os.kill(pid, signal.SIGCONT)
    checks.clear()
    await until_true(lambda: len(checks) > 4)
    assert watched.process.pid == pid
    assert watched.reports == []
