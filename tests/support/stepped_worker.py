"""A fake worker that runs one step at a time, when the test says so."""

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from quire.scheduler.v1 import scheduler_pb2_grpc
from tests.support.fake_runner import Switch
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.scheduler_process import running_scheduler, state_of, until, wait_attached


class StepGate(Switch):
    """Set at first. While it is set, each `let_one_pass` lets one step go on."""

    def __init__(self) -> None:
        super().__init__()
        self._passes = threading.Semaphore(0)
        self.set()

    def let_one_pass(self) -> None:
        self._passes.release()

    def clear(self) -> None:
        """Lets all pass, whoever waits included."""
        super().clear()
        self._passes.release()

    def wait_until_clear(self) -> None:
        if not self._is_clear.is_set():
            self._passes.acquire()


class SteppedWorker(FakeWorker):
    """Its device waits before each step."""

    def __init__(self, config: FakeWorkerConfig) -> None:
        super().__init__(config)
        self.gate = StepGate()
        self._runner.hang = self.gate


class SteppedScheduler:
    """A scheduler with one step in flight, which was planned and does not go on before `advance`."""

    def __init__(self, stub: scheduler_pb2_grpc.SchedulerServiceStub, gate: StepGate) -> None:
        self.stub = stub
        self._gate = gate

    async def wait_planned(self, step_id: int) -> None:
        """Returns once this step was planned."""

        async def is_planned() -> bool:
            return (await state_of(self.stub)).last_step_id >= step_id

        await until(is_planned)

    async def advance(self) -> None:
        """Ends the step in flight; returns once the next one was planned."""
        planned = (await state_of(self.stub)).last_step_id
        self._gate.let_one_pass()
        await self.wait_planned(planned + 1)


@asynccontextmanager
async def stepped_scheduler(directory: Path, config: FakeWorkerConfig) -> AsyncIterator[SteppedScheduler]:
    """Serves until the block ends; what is still live then is dropped."""
    worker = SteppedWorker(config)
    address = await worker.start(f"unix:{directory / 'w.sock'}")
    try:
        async with running_scheduler(str(directory / "s.sock"), address, max_steps_in_flight=1) as stub:
            await wait_attached(stub)
            yield SteppedScheduler(stub, worker.gate)
            worker.gate.clear()
    finally:
        await worker.stop()
