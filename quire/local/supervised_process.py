"""One child process that is started again whenever it dies."""

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from quire.local.backoff import RestartBackoff
from quire.local.line_pipe import LinePipe
from quire.local.standard_error import tell
from quire.rpc.process import CONFIGURATION_EXIT_STATUS, LOST_PEER_EXIT_STATUS
from quire.settings import ConfigurationError

_LAUNCHER = str(Path(__file__).with_name("launch.py"))
# What `run_service` prints before it exits with status 2.
_REFUSAL = re.compile(r"quire \w+: error: .+")
# Once the process is gone, its pipes have nothing left to say but what is on its way.
_PIPES_GRACE_S = 1.0


class ServiceRefused(ConfigurationError):  # noqa: N818
    """A child ended with status 2. The message is the line it gave as the reason, which it alone is to be told by."""


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """What to run.

    Attributes:
        name: For messages and `LocalServer.process`.
        command: Makes the command line, anew for each start; its first word is an absolute path.
        environ: The child's environment.
        is_proven: Whether this configuration has worked before. Then what a refusal finds wrong has changed since, and
            may change back, so the service is started again.
        on_output: Takes each line of the child's stdout; where absent, stdout goes to our stderr. Its stderr goes to
            our stderr but for the reason of a refusal, which ServiceRefused carries.
    """

    name: str
    command: Callable[[], list[str]]
    environ: Mapping[str, str]
    on_output: Callable[[str], None] | None = None
    is_proven: Callable[[], bool] = lambda: False


class SupervisedProcess:
    """Keeps one service running until it is stopped, or until it refuses a configuration that never worked."""

    def __init__(self, spec: ServiceSpec, *, report: Callable[[str], None], backoff: RestartBackoff) -> None:
        self.name = spec.name
        self.starts = 0
        self._spec = spec
        self._report = report
        self._backoff = backoff
        self._process: asyncio.subprocess.Process | None = None
        self._refusals: list[str] = []
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        """The process id now; RuntimeError while it does not run."""
        if self._process is None:
            raise RuntimeError(f"{self.name} does not run")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """False before the first start, and between a death and the next start."""
        return self._process is not None

    def start(self) -> asyncio.Task[None]:
        """Starts it. The task ends when the service is stopped, with ServiceRefused where it refuses for good."""
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
        self.kill_once()

    def kill_once(self) -> None:
        """Kills it and all that it started, so that it is started again."""
        if self._process is not None:
            _kill_group(self._process.pid)

    def _signal(self, number: signal.Signals) -> None:
        # Not Process.send_signal, which reaps a process that has just ended and so takes its status from asyncio.
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, number)

    async def _supervise(self) -> None:
        while not self._stopping.is_set():
            started_at = time.monotonic()
            status = await self._run_once()
            if self._stopping.is_set():
                return
            if status == CONFIGURATION_EXIT_STATUS and not self._spec.is_proven():
                reasons = self._refusals or [f"quire {self.name}: error: it refused its configuration"]
                raise ServiceRefused(reasons[-1])
            for line in self._refusals:
                tell(line)
            # A service that was told to end, by an operator or to renew it, ends with status 0.
            is_to_blame = status not in (0, LOST_PEER_EXIT_STATUS)
            delay_s = self._backoff.delay_s(time.monotonic() - started_at, died=is_to_blame)
            self._report(f"{self.name} {_describe(status)}; starting it again in {delay_s:g} s")
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), delay_s)

    async def _run_once(self) -> int:
        """Starts the process, waits for its end, returns its status."""
        self._refusals = []
        pipes = [await LinePipe.open(self._read_error_line)]
        if self._spec.on_output:
            pipes.append(await LinePipe.open(self._spec.on_output))
        try:
            process = await self._spawn(pipes)
            try:
                return await process.wait()
            except BaseException:
                self.kill()
                await process.wait()
                raise
            finally:
                self._process = None
                # What it started must not outlive it.
                _kill_group(process.pid)
        finally:
            for pipe in pipes:
                await pipe.finish(_PIPES_GRACE_S)

    async def _spawn(self, pipes: Sequence[LinePipe]) -> asyncio.subprocess.Process:
        """The first pipe is for its stderr, the second, if any, for its stdout."""
        try:
            self._process = process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-I", "-S", _LAUNCHER, str(os.getpid())),
                *self._spec.command(),
                stdin=asyncio.subprocess.DEVNULL,
                # A pipe where someone reads; else our stderr, since our stdout is for the ready line alone.
                stdout=pipes[1].write_end if len(pipes) > 1 else 2,
                stderr=pipes[0].write_end,
                env=self._spec.environ,
                # Its own group: Ctrl-C in the terminal reaches the supervisor alone, which then stops all in order. Not
                # its own session: Linux weighs sessions against each other, and niceness would count within each only.
                process_group=0,
            )
        finally:
            for pipe in pipes:
                pipe.close_write_end()
        self.starts += 1
        if self._stopping.is_set():
            self._signal(signal.SIGTERM)
        return process

    def _read_error_line(self, line: str) -> None:
        if _REFUSAL.fullmatch(line):
            self._refusals.append(line)
        else:
            tell(line)


def _kill_group(pid: int) -> None:
    # The process group of each process is its own, and so has its pid.
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"
