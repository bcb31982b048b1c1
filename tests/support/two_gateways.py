"""Two whole gateways in front of real schedulers, whose workers are fake."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from grpc_health.v1 import health_pb2

from quire.scheduler.v1.scheduler_pb2_grpc import SchedulerServiceStub
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.grpc_types import health_stub
from tests.support.scheduler_process import running_scheduler, until_state, wait_attached
from worker_svc.step import WorkerInfo


class LlamaWorkerConfig(FakeWorkerConfig):
    """Reports the embedded model's architecture, since the gateways use that model's tokenizer."""

    def info(self) -> WorkerInfo:
        info = FakeWorkerConfig.info(self)
        return replace(info, model=replace(info.model, architecture="LlamaForCausalLM"))


@dataclass(frozen=True)
class TwoGateways:
    """Two gateways, both connected to all schedulers."""

    first: RunningGateway
    second: RunningGateway
    schedulers: tuple[SchedulerServiceStub, ...]
    workers: tuple[FakeWorker, ...]

    def stand_still(self) -> None:
        """No request ends by itself from now on."""
        for worker in self.workers:
            worker.hang.set()

    @property
    def both(self) -> tuple[RunningGateway, RunningGateway]:
        return self.first, self.second

    @property
    def scheduler(self) -> SchedulerServiceStub:
        """The first or only scheduler."""
        return self.schedulers[0]


@contextlib.asynccontextmanager
async def two_gateways(
    directory: Path, *, num_replicas: int = 1, script: tuple[int, ...] = (), **settings
) -> AsyncIterator[TwoGateways]:
    """Runs all until the block ends; a step takes 2 ms, and durable requests wait 5 s for a caller. `settings` apply to
    both gateways; `script` is the output of all sequences, if their seeds do not determine it."""
    async with contextlib.AsyncExitStack() as stack:
        sockets = [directory / f"s{number}.sock" for number in range(num_replicas)]
        replicas = [await stack.enter_async_context(_replica(socket, script)) for socket in sockets]
        schedulers, workers = zip(*replicas, strict=True)
        settings |= {"schedulers": tuple(f"unix:{socket}" for socket in sockets)}
        gateways = [await stack.enter_async_context(running_gateway(**settings)) for _ in range(2)]
        for scheduler in schedulers:
            await until_state(scheduler, lambda state: state.connected_gateways == len(gateways))
        for gateway in gateways:
            await _wait_serving(gateway)
        first, second = gateways
        yield TwoGateways(first, second, schedulers, workers)


@contextlib.asynccontextmanager
async def _replica(socket: Path, script: tuple[int, ...]) -> AsyncIterator[tuple[SchedulerServiceStub, FakeWorker]]:
    worker = FakeWorker(LlamaWorkerConfig(step_seconds=0.002, vocab_size=2080 if script else 1000, script=script))
    address = await worker.start()
    try:
        async with running_scheduler(str(socket), address, durable_grace=5.0) as scheduler:
            await wait_attached(scheduler)
            yield scheduler, worker
    finally:
        await worker.stop()


async def _wait_serving(gateway: RunningGateway) -> None:
    """A gateway is ready once it has read a scheduler's welcome."""
    watch = health_stub(gateway.channel).Watch(health_pb2.HealthCheckRequest(), timeout=30)
    async for answer in watch:
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return
