"""One child process that is restarted whenever it dies."""

import asyncio
import errno
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from quire.rpc.process import CONFIGURATION_EXIT_STATUS, LOST_PEER_EXIT_STATUS, STANDBY
from quire.runtime import clock
from quire.runtime.settings import ConfigurationError
from quire_cli.supervisor.shared_listener import SharedListener

_LAUNCHER = str(Path(__file__).with_name("launch.py"))
# The line that `run_service` prints before it exits with status 2.
_REFUSAL = re.compile(r"quire \w+: error: .+")
# A service that dies at once needs no standby, and the imports of one must not slow down a start.
_STANDBY_AFTER_S = 2.0
# Once the process is gone, only the rest in its pipes is left to read.
_PIPES_GRACE_S = 1.0


class ServiceRefused(ConfigurationError):  # noqa: N818
    """A child ended with status 2. The message is the line that it printed as the reason; print it once, unchanged."""


def print_error(line: str) -> None:
    """Writes a line to stderr; ignores a closed pipe, as after `quire serve 2>&1 | head`."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


class RestartBackoff:
    """Doubles the wait with each death in a row, up to `max_s`. A life of `reset_s`, by default `max_s`, resets it: a
    process that is killed in service comes back at once.

    A process that ended by itself, as services do on SIGTERM or when they lost a peer, did not die: it waits no longer
    than after a first death.
    """

    def __init__(self, *, first_s: float = 0.1, max_s: float = 5.0, reset_s: float | None = None) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._reset_s = max_s if reset_s is None else reset_s
        self._next_s = first_s

    def delay_s(self, lived_s: float, *, died: bool = True) -> float:
        """The wait after a life of `lived_s` seconds."""
        if not died:
            return self._first_s
        if lived_s >= self._reset_s:
            self._next_s = self._first_s
        delay = self._next_s
        self._next_s = min(2 * delay, self._max_s)
        return delay


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """The command of a process and how to check it.

    Attributes:
        name: For messages and `LocalServer.process`.
        command: Makes the command line for each start; its first word is an absolute path.
        environ: The child's environment.
        is_proven: Whether this configuration has worked before. If so, a refusal is due to something that has changed
            since and may change back, so the service is restarted.
        niceness: The niceness of the child in addition to this process's.
        on_output: Takes each line of the child's stdout; if absent, stdout goes to our stderr. Its stderr goes to
            our stderr, except for the reason of a refusal, which ServiceRefused carries.
        listener: Has the socket that the child inherits.
        wants_standby: Whether to make the process of the next start now, which makes its imports and then stands by
            (`quire.rpc.process.stand_by`). None for a program that cannot stand by.
    """

    name: str
    command: Callable[[], list[str]]
    environ: dict[str, str]
    on_output: Callable[[str], None] | None = None
    is_proven: Callable[[], bool] = lambda: False
    niceness: int = 0
    listener: SharedListener | None = None
    wants_standby: Callable[[], bool] | None = None


class SupervisedProcess:
    """Keeps one service running until it is stopped, or until it refuses a configuration that never worked."""

    def __init__(self, spec: ServiceSpec, *, report: Callable[[str], None], backoff: RestartBackoff) -> None:
        self.name = spec.name
        self.starts = 0
        self._spec = spec
        self._report = report
        self._backoff = backoff
        self._process: _Child | None = None
        self._standby: _Life | None = None
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
        """Starts it. The task ends when the service is stopped, with ServiceRefused if it refuses for good."""
        self._task = asyncio.create_task(self._supervise(), name=f"supervise {self.name}")
        return self._task

    async def stop(self, grace_s: float) -> None:
        """Ends it by SIGTERM, and by SIGKILL after `grace_s` seconds. Idempotent."""
        self._stopping.set()
        if self._task is None:
            return
        self.signal(signal.SIGTERM)
        await asyncio.wait([self._task], timeout=grace_s)
        self.kill()
        await asyncio.wait([self._task])

    def kill(self) -> None:
        """Kills it, its standby and all that they started, at once and for good."""
        self._stopping.set()
        self.kill_once()
        if self._standby is not None:
            _kill_group(self._standby.child.pid)

    def kill_once(self) -> None:
        """Kills it and all that it started, so that it is restarted."""
        if self._process is not None:
            _kill_group(self._process.pid)

    def signal(self, number: signal.Signals) -> None:
        """Sends the process a signal, if it runs, and its standby."""
        if self._process is not None:
            self._process.signal(number)
        if self._standby is not None:
            self._standby.child.signal(number)

    async def _supervise(self) -> None:
        try:
            await self._supervise_starts()
        finally:
            if self._standby is not None:
                await self._standby.end()
                self._standby = None

    async def _supervise_starts(self) -> None:
        while not self._stopping.is_set():
            started_at = clock.monotonic()
            try:
                status, refusals = await self._run_once()
            except OSError as error:  # too many open files or processes, or no memory: these are temporary
                delay_s = self._backoff.delay_s(0.0)
                self._report(f"{self.name} cannot be started: {error}; trying again in {delay_s:g} s")
                await self._wait_to_stop(delay_s)
                continue
            if self._stopping.is_set():
                return
            if status == CONFIGURATION_EXIT_STATUS and not self._spec.is_proven():
                reasons = refusals or [f"quire {self.name}: error: it refused its configuration"]
                raise ServiceRefused(reasons[-1])
            for line in refusals:
                print_error(line)
            # A service that an operator ends by SIGTERM, for example to renew it, ends with status 0.
            died = status not in (0, LOST_PEER_EXIT_STATUS)
            delay_s = self._backoff.delay_s(clock.monotonic() - started_at, died=died)
            self._report(f"{self.name} {_describe(status)}; starting it again in {delay_s:g} s")
            await self._wait_to_stop(delay_s)

    async def _wait_to_stop(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), timeout_s)

    async def _run_once(self) -> tuple[int, Sequence[str]]:
        """Starts the process or takes the standby, waits for its end, returns its status and the lines of its refusals.
        If it cannot be started, raises OSError and leaves nothing of it behind."""
        try:
            life = await self._take_standby() or await _Life.begin(self._spec)
            self._process = life.child
            self.starts += 1
            if self._stopping.is_set():
                self.signal(signal.SIGTERM)
            preparing = asyncio.create_task(self._make_standby(), name=f"make a standby of {self.name}")
            try:
                return await life.child.wait(), life.refusals
            finally:
                self._process = None
                preparing.cancel()
                await asyncio.wait([preparing])
                # Processes that it started must not outlive it.
                await life.end()
        finally:
            if self._spec.listener is not None:
                self._spec.listener.end(self.name)

    async def _make_standby(self) -> None:
        wants = self._spec.wants_standby
        if wants is None or self._standby is not None:
            return
        while True:
            await asyncio.sleep(_STANDBY_AFTER_S)
            if self._stopping.is_set():
                return
            if wants():
                # Without a standby the next start takes longer, as it did before.
                with suppress(OSError):
                    self._standby = await _Life.begin(self._spec, is_standby=True)
                return

    async def _take_standby(self) -> "_Life | None":
        life, self._standby = self._standby, None
        if life is None or life.give_turn():
            return life
        await life.end()
        return None


def _kill_group(pid: int) -> None:
    # Each process leads a separate group, whose id is its pid.
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)


def _describe(status: int) -> str:
    if status >= 0:
        return f"ended with status {status}"
    return f"was killed by {signal.Signals(-status).name}"


class _Life:
    """A process with the pipes into which it writes, from its start to its end.

    Attributes:
        child: The process.
        refusals: The lines that say why it refused its configuration.
    """

    def __init__(self, spec: ServiceSpec) -> None:
        self.child: _Child
        self.refusals: list[str] = []
        self._spec = spec
        self._pipes: list[_LinePipe] = []
        self._turn: int | None = None
        self._socket_number = 0

    @classmethod
    async def begin(cls, spec: ServiceSpec, *, is_standby: bool = False) -> Self:
        """Starts a process; a standby waits for `give_turn`. If it cannot be started, raises OSError and leaves nothing
        behind."""
        life = cls(spec)
        try:
            life._pipes.append(await _LinePipe.open(life._read_error_line))
            if spec.on_output:
                life._pipes.append(await _LinePipe.open(spec.on_output))
            await life._spawn(is_standby)
        except BaseException:
            await life._close()
            raise
        return life

    def give_turn(self) -> bool:
        """Lets a standby serve; False if it cannot, because it has ended or has a socket that is no longer used."""
        assert self._turn is not None
        listener = self._spec.listener
        if self.child.has_ended or (listener is not None and listener.number != self._socket_number):
            return False
        with suppress(BrokenPipeError):
            os.write(self._turn, b"\n")
            return True
        return False

    async def end(self) -> None:
        """Kills the process and all that it started, and waits for its end and for the rest in its pipes."""
        _kill_group(self.child.pid)
        await self.child.wait()
        await self._close()

    async def _close(self) -> None:
        if self._turn is not None:
            os.close(self._turn)
            self._turn = None
        for pipe in self._pipes:
            await pipe.finish(_PIPES_GRACE_S)

    async def _spawn(self, is_standby: bool) -> None:
        """Starts the process with a pipe for its stderr and, if there is a second one, for its stdout."""
        spec, pipes = self._spec, self._pipes
        listener = None if spec.listener is None else spec.listener.lend()
        self._socket_number = 0 if spec.listener is None else spec.listener.number
        inherited = [] if listener is None else [listener.fileno()]
        stdin = subprocess.DEVNULL
        if is_standby:
            stdin, self._turn = os.pipe()
        try:
            self.child = await _Child.start(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    _LAUNCHER,
                    str(os.getpid()),
                    str(spec.niceness),
                    *(map(str, inherited) if inherited else "-"),
                    *spec.command(),
                ],
                stdin=stdin,
                # Without a reader it goes to our stderr: our stdout is for the ready line only.
                stdout=pipes[1].write_end if len(pipes) > 1 else 2,
                stderr=pipes[0].write_end,
                env=spec.environ | {STANDBY: "1"} if is_standby else spec.environ,
                pass_fds=inherited,
                # Its own group: Ctrl-C in the terminal reaches the supervisor only, which then stops all in order. Not
                # its own session: Linux weighs sessions against each other, and niceness would count within each only.
                process_group=0,
            )
        finally:
            if is_standby:
                os.close(stdin)
            for pipe in pipes:
                pipe.close_write_end()
            if listener is not None:
                listener.close()

    def _read_error_line(self, line: str) -> None:
        if _REFUSAL.fullmatch(line):
            self.refusals.append(line)
        else:
            print_error(line)


class _Child:
    """A process that a separate thread starts and waits for.

    asyncio starts a process first and then the thread that waits for it: at the limit of threads, it leaves a process
    that nothing waits for. The kernel kills the child when the thread ends (launch.py), which is after the child.
    """

    def __init__(self, process: subprocess.Popen[bytes], ended: asyncio.Future[int]) -> None:
        self.pid = process.pid
        self._process = process
        self._ended = ended

    @classmethod
    async def start(cls, command: Sequence[str], **options: Any) -> Self:
        """Starts a process; `options` go to subprocess.Popen. Raises OSError."""
        loop = asyncio.get_running_loop()
        started: asyncio.Future[subprocess.Popen[bytes]] = loop.create_future()
        ended: asyncio.Future[int] = loop.create_future()

        def run() -> None:
            # The loop may be closed by then: this process ends.
            with suppress(RuntimeError):
                try:
                    process = subprocess.Popen[bytes](command, **options)
                except Exception as error:
                    loop.call_soon_threadsafe(started.set_exception, error)
                    return
                loop.call_soon_threadsafe(started.set_result, process)
                loop.call_soon_threadsafe(ended.set_result, process.wait())

        try:
            threading.Thread(target=run, name="child", daemon=True).start()
        except RuntimeError as error:
            raise OSError(errno.EAGAIN, str(error)) from error
        try:
            return cls(await asyncio.shield(started), ended)
        except asyncio.CancelledError:
            started.add_done_callback(_kill_started)
            raise

    @property
    def has_ended(self) -> bool:
        return self._ended.done()

    async def wait(self) -> int:
        """The exit status, negative for a signal."""
        return await asyncio.shield(self._ended)

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal, unless it has ended."""
        # Not Popen.send_signal, which would reap it here.
        if self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _kill_started(started: asyncio.Future[subprocess.Popen[bytes]]) -> None:
    if started.exception() is None:
        _kill_group(started.result().pid)


class _LinePipe:
    """A pipe into which a child process writes lines. A task reads it until no process holds the other end.

    Not asyncio's pipes of a subprocess: asyncio reports the end of a process only when its pipes are closed too, and
    grandchildren may hold them open forever.
    """

    def __init__(self, write_end: int, transport: asyncio.ReadTransport, reading: asyncio.Task[None]) -> None:
        self.write_end = write_end
        self._is_write_end_closed = False
        self._transport = transport
        self._reading = reading

    @classmethod
    async def open(cls, on_line: Callable[[str], None]) -> Self:
        """`on_line` takes each line without its end; bytes that are not UTF-8 are replaced."""
        read_end, write_end = os.pipe()
        reader = asyncio.StreamReader()
        file = os.fdopen(read_end, "rb", buffering=0)
        try:
            transport, _ = await asyncio.get_running_loop().connect_read_pipe(
                lambda: asyncio.StreamReaderProtocol(reader), file
            )
        except BaseException:
            file.close()
            os.close(write_end)
            raise
        return cls(write_end, transport, asyncio.create_task(_read_lines(reader, on_line)))

    def close_write_end(self) -> None:
        """Closes our own copy of the other end, once the child has its copy, or will never have one. Idempotent."""
        if not self._is_write_end_closed:
            self._is_write_end_closed = True
            os.close(self.write_end)

    async def finish(self, grace_s: float) -> None:
        """Reads the rest of the pipe, for at most `grace_s` seconds, and closes it."""
        self.close_write_end()
        await asyncio.wait([self._reading], timeout=grace_s)
        self._reading.cancel()
        self._transport.close()


async def _read_lines(reader: asyncio.StreamReader, on_line: Callable[[str], None]) -> None:
    while True:
        try:
            line = await reader.readline()
        except ValueError:  # longer than the reader's buffer: skipped
            continue
        if not line:
            return
        on_line(line.decode(errors="replace").rstrip("\n"))
