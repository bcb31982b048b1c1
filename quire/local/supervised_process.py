"""One child process that is started again whenever it dies."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.local.backoff import RestartBackoff
from quire.rpc.process import CONFIGURATION_EXIT_STATUS
from quire.settings import ConfigurationError

_LAUNCHER = str(Path(__file__).with_name("launch.py"))


class ServiceRefused(ConfigurationError):  # noqa: N818
    """A child ended with status 2. It has told the reason on stderr itself."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What to run.

    Attributes:
        name: For messages and `LocalServer.process`.
        command: Makes the command line, anew for each start; its first word is an absolute path.
        environ: The child's environment.
        on_output: Takes each line of the child's stdout; where absent, stdout goes to our stderr.
    """

    name: str
    command: Callable[[], list[str]]
    environ: Mapping[str, str]
    on_output: Callable[[str], None] | None = None


class SupervisedProcess:
    """Keeps one service running until it is stopped, or until it refuses its configuration."""

    def __init__(self, spec: ServiceSpec, *, report: Callable[[str], None], backoff: RestartBackoff) -> None:
        self.name = spec.name
        self.starts = 0
        self._spec = spec
        self._report = report
        self._backoff = backoff
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id now; RuntimeError while it does not run."""
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process.pid

    def start(self) -> asyncio.Task[None]:
        """Starts it. The task ends when the service is stopped; ServiceRefused when it exits with status 2."""
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")
        return self._task

    async def stop(self, grace_s: float) -> None:
        """Asks it to end by SIGTERM, and kills it after `grace_s` seconds. Idempotent."""
        self._stopping.set()
        if self._task is None:
            return
        self._signal(signal.SIGTERM)
        await asyncio.wait([self._task], timeout=grace_s)
        self.kill()
        await asyncio.wait([self._task])

    def kill(self) -> None:
        """Kills it and all that it started, at once and for good."""
        self._stopping.set()
        if self._process is not None:
            # Its session is its own, so its process group has its pid.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _supervise(self) -> None:
        while not self._stopping.is_set():
            started_at = time.monotonic()
            status = await self._run_once()
            if self._stopping.is_set():
                return
            if status == CONFIGURATION_EXIT_STATUS:
                raise ServiceRefused(f"the {self.name} refused its configuration")
            delay_s = self._backoff.delay_s(time.monotonic() - started_at)
            self._report(f"{self.name} {_describe(status)}; starting it again in {delay_s:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _run_once(self) -> int:
        """Starts the process, waits for its end, returns its status."""
        on_output = self._spec.on_output
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid())),
            *self._spec.command(),
            stdin=asyncio.subprocess.DEVNULL,
            # A pipe where someone reads; else our stderr, since our stdout is for the ready line alone.
            stdout=asyncio.subprocess.PIPE if on_output else 2,
            env=self._spec.environ,
            # Its own session: Ctrl-C in the terminal reaches the supervisor alone, which then stops all in order.
            start_new_session=True,
        )
        self._process = process
        self.starts += 1
        try:
            if self._stopping.is_set():
                self._signal(signal.SIGTERM)
            if process.stdout is not None and on_output is not None:
                await _read_lines(process.stdout, on_output)
            return await process.wait()
        except BaseException:
            self.kill()
            await process.wait()
            raise
        finally:
            self._process = None


async def _read_lines(stdout: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    while True:
        try:
            line = await stdout.readline()
        except ValueError:  # longer than the reader's buffer: not a line for us
            continue
        if not line:
            return
        on_line(line.decode(errors="replace").rstrip("\n"))


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
