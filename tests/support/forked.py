"""Processes that begin with torch imported, which takes most of the time of a short process.

`python -m tests.support.forked MODULE SOCKET` imports the module and forks a process for each request that comes by the
socket. That process calls the module's `main` with the words of the request, and ends as any other interpreter does.
"""

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO

_MAX_MESSAGE_BYTES = 1 << 16
_STANDARD = (0, 1, 2)
_IMPORT_S = 120


class ForkedProcess:
    """As much of subprocess.Popen as tests need, with pipes of text."""

    def __init__(self, nursery: "Nursery", pid: int, stdin: IO[str], stdout: IO[str], stderr: IO[str]) -> None:
        self.pid = pid
        self.stdin = stdin
        self.stdout = stdout
        self.stderr = stderr
        self._nursery = nursery

    @property
    def returncode(self) -> int | None:
        """None while it runs, as far as is known; -N where signal N ended it."""
        return self._nursery.statuses.get(self.pid)

    def wait(self, timeout: float) -> int:
        """Raises TimeoutError."""
        return self._nursery.wait(self.pid, timeout)

    def communicate(self, said: str, timeout: float) -> tuple[str, str]:
        """Writes to it, closes its input and reads until it ends; for output that a pipe holds."""
        with suppress(BrokenPipeError):
            self.stdin.write(said)
        with suppress(BrokenPipeError):
            self.stdin.close()
        self.wait(timeout)
        return self.stdout.read(), self.stderr.read()

    def check_alive(self) -> None:
        """AssertionError where it has ended."""
        with suppress(TimeoutError):
            self.wait(0)
        assert self.returncode is None, self.stderr.read()

    def kill(self) -> None:
        """Returns when it has ended."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)
            self.wait(30)


class Nursery:
    """Starts forked processes of one module."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self.statuses: dict[int, int] = {}
        self._pids: list[int] = []

    @contextmanager
    def running(self, *words: str) -> Iterator[ForkedProcess]:
        """A process that calls `main(*words)`, killed at the end of the block if it still runs."""
        pipes = [os.pipe() for _ in _STANDARD]
        theirs = [pipes[0][0], pipes[1][1], pipes[2][1]]
        ours = [pipes[0][1], pipes[1][0], pipes[2][0]]
        socket.send_fds(self._link, [json.dumps(words).encode()], theirs)
        for descriptor in theirs:
            os.close(descriptor)
        while not self._pids:
            self._receive(_IMPORT_S)
        with open(ours[0], "w", buffering=1) as stdin, open(ours[1]) as stdout, open(ours[2]) as stderr:  # noqa: PTH123
            process = ForkedProcess(self, self._pids.pop(), stdin, stdout, stderr)
            try:
                yield process
            finally:
                process.kill()

    def wait(self, pid: int, timeout: float) -> int:
        ends_at = time.monotonic() + timeout
        while pid not in self.statuses:
            self._receive(ends_at - time.monotonic())
        return self.statuses[pid]

    def _receive(self, timeout: float) -> None:
        self._link.settimeout(max(timeout, 0.001))
        message = json.loads(self._link.recv(_MAX_MESSAGE_BYTES))
        if message["status"] is None:
            self._pids.append(message["pid"])
        else:
            self.statuses[message["pid"]] = message["status"]


@contextmanager
def nursery_of(module: str) -> Iterator[Nursery]:
    """A process that has imported the module, until the block ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        arguments = [sys.executable, "-m", "tests.support.forked", module, str(theirs.fileno())]
        process = subprocess.Popen(arguments, pass_fds=[theirs.fileno()])
        theirs.close()
        try:
            yield Nursery(ours)
        finally:
            ours.close()
            process.wait(_IMPORT_S)


def serve(link: socket.socket) -> list[str] | None:
    """Forks until the other side of the socket is closed; in a forked process returns the words of its request."""
    # A signal that a handler handles wakes up `wakeup`.
    wakeup, waking = socket.socketpair()
    waking.setblocking(False)
    signal.set_wakeup_fd(waking.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        readable, _, _ = select.select([link, wakeup], [], [])
        if wakeup in readable:
            wakeup.recv(_MAX_MESSAGE_BYTES)
            _report_ends(link)
        if link in readable:
            words, descriptors, _, _ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, len(_STANDARD))
            if not words:
                return None
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for each in (link, wakeup, waking):
                    each.close()
                for descriptor, standard in zip(descriptors, _STANDARD, strict=True):
                    os.dup2(descriptor, standard)
                    os.close(descriptor)
                return json.loads(words)
            for descriptor in descriptors:
                os.close(descriptor)
            _tell(link, pid, None)


def _report_ends(link: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _tell(link, pid, os.waitstatus_to_exitcode(status))


def _tell(link: socket.socket, pid: int, status: int | None) -> None:
    link.send(json.dumps({"pid": pid, "status": status}).encode())


if __name__ == "__main__":
    main = importlib.import_module(sys.argv[1]).main
    # A collection in a fork would write to what all of them share, and so copy it.
    gc.freeze()
    words = serve(socket.socket(fileno=int(sys.argv[2])))
    if words is not None:
        main(*words)
