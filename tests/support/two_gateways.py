"""Two whole gateways in front of one real scheduler, whose worker is fake."""

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

from quire.gateway.v1 import generation_pb2
from quire.scheduler.v1 import scheduler_pb2_grpc
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.gateway_process import RunningGateway, running_gateway
from tests.support.scheduler_process import running_scheduler, wait_attached
from worker_svc.info import WorkerInfo


class _LlamaWorkerConfig(FakeWorkerConfig):
    """Says that it serves the embedded model's architecture, as the gateways' tokenizer is that model's."""

    def info(self) -> WorkerInfo:
        info = FakeWorkerConfig.info(self)
        return replace(info, model=replace(info.model, architecture="LlamaForCausalLM"))


@dataclass(frozen=True)
class _Address:
    """What `running_gateway` asks of a scheduler."""

    address: str
    connections: int = 1

    async def until(self, condition) -> None:
        assert condition()


@dataclass(frozen=True)
class TwoGateways:
    """Both are connected to the scheduler."""

    first: RunningGateway
    second: RunningGateway
    scheduler: scheduler_pb2_grpc.SchedulerServiceStub

    @property
    def both(self) -> tuple[RunningGateway, RunningGateway]:
        return self.first, self.second


@contextlib.asynccontextmanager
async def two_gateways(directory: Path) -> AsyncIterator[TwoGateways]:
    """Runs all until the block ends; a step takes 2 ms, and durable requests wait 5 s for a caller."""
    worker = FakeWorker(_LlamaWorkerConfig(step_seconds=0.002))
    address = await worker.start()
    socket = str(directory / "s.sock")
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(worker.stop)
        scheduler = await stack.enter_async_context(running_scheduler(socket, address, durable_grace=5.0))
        await wait_attached(scheduler)
        gateways = [await stack.enter_async_context(running_gateway(_Address(f"unix:{socket}"))) for _ in range(2)]
        for gateway in gateways:
            await gateway.generation.Generate(generation_pb2.GenerateRequest(text="x"), timeout=10)
        yield TwoGateways(*gateways, scheduler)
