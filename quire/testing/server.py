"""Servers that a test starts as child processes: a scripted one, and one with the embedded model."""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, TextIO

import quire
from quire.rpc.process import command_of, environ_of
from quire.runtime import clock
from quire.runtime.failpoint import NAMES, VARIABLE
from quire.testing.rules import Received, Rule, RuleError, When, read_record

_READY = "quire: ready "
_LOG_LINES = 200
_SHOWN_LINES = 20
# A server ends its last requests, and a supervisor its services.
_STOP_S = 30.0
# Runs a command that dies with this process, however this one ends.
_LAUNCHER = Path(quire.__file__).resolve().parents[1] / "quire_cli" / "supervisor" / "launch.py"


class ServerError(Exception):
    """A server did not start, ended by itself, or refused a call of the test; the message has its last log lines."""


class ChildServer:
    """A command of `quire` that serves until `stop`. A context manager; entering starts it.

    Attributes:
        grpc_address: HOST:PORT of gRPC.
        http_url: http://HOST:PORT.
        log: The last 200 lines that it wrote.
        exit_status: After it has ended.
    """

    command: str
    ready_s: float

    def __init__(self, *flags: str, environ: Mapping[str, str] | None = None) -> None:
        """`flags` are of the command; free ports unless they name some. `environ` has further variables."""
        self.grpc_address = self.http_url = ""
        self.log: deque[str] = deque(maxlen=_LOG_LINES)
        self.exit_status: int | None = None
        ports = ["--http-port", "0", "--grpc-port", "0"]
        self._arguments = [*command_of("quire_cli.main"), self.command, *ports, *flags]
        self._environ = environ_of(os.environ | (environ or {}))
        self._process: subprocess.Popen[str] | None = None
        self._is_ready = threading.Event()
        self._reader = threading.Thread()

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
        data = None if content is None else json.dumps(content).encode()
        request = urllib.request.Request(f"{self.http_url}/scripted/{path}", data, method=method)
        try:
            # Without the proxies of the environment: the server is on this machine.
            with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            raise RuleError(json.load(error)["error"]) from None
        except OSError as error:
            # A process that has just been killed is still there for a moment.
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._running().wait(1.0)
            self.check_alive()
            raise self._error(f"`quire {self.command}` does not answer: {error}") from error


class EmbeddedServer(ChildServer):
    """All processes of `quire serve`, by default with the embedded model, and failpoints in each of them."""

    command = "serve"
    ready_s = 300.0

    _orders: tempfile.TemporaryDirectory[str] | None = None

    def start(self) -> Self:
        self._orders = tempfile.TemporaryDirectory(prefix="quire-failpoints-")
        self._environ[VARIABLE] = self._orders.name
        return super().start()

    def stop(self) -> None:
        super().stop()
        if self._orders is not None:
            self._orders.cleanup()
            self._orders = None

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
