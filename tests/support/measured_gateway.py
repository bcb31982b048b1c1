"""A gateway in a process of its own, in which the turns of its event loop are measured.

What is measured is the processor time of single callbacks, so that a busy machine makes no difference.
"""

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gateway.app import serve
from gateway.settings import GatewaySettings
from tests.support.fake_scheduler import FakeScheduler

_NUM_TRIES = 5


@dataclass
class MeasuredGateway:
    """The gateway's addresses, and what its loop did."""

    grpc_address: str
    http_url: str
    process: asyncio.subprocess.Process

    async def longest_turn_ms(self) -> tuple[float, str]:
        """The longest turn since this was asked before, and what had it."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        async with asyncio.timeout(30):
            milliseconds, name = json.loads(await self.process.stdout.readline())
        return milliseconds, name

    async def assert_short_turns(self, name: str, call: Callable[[], Awaitable[object]], longest_ms: float) -> None:
        """The call succeeds in each try, and in one of them no turn takes longer: what a call costs shows in each try,
        and what else the machine does in some."""
        turns: list[tuple[float, str]] = []
        await self.longest_turn_ms()
        for _ in range(_NUM_TRIES):
            await asyncio.wait_for(call(), 60)
            turns.append(await self.longest_turn_ms())
            if turns[-1][0] < longest_ms:
                return
        raise AssertionError(f"{name}: the longest turns of {_NUM_TRIES} tries took {turns}")

    def peak_memory_mib(self) -> int:
        """The most memory that the process has had at once."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) >> 10


@contextlib.asynccontextmanager
async def measured_gateway(scheduler: FakeScheduler, **settings: Any) -> AsyncIterator[MeasuredGateway]:
    """Runs a gateway, connected to the scheduler, until the block ends."""
    values = {"grpc_port": 0, "http_port": 0, "schedulers": (scheduler.address,), "drain_timeout": 0.0} | settings
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tests.support.measured_gateway",
        json.dumps(values),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(60):
            line = (await process.stdout.readline()).decode()
            await scheduler.until_known()
        addresses = dict(word.split("=") for word in line.split() if "=" in word)
        gateway = MeasuredGateway(addresses["grpc"], f"http://{addresses['http']}", process)
        await gateway.longest_turn_ms()
        yield gateway
    finally:
        process.kill()
        await process.wait()


class _Turns:
    """The longest callback of the main thread's event loop."""

    def __init__(self) -> None:
        self.longest: tuple[float, str] = (0.0, "")
        self._main = threading.get_ident()

    def install(self) -> None:
        run = asyncio.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            name = _name_of(handle)
            began = time.thread_time()
            run(handle)
            if (seconds := time.thread_time() - began) > self.longest[0] and threading.get_ident() == self._main:
                self.longest = seconds, name

        setattr(asyncio.Handle, "_run", measured)  # noqa: B010 (nobody else may, say its types)

    def report_on_demand(self) -> None:
        """Answers each line of stdin."""
        for _ in sys.stdin:
            (seconds, name), self.longest = self.longest, (0.0, "")
            print(json.dumps([seconds * 1000, name]), flush=True)


def _name_of(handle: asyncio.Handle) -> str:
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    return repr(task.get_coro()) if isinstance(task, asyncio.Task) else repr(callback)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    turns = _Turns()
    turns.install()
    threading.Thread(target=turns.report_on_demand, daemon=True).start()
    asyncio.run(serve(GatewaySettings(**arguments | {"schedulers": tuple(arguments["schedulers"])})))
