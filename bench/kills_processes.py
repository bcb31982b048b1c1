"""The processes of `python -m bench kills`: replicas by `quire serve`, gateways before several of them, links that are
cut, held and delayed, and what all of them hold."""

import asyncio
import contextlib
import os
import re
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_CHUNK_BYTES = 64 * 1024
_RESTART_S, _END_TIMEOUT_S = 0.3, 60
_SERVICE = re.compile(r"-m\0(worker_svc|scheduler_svc|gateway)\0")
_RANK = re.compile(r"--tensor-parallel-rank[=\0]([1-9]\d*)")
_SCHEDULER_SOCKET = re.compile(r"--listen[=\0](unix:[^\0]+scheduler\.sock)")
_GATEWAY_SOCKET = re.compile(r"/gateway-([1-9])\.sock")


class Link:
    """A port or a unix socket before another one, whose connections can be reset, held and delayed."""

    def __init__(self, target: Callable[[], str]) -> None:
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self.delay_s = 0.0
        self.address = ""

    @contextlib.asynccontextmanager
    async def listening(self, path: Path | None = None) -> AsyncIterator["Link"]:
        if path is None:
            server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
            self.address = "{}:{}".format(*server.sockets[0].getsockname()[:2])
        else:
            server = await asyncio.start_unix_server(self._serve, path)
            self.address = f"unix:{path}"
        try:
            yield self
        finally:
            server.close()
            self.let_pass()
            self.reset()

    def reset(self) -> None:
        for writer in self._open:
            writer.transport.abort()
        self._open.clear()

    def hold(self) -> None:
        """No byte passes from now on, and nobody hears of it."""
        self._passes.clear()

    def let_pass(self) -> None:
        self._passes.set()
        self.delay_s = 0.0

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await _connect(self._target())
        except (OSError, LookupError):
            writer.transport.abort()
            return
        self._open |= {writer, back}
        with contextlib.suppress(OSError):
            await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))
        self._open -= {writer, back}

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            while data := await reader.read(_CHUNK_BYTES):
                await self._passes.wait()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                writer.write(data)
                await writer.drain()


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


class Kept:
    """A command that is started again whenever it ends, as systemd does."""

    def __init__(self, name: str, command: Sequence[str], environ: Mapping[str, str], log: Path) -> None:
        self.name = name
        self._command, self._environ, self._log = command, environ, log
        self._process: asyncio.subprocess.Process | None = None
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

    async def _run(self) -> None:
        with self._log.open("ab") as log:
            while not self._is_stopping:
                self._process = await asyncio.create_subprocess_exec(
                    *self._command, env=self._environ, stdout=log, stderr=log, stdin=asyncio.subprocess.DEVNULL
                )
                await self._process.wait()
                self._process = None
                await asyncio.sleep(_RESTART_S)

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.send_signal(number)


@dataclass(frozen=True, slots=True)
class Cluster:
    """All processes and the links before them.

    Attributes:
        directory: Of everything, temporary files of the processes included.
        replicas: Each a `quire serve`.
        gateways: Those of all replicas; none where the only replica's are used.
        grpc, http: Links before the gateways.
        between: Links between gateways and schedulers.
    """

    directory: Path
    replicas: Sequence[Kept]
    gateways: Sequence[Kept]
    grpc: Sequence[Link]
    http: Sequence[Link]
    between: Sequence[Link]

    @property
    def links(self) -> list[Link]:
        return [*self.grpc, *self.http, *self.between]

    def pids(self) -> dict[str, int]:
        """Processes by name: "serve-0", "worker-0", "worker-0-1" (its rank 1), "scheduler-0", "gateway-0" and so on."""
        found = {kept.name: kept.pid for kept in (*self.replicas, *self.gateways) if kept.pid is not None}
        for kept in list(self.replicas):
            for name, pid in _services(kept):
                found[name] = pid
        for name, pid in list(found.items()):
            if not name.startswith("serve"):
                found |= {f"helper-{child} of {name}": child for child in _children(pid)}
        return found

    @classmethod
    @contextlib.asynccontextmanager
    async def started(
        cls, directory: Path, num_replicas: int, serve: Sequence[str], gateway: Sequence[str], roles: Sequence[str]
    ) -> AsyncIterator["Cluster"]:
        """`serve` are flags of each replica, `gateway` those of gateways."""
        environ = os.environ | {"TMPDIR": str(directory / "tmp")}
        (directory / "tmp").mkdir(mode=0o700)
        quire = [str(Path(sys.executable).with_name("quire"))]
        log = directory / "log"
        async with contextlib.AsyncExitStack() as stack:
            replicas: list[Kept] = []
            fronts: list[tuple[int, int]] = []
            for number in range(num_replicas):
                ports = _free_port(), _free_port()
                own = [f"--grpc-port={ports[0]}", f"--http-port={ports[1]}", f"--role={roles[number]}"]
                shown = gateway if num_replicas == 1 else ()
                flags = [each.replace("REPLICA", str(number)) for each in serve]
                replicas.append(Kept(f"serve-{number}", [*quire, "serve", *own, *flags, *shown], environ, log))
                fronts.append(ports)
            for kept in replicas:
                await stack.enter_async_context(kept.running())
            gateways, between = list[Kept](), list[Link]()
            if num_replicas > 1:
                for kept in replicas:
                    link = Link(lambda kept=kept: scheduler_address(kept))
                    path = directory / f"{kept.name}.sock"
                    between.append(await stack.enter_async_context(link.listening(path)))
                fronts = [(_free_port(), _free_port()) for _ in range(2)]
                known = f"--schedulers={','.join(link.address for link in between)}"
                for number, ports in enumerate(fronts):
                    own = [f"--grpc-port={ports[0]}", f"--http-port={ports[1]}", known]
                    kept = Kept(f"front-{number}", [*quire, "gateway", *own, *gateway], environ, log)
                    gateways.append(await stack.enter_async_context(kept.running()))
            links: tuple[list[Link], list[Link]] = [], []
            for ports in fronts:
                for side, port in zip(links, ports, strict=True):
                    link = Link(lambda port=port: f"127.0.0.1:{port}")
                    side.append(await stack.enter_async_context(link.listening()))
            yield cls(directory, replicas, gateways, *links, between)


def scheduler_address(replica: Kept) -> str:
    """Of the scheduler that runs now. LookupError where none does."""
    for name, pid in _services(replica):
        if name.startswith("scheduler") and (found := _SCHEDULER_SOCKET.search(_command_of(pid))):
            return found[1]
    raise LookupError(f"{replica.name} has no scheduler")


def _services(replica: Kept) -> Iterator[tuple[str, int]]:
    if replica.pid is None:
        return
    number = replica.name.partition("-")[2]
    for pid in _children(replica.pid):
        command = _command_of(pid)
        if found := _SERVICE.search(command):
            further = (_GATEWAY_SOCKET if found[1] == "gateway" else _RANK).search(command)
            yield f"{found[1].removesuffix('_svc')}-{number}" + (f"-{further[1]}" if further else ""), pid


def _children(pid: int) -> list[int]:
    """Of all threads of a process; none where it is gone."""
    children: list[int] = []
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            children += map(int, listed.read_text().split())
    return children


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds."""

    resident_mib: float
    files: int
    threads: int
    zombies: int


def held_by(pid: int) -> Held | None:
    """None where it is gone."""
    try:
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines() if ":" in line
        )
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    except OSError:
        return None
    resident_mib = int(status.get("VmRSS", "0 kB").split()[0]) / 1024
    zombies = sum(") Z " in _stat_of(child) for child in _children(pid))
    return Held(resident_mib, files, int(status["Threads"]), zombies)


def _stat_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text()
    return ""


def left_behind(directory: Path) -> list[str]:
    """Processes whose temporary directory is ours, and what is left in it."""
    marker = f"TMPDIR={directory / 'tmp'}\0".encode()
    found: list[str] = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker in (each / "environ").read_bytes():
                found.append(f"process {_command_of(int(each.name))[:200]!r}")
    return found + [f"temporary file {each.name}" for each in (directory / "tmp").iterdir()]


def until_none_left(directory: Path, timeout_s: float = 10.0) -> list[str]:
    """What is left behind after this time at most."""
    ends_at = time.monotonic() + timeout_s
    while (left := left_behind(directory)) and time.monotonic() < ends_at:
        time.sleep(0.2)
    return left
