"""One loaded worker: who may command it, what its rows hold, and the threads that run its steps.

All methods but the device thread's own are called from the event loop.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from quire.rpc.errors import FailedPrecondition, QuireError
from worker_svc.convert import StepDecoder
from worker_svc.device_loop import DeviceLoop, StepLane, StepRunner
from worker_svc.info import WorkerInfo
from worker_svc.row_ledger import RowLedger
from worker_svc.session import Session, Sessions
from worker_svc.steps import AdmittedStep, SealedBlocks, Step


class SealingRunner(StepRunner, Protocol):
    """A runner that knows which blocks are final."""

    def sealed_blocks(self) -> SealedBlocks: ...


class Worker:
    """A worker that is ready for steps."""

    def __init__(self, info: WorkerInfo, runner: SealingRunner, device_loop: DeviceLoop) -> None:
        self.info = info
        self.decoder = StepDecoder(info)
        self.runner = runner
        self._device_loop = device_loop
        self._ledger = RowLedger(info.pool, info.model, info.limits)
        self._sessions = Sessions(info.worker_generation, info.limits.max_steps_in_flight)
        self._supersede: Callable[[QuireError], None] | None = None

    def attach(self, epoch: int, on_superseded: Callable[[QuireError], None]) -> Session:
        """Gives the worker to a scheduler: the session before ends and all rows are released.

        Args:
            on_superseded: Called when a higher epoch takes the worker away from this session.

        Raises:
            FailedPrecondition: the epoch is stale, or attached at this moment.
        """
        session = self._sessions.attach(epoch, time.monotonic())
        if self._supersede is not None:
            self._supersede(FailedPrecondition(f"epoch {epoch} has taken this worker over", reason="SUPERSEDED"))
        self._supersede = on_superseded
        self._ledger.reset()
        return session

    async def settle(self) -> SealedBlocks:
        """Waits until all steps of earlier sessions are finished; the blocks whose content is final then."""
        return await asyncio.wrap_future(self._device_loop.call(self.runner.sealed_blocks))

    def admit(self, step: Step) -> AdmittedStep:
        """Checks a step against the rows and takes it over. InvalidArgument when it contradicts them."""
        return AdmittedStep(step, self._ledger.admit(step))

    def submit(self, lane: StepLane, admitted: AdmittedStep) -> None:
        """Queues an admitted step."""
        self._device_loop.submit(lane, admitted)

    def busy_ms(self) -> int:
        """How long the device has been in its current step; 0 when idle."""
        return self._device_loop.busy_ms()
