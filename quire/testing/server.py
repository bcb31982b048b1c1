"""Servers that a test starts as child processes: a scripted one, and one with the embedded model."""

import atexit
import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Any, Self, TextIO

import quire
from quire.rpc.address import ReservedPort
from quire.rpc.process import command_of, environ_of
from quire.runtime import clock
from quire.runtime.failpoint import NAMES, VARIABLE
from quire.testing.rules import Received, Rule, RuleError, When, read_record

_READY = "quire: ready "
_LOG_LINES = 200
_SHOWN_LINES = 20
# A server ends its last requests, and a supervisor its services.
_STOP_S = 30.0
# A supervisor starts a service again after at most 5 s.
_RESTART_S = 60.0
# A look reads /proc, which takes some milliseconds.
_LOOK_S, _HEALTH_S = 0.03, 5.0
# The flag by which `quire serve` gives a service its own socket, which has the service's name.
_OWN_SOCKET = re.compile(r"--(?:listen=unix:|local-socket=)(?P<path>.*/(?P<name>[^/]+)\.sock)")
# Runs a command that dies with this process, however this one ends.
_LAUNCHER = Path(quire.__file__).resolve().parents[1] / "quire_cli" / "supervisor" / "launch.py"


def free_port() -> int:
    """A port of 127.0.0.1 without a listener. Another process gets it only if it asks for this very number.

    It is kept to the end of this process, so that a server may be stopped and started again. Not for the ports of
    `quire serve` itself, which keeps its own.
    """
    lent = ReservedPort.lend()
    atexit.register(lent.release)
    return lent.address.port


class ServerError(Exception):
    """A server did not start, ended by itself, or refused a call of the test; the message has its last log lines."""


class ChildServer:
    """A command of `quire` that serves until `stop`. A context manager; entering starts it.

    Attributes:
        grpc_address: HOST:PORT of gRPC.
        http_url: http://HOST:PORT.
        log: The last 200 lines that it wrote. All of them go to stderr, too, which pytest shows if a test fails.
        exit_status: After it has ended.
    """

    command: str
    ready_s: float

    def __init__(
        self, *flags: str, environ: Mapping[str, str] | None = None, program: Sequence[str] | None = None
    ) -> None:
        """`flags` are of the command; free ports unless they name some. `environ` has further variables. `program` is
        the program `quire`, by default of this installation; its first word is an absolute path."""
        self.grpc_address = self.http_url = ""
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.exit_status: int | None = None
        ports = ["--http-port", "0", "--grpc-port", "0"]
        self._arguments = [*(program or command_of("quire_cli.main")), self.command, *ports, *flags]
        self._environ = environ_of(os.environ | (environ or {}))
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = threading.Event()
        self._reader = threading.Thread()

    @property
    def http_address(self) -> str:
        """HOST:PORT of HTTP."""
        return self.http_url.rpartition("/")[2]

    @property
    def base_url(self) -> str:
        """The URL for clients of OpenAI's API."""
        return f"{self.http_url}/v1"

    @property
    def pid(self) -> int:
        return self._running().pid

    def start(self) -> Self:
        """Starts it and waits until it serves. It ends with the thread that calls this. Raises ServerError."""
        self._is_ready.clear()
        self._process = process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_LAUNCHER), str(os.getpid()), "0", "-", *self._arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._environ,
        )
        assert process.stdout is not None, "it is a pipe"
        self._reader = threading.Thread(target=self._read, args=(process.stdout,), daemon=True)
        self._reader.start()
        until = clock.monotonic() + self.ready_s
        while not self._is_ready.wait(0.005):
            if process.poll() is not None:
                self.stop()
                raise self._error(f"`quire {self.command}` ended with status {self.exit_status} before it served")
            if clock.monotonic() > until:
                self.stop()
                raise self._error(f"`quire {self.command}` did not serve within {self.ready_s:g} s")
        return self

    def stop(self) -> None:
        """Ends it, and kills it if that takes long. Idempotent."""
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_STOP_S)
        self.exit_status = self._process.returncode
        self._process = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def check_alive(self) -> None:
        """Raises ServerError if it has ended."""
        process = self._running()
        if process.poll() is not None:
            raise self._error(f"`quire {self.command}` ended with status {process.returncode}")

    def _running(self) -> subprocess.Popen[str]:
        if self._process is None:
            raise ServerError(f"`quire {self.command}` is not started")
        return self._process

    def _read(self, lines: TextIO) -> None:
        with lines:
            for line in lines:
                self.log.append(line.rstrip("\n"))
                if line.startswith(_READY):
                    places = dict(each.split("=", 1) for each in line.removeprefix(_READY).split())
                    self.grpc_address, self.http_url = places["grpc"], f"http://{places['http']}"
                    self._is_ready.set()
                    continue
                # Closed at the end of pytest.
                with contextlib.suppress(OSError, ValueError):
                    print(line, end="", file=sys.stderr, flush=True)

    def _error(self, problem: str) -> ServerError:
        if self._process is None or self._process.poll() is not None:
            self._reader.join(_STOP_S)
        shown = "\n".join(f"  {line}" for line in [*self.log][-_SHOWN_LINES:])
        return ServerError(f"{problem}; its last lines:\n{shown or '  (none)'}")


class ScriptedServer(ChildServer):
    """A real gateway whose answers are written in rules. It serves after about a second, without torch."""

    command = "scripted"
    ready_s = 60.0

    def set_rules(self, *rules: Rule) -> None:
        """Replaces all rules. The first one that fits a request answers it. Raises RuleError."""
        self._call("PUT", "rules", {"rules": [asdict(each) for each in rules]})

    def requests(self, **when: Any) -> list[Received]:
        """The requests that came, in order; with fields of `When` only the requests that fit."""
        found: list[Any] = self._call("GET", "requests")["requests"]
        return [each for each in map(read_record, found) if When(**when).fits(each)]

    def reset(self) -> None:
        """Forgets all rules and requests."""
        self.set_rules()
        self._call("DELETE", "requests")

    def check(self) -> None:
        """Raises AssertionError if a rule was never used, or a request had no rule or was refused."""
        unused: list[str] = self._call("GET", "requests")["unused_rules"]
        problems = [f'the rule "{name}" was never used' for name in unused]
        for each in self.requests():
            if each.status in ("no rule", "refused"):
                said = each.messages[-1].text if each.messages else str(each.body)
                problems.append(f"a request to {each.path} ended with {each.status!r}: {said[-200:]!r}")
        if problems:
            raise AssertionError("\n".join(problems))

    def _call(self, method: str, path: str, content: Any = None) -> Any:
        self.check_alive()
        body = None if content is None else json.dumps(content)
        connection = http.client.HTTPConnection(self.http_address, timeout=60)
        try:
            with contextlib.closing(connection):
                connection.request(method, f"/scripted/{path}", body)
                answer = connection.getresponse()
                said = json.load(answer)
        except (OSError, http.client.HTTPException) as error:
            # A process that has just been killed is still there for a moment.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running().wait(1.0)
            self.check_alive()
            raise self._error(f"`quire {self.command}` does not answer: {error}") from error
        if answer.status != HTTPStatus.OK:
            raise RuleError(said["error"])
        return said


@dataclass(frozen=True, slots=True)
class _Service:
    """A running service of `quire serve`: its process, which leads a process group, and its own socket."""

    pid: int
    socket: str


class EmbeddedServer(ChildServer):
    """All processes of `quire serve`, by default with the embedded model, and failpoints in each of them.

    Services have the names that `quire serve` gives them: "worker", "scheduler" and "gateway"; with a number for
    further ranks and gateways, as in "worker-1", and with its name for a further model. Only Linux shows them.
    """

    command = "serve"
    ready_s = 300.0

    _orders: tempfile.TemporaryDirectory[str] | None = None
    _names: frozenset[str] = frozenset()

    def start(self) -> Self:
        self._orders = tempfile.TemporaryDirectory(prefix="quire-failpoints-")
        self._environ[VARIABLE] = self._orders.name
        super().start()
        self._names = frozenset(self._services())
        return self

    def stop(self) -> None:
        super().stop()
        if self._orders is not None:
            self._orders.cleanup()
            self._orders = None

    @property
    def services(self) -> dict[str, int]:
        """The process ids of the services that run now, by name. One that was started again has another id."""
        return {name: each.pid for name, each in self._services().items()}

    @property
    def scheduler_address(self) -> str:
        """The address of the scheduler's gRPC services."""
        return f"unix:{self._service('scheduler').socket}"

    def kill(self, name: str) -> None:
        """Ends a service by SIGKILL, with all that it started; returns once `quire serve` has started its successor.
        Raises ServerError if no such service runs, or if no successor is started."""
        killed = self._service(name).pid
        os.killpg(killed, signal.SIGKILL)
        self._wait(lambda: self.services.get(name, killed) != killed, f"did not start the {name} again")

    @contextlib.contextmanager
    def paused(self, *names: str) -> Iterator[None]:
        """Stops services by SIGSTOP until the end of the block, as if they hung."""
        groups = [self._service(name).pid for name in names]
        for group in groups:
            os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGCONT)

    def wait_ready(self) -> None:
        """Waits until all services run again and each gateway reports that it serves. Raises ServerError."""
        self._wait(self._is_serving, "does not serve again")

    def _is_serving(self) -> bool:
        services = self._services()
        gateways = [each.socket for name, each in services.items() if name.startswith("gateway")]
        return services.keys() >= self._names and all(map(_is_healthy, gateways))

    def _wait(self, condition: Callable[[], bool], failure: str) -> None:
        until = clock.monotonic() + _RESTART_S
        while not condition():
            self.check_alive()
            if clock.monotonic() > until:
                raise self._error(f"`quire {self.command}` {failure} within {_RESTART_S:g} s")
            clock.sleep(_LOOK_S)

    def _service(self, name: str) -> _Service:
        services = self._services()
        if name not in services:
            raise self._error(f'no service "{name}" runs; there are {", ".join(sorted(services)) or "none"}')
        return services[name]

    def _services(self) -> dict[str, _Service]:
        # All processes of this server, and only they, have this variable.
        mark, found = f"{VARIABLE}={self._watched()}".encode(), list[tuple[int, str, _Service]]()
        for pid in (int(each.name) for each in Path("/proc").glob("[0-9]*")):
            with contextlib.suppress(OSError):
                if os.getpgid(pid) != pid or mark not in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    continue
                started = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
                for word in Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0"):
                    if own := _OWN_SOCKET.fullmatch(word):
                        found.append((started, own["name"], _Service(pid, own["path"])))
        # The oldest of a name: a younger one stands by for it.
        return {name: service for _, name, service in sorted(found, key=lambda each: each[0], reverse=True)}

    def kill_at(self, failpoint: str, passes: int = 1) -> None:
        """Ends the process that passes a failpoint, by SIGKILL at this pass from now on. `quire serve` restarts it."""
        self._order(failpoint, f"kill {passes}")

    def delay_at(self, failpoint: str, seconds: float) -> None:
        """Waits at each pass of a failpoint, until `clear`."""
        self._order(failpoint, f"delay {seconds}")

    def pace(self, seconds_per_step: float) -> None:
        """Makes each step of the device take at least this long, until `clear`: tokens come slowly."""
        self.delay_at("worker.step.admitted", seconds_per_step)

    def clear(self) -> None:
        """Takes back all orders that were not carried out."""
        for file in self._watched().iterdir():
            file.unlink(missing_ok=True)

    def _order(self, failpoint: str, order: str) -> None:
        write_order(self._watched(), failpoint, order)

    def _watched(self) -> Path:
        self._running()
        assert self._orders is not None, "it has a directory while it runs"
        return Path(self._orders.name)


def write_order(directory: Path, failpoint: str, order: str) -> None:
    """Writes an order for the processes that watch the directory. ValueError for an unknown failpoint."""
    if failpoint not in NAMES:
        raise ValueError(f'there is no failpoint "{failpoint}"; there are {", ".join(NAMES)}')
    made = directory / f".{failpoint}"
    made.write_text(order)
    # Whole or not at all.
    made.rename(directory / failpoint)


def _is_healthy(socket: str) -> bool:
    """Whether the gateway at a unix socket reports that a request would run."""
    # Only tests that kill services need it.
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    with grpc.insecure_channel(f"unix:{socket}") as channel:
        try:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=_HEALTH_S)
        except grpc.RpcError:
            return False
    return answer.status == answer.SERVING
