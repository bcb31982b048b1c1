"""The services of a whole server as forks of a process that has imported them: most of the processor time of a start is
imports, above all torch's.

`python -m tests.support.forked_services DESCRIPTOR MODULE...` imports the modules and then serves a socket that
listens. The supervisor of a server starts `python -I -S forked_service.py SOCKET MODULE FLAG...` as the service. This
process requests a fork, which runs the module as `python -m` does, with the flags, the environment and the standard
streams of the requesting process. The two are one service: they share a process group, the fork gets the requester's
signals and dies with it, and the requester ends as the fork does.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

_MAX_MESSAGE_BYTES = 1 << 17
# The standard streams, and the listening socket of services that inherit one.
_INHERITED = (0, 1, 2, 3)
_PR_SET_PDEATHSIG = 1
_PR_SET_THP_DISABLE = 41


@dataclass(frozen=True, slots=True)
class Request:
    """A request of `forked_service`: the module and its flags, the environment, the process group."""

    words: list[str]
    environ: dict[str, str]
    group: int

    def become(self, descriptors: list[int]) -> None:
        """Gives this process the state that an exec by the requesting process would keep. These are its standard
        streams, and its listening socket if it has one."""
        # A fork ends with the process that forks, as a service with its supervisor.
        prctl = ctypes.CDLL(None).prctl
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # In huge pages the fork would have a copy of all that it shares with this process, which takes 0.2 s.
        prctl(_PR_SET_THP_DISABLE, 1, 0, 0, 0)
        os.setpgid(0, self.group)
        for descriptor, number in zip(descriptors, _INHERITED, strict=False):
            os.dup2(descriptor, number)
            os.close(descriptor)
        for name in os.environ.keys() - self.environ.keys():
            del os.environ[name]
        os.environ.update(self.environ)
        if len(descriptors) == len(_INHERITED):
            os.environ["LISTEN_PID"] = str(os.getpid())
        # As in quire_cli.supervisor.launch.
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)
        sys.argv = self.words


class Forks:
    """Forks for each connection, until stdin ends."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ)
        self._selector.register(0, selectors.EVENT_READ)

    def serve(self) -> bool:
        """True in each process that was forked, and False at the end."""
        while True:
            # Ends first: a request may need the address of a process that has just been killed.
            for key, _ in sorted(self._selector.select(), key=lambda each: each[0].fileobj is self._listener):
                if key.fileobj == 0:
                    return False
                if key.fileobj is self._listener:
                    if self._fork():
                        return True
                # A fork and its requester may both have ended since the last look; the first one removes both.
                elif self._selector.get_map().get(key.fd) is key:
                    key.data()

    def _fork(self) -> bool:
        """True in the fork."""
        link, _ = self._listener.accept()
        try:
            message, descriptors, _, _ = socket.recv_fds(link, _MAX_MESSAGE_BYTES, len(_INHERITED))
        except ConnectionError:
            message, descriptors = b"", []
        if not message:
            # The requesting process was killed before it could.
            link.close()
            return False
        pid = os.fork()
        if pid == 0:
            for each in (link, self._listener, self._selector):
                each.close()
            Request(*json.loads(message)).become(descriptors)
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        self._watch(pid, link)
        return False

    def _watch(self, pid: int, link: socket.socket) -> None:
        handle = os.pidfd_open(pid)

        def fork_has_ended() -> None:
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            self._selector.unregister(handle)
            os.close(handle)
            self._selector.unregister(link)
            with suppress(OSError):
                link.send(str(status).encode())
            link.close()

        def asker_has_ended() -> None:
            _send(pid, signal.SIGKILL)
            fork_has_ended()

        self._selector.register(handle, selectors.EVENT_READ, fork_has_ended)
        self._selector.register(link, selectors.EVENT_READ, asker_has_ended)
        with suppress(OSError):
            link.send(str(pid).encode())


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def main(descriptor: str, *modules: str) -> None:
    """Imports and forks; each fork runs its request."""
    fork_after(lambda: [importlib.import_module(module) for module in modules], descriptor)


def fork_after(imports: Callable[[], object], descriptor: str) -> None:
    """Imports and forks; each fork runs its request."""
    # Modules that are imported here stay, in each fork too.
    gc.disable()
    # Same as worker_svc before it imports torch.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    with socket.socket(fileno=int(descriptor)) as listener:
        imports()
        gc.freeze()
        is_fork = Forks(listener).serve()
    if is_fork:
        gc.enable()
        run_to_its_end()


def run_to_its_end() -> NoReturn:
    """Runs the module and ends as an interpreter does, but does not free memory: a fork would copy each page of the
    objects that it frees, which takes longer than the rest of a short life."""
    status: str | int | None = 0
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = end.code
    assert status is None or isinstance(status, int)
    threading._shutdown()  # pyrefly: ignore
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(status or 0)


if __name__ == "__main__":
    main(*sys.argv[1:])
