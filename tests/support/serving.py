"""The kit's server with forks as its processes (tests.support.forks), for tests that use it as a client would."""

import asyncio
import contextlib
import dataclasses
import json
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from quire.client import AsyncClient, ClientTls
from quire.rpc.channel import open_channel
from quire.runtime.settings import to_argv
from quire.scheduler.v1 import scheduler_pb2
from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from quire.testing import EmbeddedServer
from quire_cli.supervisor import ServeSettings
from quire_cli.supervisor.commands import Programs
from tests.support.forks import SERVICES, WORKER, forked
from tests.support.model_flags import with_models
from tests.support.scheduler_process import num_live, state_of, until_state, wait_nothing_in_use


def forked_worker(module: str = "worker_svc") -> tuple[str, ...]:
    """The real worker, or a stand-in that extends it; its parent process has imported torch."""
    return forked(module, *WORKER)


@contextlib.contextmanager
def running_fork(command: tuple[str, ...], *words: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a command of `forked` with these words; kills it at the end of the block if it still runs."""
    pipe = subprocess.PIPE
    with subprocess.Popen([*command, *words], bufsize=1, text=True, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def forked_programs() -> Programs:
    """The real services, as forks."""
    scheduler, gateway = (forked(module, *SERVICES) for module in ("scheduler_svc", "gateway"))
    return Programs(forked_worker(), scheduler, gateway)


def forked_quire(programs: Programs | None = None) -> tuple[str, ...]:
    """The program `quire` as a fork, whose services are these programs, by default forks."""
    of_services = json.dumps(dataclasses.asdict(programs or forked_programs()))
    return (*forked("tests.support.quire_of_forks", *SERVICES), of_services)


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready, a client of its public API, and a stub of its scheduler."""

    server: EmbeddedServer
    client: AsyncClient
    scheduler: SchedulerServiceStub
    started: Mapping[str, int]
    """The process ids of its services when it became ready."""

    async def state(self) -> scheduler_pb2.GetStateResponse:
        return await state_of(self.scheduler)

    async def num_live(self) -> int:
        """How many requests the scheduler has."""
        return num_live(await self.state())

    async def until_live(self, num_requests: int) -> None:
        await until_state(self.scheduler, lambda state: num_live(state) == num_requests)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """The worker is stopped in the block, so no step ends: no request ends by itself, and others wait."""
        with self.server.paused(*(name for name in self.server.services if name.startswith("worker"))):
            yield

    async def kill(self, name: str) -> None:
        """Kills a service, and waits until its successor was started."""
        await asyncio.to_thread(self.server.kill, name)

    async def wait_ready(self) -> None:
        """Waits until it serves again after any kill."""
        await asyncio.to_thread(self.server.wait_ready)

    async def together(self, calls: Iterable[Coroutine[Any, Any, Any]]) -> list[Any]:
        """The answers to these requests, which all reach the scheduler before any of them gets a token; no other
        request may run."""
        with self.standing_still():
            asked = [asyncio.create_task(call) for call in calls]
            await self.until_live(len(asked))
        return await asyncio.gather(*asked)


@contextlib.asynccontextmanager
async def serving(
    *, client_tls: ClientTls | None = None, programs: Programs | None = None, **settings
) -> AsyncIterator[Served]:
    """Starts all processes, waits until a request succeeds, and checks at the end that no block is in use.

    `programs` are forks of processes that have imported the services' modules, unless the test says otherwise.
    A worker has one thread unless `settings` say otherwise: several tests run at once, and the threads of a small
    model mostly wait for each other.
    """
    own: dict[str, Any] = {"num_threads": 1, "log_level": "warning", "drain_timeout": 5.0}
    server = EmbeddedServer(*to_argv(ServeSettings, own | with_models(settings)), program=forked_quire(programs))
    await asyncio.to_thread(server.start)
    try:
        async with (
            AsyncClient(server.grpc_address, tls=client_tls) as client,
            open_channel(server.scheduler_address) as channel,
        ):
            served = Served(server, client, SchedulerServiceStub(channel), server.services)
            yield served
            await wait_nothing_in_use(served.scheduler)
    finally:
        await asyncio.to_thread(server.stop)
