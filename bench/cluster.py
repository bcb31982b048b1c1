"""The processes of `python -m bench kills`: replicas by `quire serve`, or by services that start separately, as
containers do; gateways before several replicas; links that are cut, held and delayed; and the resources they hold."""

import asyncio
import contextlib
import itertools
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.serving import free_ports
from quire.runtime import failpoint
from quire_torture.link import Link
from quire_torture.processes import stat_of

_RESTART_S, _END_TIMEOUT_S = 0.3, 60
_SERVICE = re.compile(r"-m\0(worker_svc|scheduler_svc|gateway)\0")
_RANK = re.compile(r"--tensor-parallel-rank[=\0]([1-9]\d*)")
_SCHEDULER_SOCKET = re.compile(r"--listen[=\0](unix:[^\0]+scheduler[-\d]*\.sock)")
_GATEWAY_SOCKET = re.compile(r"/gateway-([1-9])\.sock")
_GROWTH_MIB, _GROWTH = 32.0, 32
"""Limits of growth since before the first fault: megabytes of memory, and files or threads."""


class Kept:
    """A command that restarts whenever it ends, as under systemd. START in it becomes the start's number."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command, self._environ, self._log = command, environ, log
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: asyncio.Task[int] | None = None
        self._is_stopping = False

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator["Kept"]:
        task = asyncio.create_task(self._run())
        try:
            yield self
        finally:
            self._is_stopping = True
            self._signal(signal.SIGTERM)
            _, late = await asyncio.wait([task], timeout=_END_TIMEOUT_S)
            if late:
                print(f"{self.name} did not end within {_END_TIMEOUT_S} s of SIGTERM")
                self._signal(signal.SIGKILL)
            await task

    def replace(self) -> asyncio.subprocess.Process:
        """Starts the command next to its process, which the caller now owns. LookupError if it does not run."""
        if self._process is None or self._waiting is None:
            raise LookupError(f"{self.name} does not run")
        self._waiting.cancel()
        return self._process

    async def _run(self) -> None:
        with self._log.open("ab") as log:
            for start in itertools.count():
                if self._is_stopping:
                    break
                command = [each.replace("START", str(start)) for each in self._command]
                self._process = await asyncio.create_subprocess_exec(
                    *command, env=self._environ, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
                )
                self._waiting = asyncio.create_task(self._process.wait())
                await asyncio.wait([self._waiting])
                self._process = self._waiting = None
                await asyncio.sleep(_RESTART_S)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


@dataclass(frozen=True, slots=True)
class Cluster:
    """All processes and the links between them.

    Attributes:
        directory: Directory of all files, which include temporary files of the processes.
        replicas: Each a `quire serve`, or a scheduler if services start separately.
        workers: Workers that start separately.
        gateways: Gateways of all replicas; empty if the only replica's own gateways are used.
        grpc, http: Links before the gateways.
        links: All links by what they lead to: "clients" those before the gateways, "scheduler", "worker" from its
            scheduler, and "transfer" from workers of other replicas.
    """

    directory: Path
    replicas: Sequence[Kept]
    workers: Sequence[Kept]
    gateways: Sequence[Kept]
    grpc: Sequence[Link]
    http: Sequence[Link]
    links: Mapping[str, Sequence[Link]]

    @property
    def failpoints(self) -> Path:
        """The directory that all processes watch for orders (docs/internals/failpoints.md)."""
        return self.directory / "failpoints"

    def pids(self) -> dict[str, int]:
        """Processes by name: "serve-0", "worker-0", "worker-0-1" (its rank 1), "scheduler-0", "gateway-0" and so on."""
        kept = (*self.replicas, *self.workers, *self.gateways)
        found = {each.name: each.pid for each in kept if each.pid is not None}
        for each in self.replicas:
            if each.pid is not None:
                found |= services_of(each.pid, each.name.partition("-")[2])
        for name, pid in list(found.items()):
            if not name.startswith("serve"):
                found |= {f"helper-{child} of {name}": child for child in _children(pid)}
        return found

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls, directory: Path, serve: Sequence[str], gateway: Sequence[str], roles: Sequence[str], *, apart: int = 0
    ) -> AsyncIterator["Cluster"]:
        """`serve` are the flags of each replica, `gateway` the flags of gateways; `roles` has one role per replica.
        Services start separately if `apart`, their number of ranks, is not 0."""
        environ = os.environ | {"TMPDIR": str(directory / "tmp"), failpoint.VARIABLE: str(directory / "failpoints")}
        (directory / "tmp").mkdir(mode=0o700)
        (directory / "failpoints").mkdir()
        has_fronts = len(roles) > 1 or apart > 0
        async with contextlib.AsyncExitStack() as stack:
            start = _Start(directory, environ, stack)
            fronts: list[list[int]] = []
            for number, role in enumerate(roles):
                flags = [each.replace("REPLICA", str(number)) for each in serve]
                if apart:
                    await start.services(number, apart, [f"--role={role}"], flags)
                else:
                    fronts.append(free_ports(2))
                    shown = () if has_fronts else gateway
                    own = [*_ports(fronts[-1]), f"--role={role}"]
                    start.replicas.append(await start.kept(f"serve-{number}", "quire", "serve", *own, *flags, *shown))
            gateways = list[Kept]()
            if has_fronts:
                for each in start.replicas:
                    await start.link("scheduler", lambda each=each: scheduler_address(each), f"to-{each.name}.sock")
                fronts = [free_ports(2) for _ in range(2)]
                known = f"--schedulers={','.join(link.address for link in start.links['scheduler'])}"
                for number, ports in enumerate(fronts):
                    own = [*_ports(ports), known, *gateway]
                    gateways.append(await start.kept(f"front-{number}", "quire", "gateway", *own))
            grpc, http = [
                [await start.link("clients", lambda port=port: f"127.0.0.1:{port}") for port in side]
                for side in zip(*fronts, strict=True)
            ]
            yield cls(directory, start.replicas, start.workers, gateways, grpc, http, start.links)


@dataclass(frozen=True, slots=True)
class _Start:
    """Processes that have been started so far; they end with the stack."""

    directory: Path
    environ: Mapping[str, str]
    stack: contextlib.AsyncExitStack
    replicas: list[Kept] = field(default_factory=list[Kept])
    workers: list[Kept] = field(default_factory=list[Kept])
    links: dict[str, list[Link]] = field(default_factory=dict[str, list[Link]])

    async def kept(self, name: str, program: str, *arguments: str) -> Kept:
        """Runs `quire`, or a service by the name of its package."""
        command = (
            [str(Path(sys.executable).with_name("quire"))] if program == "quire" else [sys.executable, "-m", program]
        )
        kept = Kept(name, [*command, *arguments], self.environ, self.directory / "log")
        return await self.stack.enter_async_context(kept.running())

    async def link(self, to: str, target: Callable[[], str], socket_name: str | None = None) -> Link:
        link = Link(target)
        path = None if socket_name is None else self.directory / socket_name
        self.links.setdefault(to, []).append(link)
        return await self.stack.enter_async_context(link.listening(path))

    async def services(self, number: int, num_ranks: int, scheduler: Sequence[str], worker: Sequence[str]) -> None:
        """Starts the scheduler of a replica and its workers, with links between them and before their blocks."""
        rendezvous = f"--tensor-parallel-address=127.0.0.1:{free_ports(1)[0]}"
        addresses: list[str] = []
        for rank in range(num_ranks):
            name = f"worker-{number}" + (f"-{rank}" if rank else "")
            own, fetched = f"unix:{self.directory / name}.sock", f"127.0.0.1:{free_ports(1)[0]}"
            addresses.append((await self.link("worker", lambda own=own: own, f"to-{name}.sock")).address)
            transfer = await self.link("transfer", lambda fetched=fetched: fetched)
            flags = [f"--listen={own}", f"--transfer-listen={fetched}", f"--transfer-endpoint={transfer.address}"]
            if num_ranks > 1:
                flags += [f"--tensor-parallel-rank={rank}", rendezvous, "--num-threads=1"]
            self.workers.append(await self.kept(name, "worker_svc", *flags, *worker))
        # Each start has its own socket, so that a successor can listen while the stopped scheduler still does.
        listen = f"--listen=unix:{self.directory}/{number}-scheduler-START.sock"
        flags = [listen, f"--workers={','.join(addresses)}", *scheduler]
        self.replicas.append(await self.kept(f"scheduler-{number}", "scheduler_svc", *flags))


def _ports(ports: Sequence[int]) -> list[str]:
    return [f"--grpc-port={ports[0]}", f"--http-port={ports[1]}"]


def scheduler_address(replica: Kept) -> str:
    """The address of the scheduler that runs now. LookupError if none runs."""
    if replica.pid is None:
        raise LookupError(f"{replica.name} does not run")
    for name, pid in {replica.name: replica.pid, **services_of(replica.pid, "0")}.items():
        if name.startswith("scheduler") and (found := _SCHEDULER_SOCKET.search(_command_of(pid))):
            return found[1]
    raise LookupError(f"{replica.name} has no scheduler")


def services_of(serve: int, number: str) -> dict[str, int]:
    """Process ids of the services of a `quire serve` process, by name: "worker-NUMBER" and so on."""
    found: dict[str, int] = {}
    # The oldest of a name: a younger one stands by for it.
    for pid in sorted(_children(serve), key=lambda child: int((stat_of(child) or [0] * 20)[19]), reverse=True):
        command = _command_of(pid)
        if service := _SERVICE.search(command):
            further = (_GATEWAY_SOCKET if service[1] == "gateway" else _RANK).search(command)
            name = f"{service[1].removesuffix('_svc')}-{number}" + (f"-{further[1]}" if further else "")
            found[name] = pid
    return found


def _children(pid: int) -> list[int]:
    """Child processes of all threads of a process; empty if it is gone."""
    children: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, listed.read_text().split())
    return children


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


@dataclass(frozen=True, slots=True)
class Held:
    """Resources that one process holds."""

    resident_mib: float
    files: int
    threads: int
    zombies: int

    def too_much(self, before: "Held") -> bool:
        """Whether this is more than a process with the work of `before` needs."""
        return (
            self.zombies > 0
            or self.resident_mib > 1.25 * before.resident_mib + _GROWTH_MIB
            or self.files > before.files + _GROWTH
            or self.threads > before.threads + _GROWTH
        )


def held_by(pid: int) -> Held | None:
    """The resources of a process; None if it is gone."""
    try:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    resident_mib = int(status.get("VmRSS", "0 kB").split()[0]) / 1024
    zombies = sum((stat_of(child) or "-")[0] == "Z" for child in _children(pid))
    return Held(resident_mib, files, int(status["Threads"]), zombies)


def shared_memory() -> set[str]:
    """The names in the file system of shared memory, also names of other programs."""
    return {each.name for each in Path("/dev/shm").iterdir()}


def left_behind(directory: Path) -> list[str]:
    """Processes whose temporary directory is ours, and files left in it."""
    marker = f"TMPDIR={directory / 'tmp'}\0".encode()
    found: list[str] = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in (each / "environ").read_bytes():
                found.append(f"process {_command_of(int(each.name))[:200]!r}")
    return found + [f"temporary file {each.name}" for each in (directory / "tmp").iterdir()]


def until_none_left(directory: Path, timeout_s: float = 10.0) -> list[str]:
    """Waits until nothing is left behind; returns what is left behind after `timeout_s`."""
    ends_at = time.monotonic() + timeout_s
    while (left := left_behind(directory)) and time.monotonic() < ends_at:
        time.sleep(0.2)
    return left
