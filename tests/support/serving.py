"""All processes of one replica, as `quire serve` runs them, for tests that talk to them as a user would."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from quire.client import AsyncClient, ClientTls
from quire.local import LocalServer, ServeSettings
from quire.local.commands import Programs
from quire.rpc.channel import open_channel
from quire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.support.scheduler_process import wait_nothing_in_use


@dataclass(frozen=True, slots=True)
class Served:
    """A server that is ready, a client of its public API, and a stub of its scheduler."""

    server: LocalServer
    client: AsyncClient
    scheduler: scheduler_pb2_grpc.SchedulerServiceStub

    async def state(self, *, include_sequences: bool = False) -> scheduler_pb2.GetStateResponse:
        request = scheduler_pb2.GetStateRequest(include_sequences=include_sequences)
        return await self.scheduler.GetState(request, wait_for_ready=True, timeout=30)


@contextlib.asynccontextmanager
async def serving(
    *, client_tls: ClientTls | None = None, programs: Programs | None = None, **settings
) -> AsyncIterator[Served]:
    """Starts all processes, waits until a request succeeds, and checks at the end that no block is in use."""
    values = {"grpc_port": 0, "http_port": 0, "num_threads": 2, "log_level": "warning", "drain_timeout": 5.0} | settings
    async with LocalServer(ServeSettings(**values), programs=programs or Programs()) as server:
        await server.wait_ready()
        async with (
            AsyncClient(server.grpc_address, tls=client_tls) as client,
            open_channel(server.scheduler_address) as channel,
        ):
            served = Served(server, client, scheduler_pb2_grpc.SchedulerServiceStub(channel))
            yield served
            await wait_nothing_in_use(served.scheduler)
