"""All processes of one machine, from the first check to the last socket."""

import asyncio
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from types import TracebackType
from typing import Self

from quire.client import AsyncClient, ClientTls, GenerationOptions
from quire.local import preflight
from quire.local.backoff import RestartBackoff
from quire.local.commands import Commands, Programs, child_environ, worker_name
from quire.local.probe_key import ProbeKey
from quire.local.run_directory import RunDirectory
from quire.local.settings import ServeSettings
from quire.local.supervised_process import ServiceSpec, SupervisedProcess
from quire.local.watchdog import watch
from quire.rpc.address import free_port
from quire.rpc.errors import ResourceExhausted, Unavailable
from quire.rpc.tls import Role, TlsIdentity

# The gateway prints this line on stdout, once it listens on both ports, and flushes it:
#     quire-gateway: listening grpc=HOST:PORT http=HOST:PORT
_LISTENING = re.compile(r"quire-gateway: listening grpc=(?P<grpc>\S+) http=(?P<http>\S+)")

_CANARY = GenerationOptions(max_tokens=1, temperature=0.0)
_CANARY_RETRY_S = 0.05
_PROGRESS_EVERY_S = 5.0
# After its live requests have drained, a gateway needs this long at most to end; the others have nothing to wait for.
_EXIT_GRACE_S = 5.0


def report_on_stderr(line: str) -> None:
    """Tells the user how starting, restarting and stopping go."""
    print(f"quire: {line}", file=sys.stderr, flush=True)


class LocalServer:
    """Worker, scheduler and gateway of one replica as supervised child processes.

    An async context manager: entering starts the processes and returns when the gateway listens, leaving stops them in
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
        self._directory: RunDirectory | None = None
        self._commands: Commands | None = None
        self._probe_key: ProbeKey | None = None
        self._addresses: asyncio.Future[tuple[str, str]] | None = None
        self._processes: list[SupervisedProcess] = []
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
        if self._commands is None:
            raise RuntimeError("the scheduler is not started yet")
        return self._commands.scheduler_address

    def process(self, name: str) -> SupervisedProcess:
        """The process "worker" (of further ranks "worker-1" and so on), "scheduler" or "gateway", once entered.

        KeyError for another name.
        """
        return {process.name: process for process in self._processes}[name]

    async def __aenter__(self) -> Self:
        try:
            preflight.check(self._settings)
            self._addresses = asyncio.get_running_loop().create_future()
            self._directory = RunDirectory.make()
            if self._settings.keys_files:
                self._probe_key = ProbeKey.make(self._directory.path)
            probe_keys = None if self._probe_key is None else self._probe_key.keys_file
            meeting_port = free_port() if self._settings.tensor_parallel_size > 1 else 0
            self._commands = Commands(
                self._settings, self._programs, self._directory.path, meeting_port, probe_keys=probe_keys
            )
            self._processes = self._make_processes(self._commands)
            self._report("starting worker, scheduler and gateway")
            self._tasks = [process.start() for process in reversed(self._processes)]
            self._watches = self._watch_for_hangs(self._commands)
            await self._unless_failed(self._addresses)
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
        """Waits until a request succeeds: sends a real one of one token, again and again, while the model loads.

        Raises:
            ServiceRefused: a service refused its configuration.
            QuireError: the request failed for another reason than that nobody serves yet.
        """
        await self._unless_failed(asyncio.ensure_future(self._canary()))

    async def wait_failed(self) -> None:
        """Waits until a service refuses its configuration and raises ServiceRefused; for ever where none does."""
        await self._unless_failed(asyncio.get_running_loop().create_future())

    async def stop(self) -> None:
        """Stops all in order. The gateway finishes its live requests first, for up to the drain timeout. Idempotent."""
        for watching in self._watches:
            watching.cancel()
        try:
            for process in self._processes:
                grace_s = self._settings.drain_timeout if process.name == "gateway" else 0.0
                await process.stop(grace_s + _EXIT_GRACE_S)
            await asyncio.gather(*self._tasks, *self._watches, return_exceptions=True)
        finally:
            self.kill()
            if self._directory is not None:
                self._directory.remove()

    def kill(self) -> None:
        """Kills all processes at once; `stop` returns soon after."""
        for process in self._processes:
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

    async def _canary(self) -> None:
        loop = asyncio.get_running_loop()
        started_at = told_at = loop.time()
        api_key = None if self._probe_key is None else self._probe_key.key
        async with AsyncClient(self.grpc_address, api_key=api_key, tls=self._canary_tls()) as client:
            while True:
                try:
                    await client.generate([0], _CANARY)
                    return
                except (Unavailable, ResourceExhausted):
                    if loop.time() - told_at >= _PROGRESS_EVERY_S:
                        told_at = loop.time()
                        self._report(f"waiting for the model to be loaded ({told_at - started_at:.0f} s)")
                    await asyncio.sleep(_CANARY_RETRY_S)

    def _canary_tls(self) -> ClientTls | None:
        directory = self._settings.tls_dir
        if directory is None:
            return None
        identity = TlsIdentity.of(directory, Role.OPERATOR)
        return ClientTls(identity.authority, identity.certificate, identity.key, server_name="localhost")

    def _listening(self) -> tuple[str, str]:
        if self._addresses is None or not self._addresses.done():
            raise RuntimeError("the gateway does not listen yet")
        return self._addresses.result()

    def _gateway_command(self, commands: Commands) -> list[str]:
        """With the ports that were picked at the first start: a restarted gateway must be where clients know it."""
        if self._addresses is None or not self._addresses.done():
            return commands.gateway(self._settings.grpc_port, self._settings.http_port)
        grpc_port, http_port = (int(address.rpartition(":")[2]) for address in self._addresses.result())
        return commands.gateway(grpc_port, http_port)

    def _read_gateway_line(self, line: str) -> None:
        match = _LISTENING.fullmatch(line)
        if match is None:
            print(line, file=sys.stderr, flush=True)
        elif self._addresses is not None and not self._addresses.done():
            self._addresses.set_result((match["grpc"], match["http"]))

    def _watch_for_hangs(self, commands: Commands) -> list[asyncio.Task[None]]:
        timeout_s = self._settings.hang_timeout
        if timeout_s == 0:
            return []
        addresses = {worker_name(rank): commands.worker_address(rank) for rank in commands.ranks}
        addresses["scheduler"] = commands.scheduler_address
        return [
            asyncio.create_task(watch(self.process(name), address, timeout_s, self._report), name=f"watch {name}")
            for name, address in addresses.items()
        ]

    def _make_processes(self, commands: Commands) -> list[SupervisedProcess]:
        """In the order in which they stop: each drains while those behind it still serve."""
        environ = child_environ(os.environ)
        specs = (
            ServiceSpec("gateway", lambda: self._gateway_command(commands), environ, self._read_gateway_line),
            ServiceSpec("scheduler", commands.scheduler, environ),
            # The ranks meet at the first one, so it ends last.
            *(
                ServiceSpec(worker_name(rank), partial(commands.worker, rank), environ)
                for rank in reversed(commands.ranks)
            ),
        )
        return [SupervisedProcess(spec, report=self._report, backoff=RestartBackoff()) for spec in specs]
