"""A gateway in a process of its own, in which the turns of its event loop are measured.

Turns are measured by the processor time of single callbacks, so that a busy machine makes no difference.
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
    """The gateway's addresses, and the turns of its loop."""

    grpc_address: str
    http_url: str
    process: asyncio.subprocess.Process

    async def longest_turns_ms(self) -> dict[str, float]:
        """The longest turn of each kind since the last call."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(b"\n")
        return json.loads(await self.process.stdout.readline())

    async def assert_short_turns(self, name: str, call: Callable[[], Awaitable[object]], longest_ms: float) -> None:
        """Checks that the call succeeds in each try, and that no kind of turn is too long in all tries: the call's cost
        shows in every try, and other load on the machine only in some."""
        tries: list[dict[str, float]] = []
        long: list[str] = []
        await self.longest_turns_ms()
        for _ in range(_NUM_TRIES):
            await call()
            tries.append(await self.longest_turns_ms())
            long = [kind for kind in tries[0] if all(each.get(kind, 0.0) >= longest_ms for each in tries)]
            if not long:
                return
        raise AssertionError(f"{name}: in {_NUM_TRIES} tries {long} took {[max(each.values()) for each in tries]} ms")

    def peak_memory_mib(self) -> int:
        """The peak memory of the process."""
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
        await gateway.longest_turns_ms()
        yield gateway
    finally:
        process.kill()
        await process.wait()


class _Turns:
    """The longest callbacks of the main thread's event loop, of each kind."""

    def __init__(self) -> None:
        self.longest: dict[str, float] = {}
        self._main = threading.get_ident()

    def install(self) -> None:
        run = asyncio.Handle._run

        def measured(handle: asyncio.Handle) -> None:
            kind = _kind_of(handle)
            began = time.thread_time()
            run(handle)
            if threading.get_ident() == self._main:
                self.longest[kind] = max(time.thread_time() - began, self.longest.get(kind, 0.0))

        setattr(asyncio.Handle, "_run", measured)  # noqa: B010 (its types forbid an assignment)

    def report_on_demand(self) -> None:
        """Answers each line of stdin."""
        for _ in sys.stdin:
            longest, self.longest = self.longest, {}
            print(json.dumps({kind: 1000 * seconds for kind, seconds in longest.items()}), flush=True)


def _kind_of(handle: asyncio.Handle) -> str:
    callback = handle._callback
    task = getattr(callback, "__self__", None)
    does = task.get_coro() if isinstance(task, asyncio.Task) else getattr(callback, "func", callback)
    return getattr(does, "__qualname__", type(does).__name__)


if __name__ == "__main__":
    arguments = json.loads(sys.argv[1])
    turns = _Turns()
    turns.install()
    threading.Thread(target=turns.report_on_demand, daemon=True).start()
    asyncio.run(serve(GatewaySettings(**arguments | {"schedulers": tuple(arguments["schedulers"])})))
