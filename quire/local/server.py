"""All processes of one machine, from the first check to the last socket."""

import asyncio
import itertools
import os
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from quire.local import preflight
from quire.local.backoff import RestartBackoff
from quire.local.canary import wait_until_served
from quire.local.commands import Commands, Programs, child_environ, gateway_name, worker_name
from quire.local.probe_key import ProbeKey
from quire.local.reserved_port import ReservedPort
from quire.local.run_directory import RunDirectory
from quire.local.settings import ServeSettings
from quire.local.standard_error import tell
from quire.local.supervised_process import ServiceSpec, SupervisedProcess
from quire.local.watchdog import HangLimits, watch
from quire.rpc.address import free_port

# A gateway prints a line on stdout that begins like this, once it listens on both ports, and flushes it.
_LISTENING = "quire-gateway: listening "
# After its live requests have drained, a gateway needs this long at most to end; the others have nothing to wait for.
_EXIT_GRACE_S = 5.0


def report_on_stderr(line: str) -> None:
    """Tells the user how starting, restarting and stopping go."""
    tell(f"quire: {line}")


class LocalServer:
    """Worker, scheduler and gateways of one replica as supervised child processes.

    The gateways listen on the same two ports, among which the kernel spreads new connections. Each port is reserved
    until the server stops, so that a gateway that is started again finds it free.

    An async context manager: entering starts the processes and returns when all gateways listen, leaving stops them in
    order, or kills them where an exception leaves the block. No process, socket or directory stays behind.

    Raises on entering:
        ConfigurationError: the settings cannot be served here, or a service refused them (ServiceRefused).
    """

    def __init__(
        self,
        settings: ServeSettings,
        *,
        programs: Programs | None = None,
        report: Callable[[str], None] = report_on_stderr,
    ) -> None:
        self._settings = settings
        self._report = report
        self._programs = programs or Programs()
        self._ports: list[ReservedPort] = []
        self._directory: RunDirectory | None = None
        self._commands: Commands | None = None
        self._probe_key: ProbeKey | None = None
        self._not_listening = {gateway_name(number) for number in range(settings.gateways)}
        self._all_listen = asyncio.Event()
        self._stages: list[list[SupervisedProcess]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: list[asyncio.Task[None]] = []

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
        """Where the scheduler answers GetState, once entered."""
        return self._started().scheduler_address

    def gateway_address(self, number: int) -> str:
        """Where one gateway alone serves gRPC, once entered. Never encrypted; the directory that it lies in is ours."""
        return self._started().gateway_address(number)

    def process(self, name: str) -> SupervisedProcess:
        """The process "worker" (of further ranks "worker-1" and so on), "scheduler" or "gateway" (further ones
        "gateway-1" and so on), once entered.

        KeyError for another name.
        """
        return {process.name: process for process in itertools.chain(*self._stages)}[name]

    async def __aenter__(self) -> Self:
        try:
            self._commands = self._prepare()
            self._stages = self._make_processes(self._commands)
            self._report(f"starting worker, scheduler and {self._describe_gateways()}")
            # Workers take longest.
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
            QuireError: a request failed for another reason than that nobody serves yet.
        """
        await self._unless_failed(asyncio.ensure_future(self._canaries()))

    async def wait_failed(self) -> None:
        """Waits until a service refuses its configuration and raises ServiceRefused; for ever where none does."""
        await self._unless_failed(asyncio.get_running_loop().create_future())

    async def stop(self) -> None:
        """Stops all in order. Gateways finish their live requests first, for up to the drain timeout. Idempotent."""
        for watching in self._watches:
            watching.cancel()
        try:
            for number, stage in enumerate(self._stages):
                grace_s = _EXIT_GRACE_S + (self._settings.drain_timeout if number == 0 else 0.0)
                await asyncio.gather(*(process.stop(grace_s) for process in stage))
            await asyncio.gather(*self._tasks, *self._watches, return_exceptions=True)
        finally:
            self.kill()
            for port in self._ports:
                port.release()
            if self._directory is not None:
                self._directory.remove()

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
        """One after the other: while the model loads, the first one waits for all."""
        api_key = None if self._probe_key is None else self._probe_key.key
        commands = self._started()
        for number in commands.gateways:
            await wait_until_served(commands.gateway_address(number), api_key, self._report)

    def _started(self) -> Commands:
        if self._commands is None:
            raise RuntimeError("nothing is started yet")
        return self._commands

    def _listening(self) -> tuple[str, str]:
        if not self._all_listen.is_set():
            raise RuntimeError("the gateway does not listen yet")
        grpc, http = self._ports
        return str(grpc.address), str(http.address)

    def _describe_gateways(self) -> str:
        return "gateway" if self._settings.gateways == 1 else f"{self._settings.gateways} gateways"

    def _prepare(self) -> Commands:
        """What must be there before the first process."""
        settings = self._settings
        preflight.check(settings)
        self._ports.append(ReservedPort.reserve(settings.grpc_host, settings.grpc_port))
        self._ports.append(ReservedPort.reserve(settings.http_host, settings.http_port))
        self._directory = RunDirectory.make()
        if settings.keys_files:
            self._probe_key = ProbeKey.make(self._directory.path)
        return Commands(
            settings,
            self._programs,
            self._directory.path,
            meeting_port=free_port() if settings.tensor_parallel_size > 1 else 0,
            probe_keys=None if self._probe_key is None else self._probe_key.keys_file,
        )

    def _read_gateway_line(self, name: str, line: str) -> None:
        if not line.startswith(_LISTENING):
            tell(line)
            return
        self._not_listening.discard(name)
        if not self._not_listening:
            self._all_listen.set()

    def _watch_for_hangs(self, commands: Commands) -> list[asyncio.Task[None]]:
        settings = self._settings
        if settings.hang_timeout == 0:
            return []
        limits = HangLimits(settings.hang_timeout, settings.start_timeout)
        return [
            asyncio.create_task(
                watch(process, commands.socket(process.name), limits, self._report), name=f"watch {process.name}"
            )
            for process in itertools.chain(*self._stages)
        ]

    def _make_processes(self, commands: Commands) -> list[list[SupervisedProcess]]:
        """In the order in which they stop: each drains while those behind it still serve, gateways all at once."""
        environ = child_environ(os.environ)
        grpc_port, http_port = (port.address.port for port in self._ports)
        gateways = [
            ServiceSpec(
                gateway_name(number),
                partial(commands.gateway, number, grpc_port, http_port),
                environ,
                partial(self._read_gateway_line, gateway_name(number)),
                # The others serve on, and a worker with its model is worth more than an early word.
                is_proven=self._all_listen.is_set,
            )
            for number in commands.gateways
        ]
        scheduler = ServiceSpec("scheduler", commands.scheduler, environ)
        # The ranks meet at the first one, so it ends last.
        workers = [
            ServiceSpec(worker_name(rank), partial(commands.worker, rank), environ) for rank in reversed(commands.ranks)
        ]
        stages = [gateways, [scheduler], *([worker] for worker in workers)]
        return [
            [SupervisedProcess(spec, report=self._report, backoff=RestartBackoff()) for spec in stage]
            for stage in stages
        ]
