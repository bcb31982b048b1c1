"""All processes of one replica, as `quire serve` runs them, for tests that use them as a client would."""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from quire.client import AsyncClient, ClientTls
from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from quire_cli.supervisor import LocalServer, ServeSettings
from quire_cli.supervisor.commands import Programs, worker_name
from tests.support.forks import SERVICES, WORKER, forked
from tests.support.model_flags import with_models
from tests.support.scheduler_process import until, wait_nothing_in_use


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


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready, a client of its public API, and a stub of its scheduler."""

    server: LocalServer
    client: AsyncClient
    scheduler: scheduler_pb2_grpc.SchedulerServiceStub

    async def state(self) -> scheduler_pb2.GetStateResponse:
        return await self.scheduler.GetState(scheduler_pb2.GetStateRequest(), wait_for_ready=True, timeout=60)

    async def num_live(self) -> int:
        """How many requests the scheduler has."""
        state = await self.state()
        return state.running_requests + state.waiting_requests + state.swapped_requests

    async def until_live(self, num_requests: int) -> None:
        async def are_live() -> bool:
            return await self.num_live() == num_requests

        await until(are_live)

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """The worker is stopped in the block, so no step ends: no request ends by itself, and others wait."""
        ranks = range(self.server._settings.tensor_parallel_size)
        # Groups, as a forked service is two processes.
        groups = [self.server.process(worker_name(rank)).pid for rank in ranks]
        for group in groups:
            os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            for group in groups:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(group, signal.SIGCONT)

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
    own: dict[str, Any] = {
        "grpc_port": 0,
        "http_port": 0,
        "num_threads": 1,
        "log_level": "warning",
        "drain_timeout": 5.0,
    }
    values = own | with_models(settings)
    async with LocalServer(ServeSettings(**values), programs=programs or forked_programs()) as server:
        await server.wait_ready()
        async with (
            AsyncClient(server.grpc_address, tls=client_tls) as client,
            open_channel(server.scheduler_address) as channel,
        ):
            served = Served(server, client, scheduler_pb2_grpc.SchedulerServiceStub(channel))
            yield served
            await wait_nothing_in_use(served.scheduler)
