"""All processes of one machine, from the first check to the last socket.

Modules that are not needed before the worker starts, or only with some settings, are imported when they are needed: a
worker takes longest to start, and waits for everything before it.
"""

import asyncio
import fcntl
import itertools
import os
import shutil
import socket
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from signal import Signals
from types import TracebackType
from typing import Self

from gateway.settings import KILLABLE
from quire.model_files.adapter_files import MAX_RANK, MAX_RANK_ON_GPU, read_adapter
from quire.model_files.model_directory import SUPPORTED_ARCHITECTURES, ModelDirectory, is_gguf, weight_files
from quire.model_files.model_source import resolve_model
from quire.rpc.address import AddressInUse, ReservedPort
from quire.runtime.processors import available_memory
from quire.runtime.settings import ConfigurationError
from quire.tracing import check_installed
from quire_cli.supervisor.commands import Commands, Programs, child_environ, gateway_name
from quire_cli.supervisor.models import check_memory, niceness_of, shares_of_memory
from quire_cli.supervisor.process import RestartBackoff, ServiceSpec, SupervisedProcess, print_error
from quire_cli.supervisor.settings import ServeSettings
from quire_cli.supervisor.shared_listener import SharedListener

# Packages that the services need and a client does not: without them a service would crash at each start.
_NEEDED = ("jinja2", "safetensors", "starlette", "tokenizers", "torch", "uvicorn")
# A gateway prints a line on stdout that begins like this, once it listens on both ports, and flushes it.
_LISTENING = "quire-gateway: listening "
# The maximum that a gateway needs to end after its live requests have drained; the others have nothing to drain.
_EXIT_GRACE_S = 5.0
# A standby serves half a second after its turn began: after this life it has served.
_IN_SERVICE_S = 2.0
# Standby processes take a tenth of it.
_MIN_BYTES_FOR_STANDBY = 2 << 30
_PROBE = "quire-serve-probe"
_DIRECTORY_PREFIX = "quire-"
_LOCK = "lock"
# The path of a unix socket has at most 107 bytes, which a long TMPDIR would exceed.
_MAX_PARENT_BYTES = 60


def report_on_stderr(line: str) -> None:
    """Reports starting, restarting and stopping to the user."""
    print_error(f"quire: {line}")


class LocalServer:
    """Worker, scheduler and gateways of one replica as supervised child processes.

    The gateways share two ports, which are reserved until the server stops. They inherit the socket of HTTP, in which
    connections wait while gateways restart. On the port of gRPC, which takes no socket, each gateway listens itself,
    and the kernel spreads new connections.

    An async context manager: entering starts the processes and returns when all gateways listen, leaving stops them in
    order, or kills them if an exception leaves the block. No process, socket or directory stays behind.

    Raises on entering:
        ConfigurationError: the settings cannot be served here, or a service refused them (ServiceRefused).
    """

    def __init__(
        self,
        settings: ServeSettings,
        *,
        programs: Programs | None = None,
        report: Callable[[str], None] = report_on_stderr,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        """
        Args:
            report: Gets permanent lines about starting, restarting and stopping.
            progress: Gets the progress of loading the model, often; each line replaces the one before. Without it
                `report` gets a line every few seconds.
        """
        self._settings = settings
        self._report = report
        self._progress = progress
        self._programs = programs or Programs()
        self._ports: list[ReservedPort] = []
        self._http: SharedListener | None = None
        self._directory: RunDirectory | None = None
        self._commands: Commands | None = None
        self._probe_key: str | None = None
        self._pools: list[list[int]] = []
        self._not_listening = {gateway_name(number) for number in range(settings.gateways)}
        self._all_listen = asyncio.Event()
        self._has_served = asyncio.Event()
        self._stages: list[list[SupervisedProcess]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: list[asyncio.Task[None]] = []
        self._demo: socket.socket | None = None

    @property
    def grpc_address(self) -> str:
        """HOST:PORT of the gRPC API."""
        return self._listening()[0]

    @property
    def http_address(self) -> str:
        """HOST:PORT of the HTTP API."""
        return self._listening()[1]

    @property
    def scheduler_address(self) -> str:
        """The address at which the scheduler answers GetState, once entered."""
        return self._started().scheduler_address

    def process(self, name: str) -> SupervisedProcess:
        """The process "worker" (of further ranks "worker-1" and so on), "scheduler" or "gateway" (further ones
        "gateway-1" and so on), once entered. Processes of a further model have its name: "worker-NAME",
        "worker-NAME-1", "scheduler-NAME".

        KeyError for another name.
        """
        return {process.name: process for process in itertools.chain(*self._stages)}[name]

    async def __aenter__(self) -> Self:
        try:
            self._commands = self._prepare()
            self._stages = self._make_processes(self._commands)
            gateways = "gateway" if self._settings.gateways == 1 else f"{self._settings.gateways} gateways"
            names = [each.name for each in self._settings.served_models]
            of_models = f" of {', '.join(names)}" if len(names) > 1 else ""
            self._report(f"starting worker, scheduler{of_models} and {gateways}")
            if self._settings.demo:
                self._demo = self._listen_for_kills(self._commands)
            # Workers take longest, so they start first.
            self._tasks = [process.start() for stage in reversed(self._stages) for process in stage]
            self._watches = self._watch_for_hangs(self._commands)
            await self._unless_failed(asyncio.ensure_future(self._all_listen.wait()))
        except BaseException:
            await self._abandon()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            await self.stop()
        else:
            await self._abandon()

    async def wait_ready(self) -> None:
        """Waits until a request succeeds through each gateway: sends a real one of one token while the model loads.

        Raises:
            ServiceRefused: a service refused its configuration.
            QuireError: a request failed although a process serves.
        """
        await self._unless_failed(asyncio.ensure_future(self._canaries()))
        self._has_served.set()

    async def wait_failed(self) -> None:
        """Waits until a service refuses a configuration that never worked and raises ServiceRefused; else forever."""
        await self._unless_failed(asyncio.get_running_loop().create_future())

    async def stop(self) -> None:
        """Stops all in order. Gateways finish their live requests first, for up to the drain timeout. Idempotent."""
        for watching in self._watches:
            watching.cancel()
        if self._http is not None:
            self._http.close()
        try:
            for number, stage in enumerate(self._stages):
                grace_s = _EXIT_GRACE_S + (self._settings.drain_timeout if number == 0 else 0.0)
                await asyncio.gather(*(process.stop(grace_s) for process in stage))
            await asyncio.gather(*self._tasks, *self._watches, return_exceptions=True)
        finally:
            self.kill()
            if self._demo is not None:
                asyncio.get_running_loop().remove_reader(self._demo)
                self._demo.close()
                self._demo = None
            for port in self._ports:
                port.release()
            if self._directory is not None:
                self._directory.remove()
            for file in itertools.chain.from_iterable(self._pools):
                os.close(file)
            self._pools = []

    def signal(self, number: Signals) -> None:
        """Sends a signal to all running processes."""
        for process in itertools.chain(*self._stages):
            process.signal(number)

    def kill(self) -> None:
        """Kills all processes at once; `stop` returns soon after."""
        for process in itertools.chain(*self._stages):
            process.kill()

    async def _abandon(self) -> None:
        self.kill()
        await self.stop()

    async def _unless_failed(self, awaited: asyncio.Future) -> None:
        """Waits for `awaited`, or for the first service that gives up, whose error it raises."""
        try:
            await asyncio.wait([awaited, *self._tasks], return_when=asyncio.FIRST_COMPLETED)
            for task in self._tasks:
                if task.done():
                    task.result()
            await awaited
        finally:
            awaited.cancel()

    async def _canaries(self) -> None:
        """Probes one gateway after the other: while the model loads, the first probe waits for all."""
        from quire_cli.supervisor.canary import wait_until_served

        commands = self._started()
        served = self._settings.served_models
        names = [self._settings.of_model(each).served_model_name or each.name for each in served]
        names = names if len(served) > 1 else [None]
        for number in commands.gateways:
            address = commands.gateway_address(number)
            await wait_until_served(address, names, self._probe_key, self._report, self._progress)

    def _started(self) -> Commands:
        if self._commands is None:
            raise RuntimeError("nothing is started yet")
        return self._commands

    def _listening(self) -> tuple[str, str]:
        if not self._all_listen.is_set():
            raise RuntimeError("the gateway does not listen yet")
        grpc, http, *_ = self._ports
        return str(grpc.address), str(http.address)

    def _prepare(self) -> Commands:
        """Reserves the ports, directory and pools that must exist before the first process."""
        settings = self._settings
        parts = [settings.of_model(model) for model in settings.served_models]
        check_servable(settings)
        wanted = {"grpc": (settings.grpc_host, settings.grpc_port), "http": (settings.http_host, settings.http_port)}
        for name, (host, port) in wanted.items():
            try:
                self._ports.append(ReservedPort.reserve(host, port))
            except AddressInUse as error:
                raise AddressInUse(f"{error}; --{name}-port takes another one, or 0 for a free one") from error
        self._http = SharedListener(self._ports[1].address)
        self._directory = RunDirectory.make()
        probe_keys = None
        if settings.requires_keys:
            probe_keys = self._directory.path / "probe-keys.json"
            self._probe_key = _write_probe_key(probe_keys, settings.api_keys)
        rendezvous_ports = [0] * len(parts)
        for number, part in enumerate(parts):
            size, pools = part.tensor_parallel_size, list[int]()
            if size > 1:
                # Kept reserved, since rank 0 listens only some seconds later, and again after each restart.
                self._ports.append(ReservedPort.lend())
                rendezvous_ports[number] = self._ports[-1].address.port
            # A file in memory for the KV pool of each rank, which exists while this process holds it. It is empty until
            # a worker puts its pool there.
            self._pools.append(pools)
            if part.persistent_kv_cache != "off" and hasattr(os, "memfd_create"):
                pools += [os.memfd_create("quire-kv", os.MFD_CLOEXEC) for _ in range(size)]
        return Commands(
            settings,
            self._programs,
            self._directory.path,
            rendezvous_ports=rendezvous_ports,
            probe_keys=probe_keys,
            # By these paths, processes of this user open them.
            pool_files=[[Path(f"/proc/{os.getpid()}/fd/{file}") for file in pools] for pools in self._pools],
            memory_shares=shares_of_memory(parts),
        )

    def _read_gateway_line(self, name: str, line: str) -> None:
        if not line.startswith(_LISTENING):
            print_error(line)
            return
        if self._http is not None:
            self._http.begin(name)
        self._not_listening.discard(name)
        if not self._not_listening:
            self._all_listen.set()

    def _watch_for_hangs(self, commands: Commands) -> list[asyncio.Task[None]]:
        settings = self._settings
        if settings.hang_timeout == 0:
            return []
        from quire_cli.supervisor.hangs import HangLimits, watch

        limits = HangLimits(settings.hang_timeout, settings.start_timeout)
        return [
            asyncio.create_task(
                watch(process, commands.socket(process.name), limits, self._report), name=f"watch {process.name}"
            )
            for process in itertools.chain(*self._stages)
        ]

    def _listen_for_kills(self, commands: Commands) -> socket.socket:
        """Kills a service whenever a gateway requests it (`--demo`)."""
        listening = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        listening.setblocking(False)
        listening.bind(str(commands.demo_socket))

        def read() -> None:
            with suppress(BlockingIOError):
                name = listening.recv(64).decode(errors="replace")
                if name in KILLABLE:
                    self._report(f"killing the {name}, as the page /ui asked")
                    self.process(name).kill_once()

        asyncio.get_running_loop().add_reader(listening, read)
        return listening

    def _make_processes(self, commands: Commands) -> list[list[SupervisedProcess]]:
        """In the order in which they stop: each drains while later ones still serve, gateways all at once."""
        environ = child_environ(os.environ)
        # A program that knows no standby would serve twice.
        wants_standby = self._wants_standby if self._settings.standby and self._programs == Programs() else None
        grpc_port, http_port = (port.address.port for port in self._ports[:2])
        gateways = [
            ServiceSpec(
                gateway_name(number),
                partial(commands.gateway, number, grpc_port, http_port),
                environ,
                partial(self._read_gateway_line, gateway_name(number)),
                # The other gateways keep serving, and a loaded model is worth more than an early report.
                is_proven=self._all_listen.is_set,
                listener=self._http,
                wants_standby=wants_standby,
            )
            for number in commands.gateways
        ]
        # A second scheduler at its worker refuses, for good.
        schedulers = [
            ServiceSpec(
                commands.scheduler_name(model),
                partial(commands.scheduler, model),
                environ,
                wants_standby=wants_standby,
            )
            for model in commands.models
        ]
        niceness = niceness_of(commands.settings)
        # All ranks at once: a rank leaves when another one ends, and would be restarted if it were not being stopped.
        workers = [
            ServiceSpec(
                commands.worker_name(rank, model),
                partial(commands.worker, rank, model),
                environ,
                # Later refusals are often temporary: other processes have the memory, or a pool's last user still ends.
                is_proven=self._has_served.is_set,
                niceness=niceness[model],
                wants_standby=wants_standby,
            )
            for model in commands.models
            for rank in commands.ranks(model)
        ]
        stages = [gateways, schedulers, workers]
        names = [spec.name for stage in stages for spec in stage]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise ConfigurationError(f"two processes would be called {twice}; give a model another name: NAME=DIR")
        return [
            [
                SupervisedProcess(spec, report=self._report, backoff=RestartBackoff(reset_s=_IN_SERVICE_S))
                for spec in stage
            ]
            for stage in stages
        ]

    def _wants_standby(self) -> bool:
        available = available_memory()
        return self._has_served.is_set() and (available is None or available >= _MIN_BYTES_FOR_STANDBY)


class RunDirectory:
    """The private directory of the sockets of one `quire serve`, ours while this process holds the lock in it.

    A supervisor that is killed leaves its directory behind. Its lock is free then, so the next supervisor removes it.
    Another lock is on the directory itself: systemd-tmpfiles, which removes old files from /tmp, does not touch locked
    directories. A gateway that is restarted needs the keys in the directory.
    """

    def __init__(self, path: Path, *locks: int) -> None:
        self.path = path
        self._locks = [*locks]

    @classmethod
    def make(cls) -> Self:
        """Makes one, and removes directories whose lock is free. ConfigurationError if none can be made."""
        parent = path = None
        locks: list[int] = []
        try:
            parent = Path(tempfile.gettempdir())
            if len(os.fsencode(parent)) > _MAX_PARENT_BYTES:
                parent = Path("/tmp")
            _remove_abandoned(parent)
            path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=parent))
            # The lock gets its name once it is taken, so that no other process can take it before.
            new = path / f"{_LOCK}.new"
            for locked, flags in ((path, os.O_RDONLY), (new, os.O_RDWR | os.O_CREAT)):
                locks.append(os.open(locked, flags | os.O_CLOEXEC, 0o600))
                fcntl.flock(locks[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(path / _LOCK)
        except OSError as error:
            for lock in locks:
                os.close(lock)
            if path is not None:
                shutil.rmtree(path, ignore_errors=True)
            where = "" if parent is None else f" in {parent}"
            raise ConfigurationError(
                f"no directory for sockets can be made{where}: {error.strerror}; set TMPDIR to a short path that can "
                "be written"
            ) from error
        return cls(path, *locks)

    def remove(self) -> None:
        """Removes it with everything in it. Idempotent."""
        if self._locks:
            shutil.rmtree(self.path, ignore_errors=True)
        while self._locks:
            os.close(self._locks.pop())


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_DIRECTORY_PREFIX}*"):
        # A directory whose lock cannot be opened or taken belongs to another user, or is in use.
        with suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)


def _write_probe_key(file: Path, api_keys: tuple[str, ...]) -> str:
    """Writes a new key, of a separate tenant, with which this process probes whether requests succeed. Gateways read
    `file`. It has the keys of --api-key too, as hashes, so that no command line of a gateway has them."""
    from gateway.auth.keys import KeyEntry, entries_of, hash_of, make_key, write_keys

    key = make_key()
    write_keys(file, [KeyEntry(id=_PROBE, sha256=hash_of(key).hex(), tenant=_PROBE), *entries_of(api_keys)])
    return key


def _check_files(settings: ServeSettings) -> None:
    """Checks the files with certificates and keys, if there are any."""
    if settings.tls_dir is not None or settings.public_cert is not None:
        from quire.rpc.tls import Role, TlsIdentity

        if settings.tls_dir is not None:
            TlsIdentity.of(settings.tls_dir, Role.GATEWAY)
        if settings.public_cert is not None and settings.public_key is not None:
            TlsIdentity(settings.public_cert, settings.public_key, None).read()
    if settings.keys_files:
        from gateway.auth.keys import read_keys

        for path in settings.keys_files:
            read_keys(path)


def _check_adapters(settings: ServeSettings, is_native: bool) -> None:
    """Raises ConfigurationError if the worker would take no adapters, or not one of these: otherwise only the first
    request would show it."""
    on_gpu = settings.device == "cuda"
    max_rank = settings.max_adapter_rank or (MAX_RANK_ON_GPU if on_gpu else MAX_RANK)
    for each in settings.adapters:
        if settings.max_adapters == 0 or (settings.max_adapters is None and on_gpu):
            by_default = "" if settings.max_adapters == 0 else " by default on cuda"
            problem = f"--max-adapters is 0{by_default}; give it a number above 0"
        elif not is_native:
            problem = "this model runs through transformers' code, which takes no adapters; leave --adapters out"
        elif max_rank < MAX_RANK and (rank := read_adapter(each.partition("=")[2]).rank) > max_rank:
            problem = f"its rank is {rank}, and --max-adapter-rank {max_rank}; raise that to at least the rank"
        else:
            continue
        raise ConfigurationError(f"--adapters has {each}: {problem}")


def check_servable(settings: ServeSettings) -> None:
    """Checks before any process starts whether these settings can work here. ConfigurationError, one line."""
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        raise ConfigurationError(f"not installed: {', '.join(missing)}; install quire-llm[all]")
    check_installed(settings.otlp_traces_endpoint)
    parts = [settings.of_model(model) for model in settings.served_models]
    for part in parts:
        _check_model(part)
    check_memory(parts)
    _check_files(settings)
    if settings.grpc_port and settings.grpc_port == settings.http_port:
        raise ConfigurationError(f"--grpc-port and --http-port are both {settings.grpc_port}; they must differ")


def _check_model(settings: ServeSettings) -> None:
    """Checks one model with its settings. Raises ConfigurationError."""
    model = resolve_model(settings.served_models[0].source)
    weight_files(model)
    is_native = settings.model_impl != "transformers"
    if not is_gguf(model):
        # Worker and gateway each read the whole vocabulary of a GGUF file, and report its errors.
        described = ModelDirectory.open(model)
        described.tokenizer_json()
        is_native = is_native and described.architecture in SUPPORTED_ARCHITECTURES
    _check_adapters(settings, is_native)
