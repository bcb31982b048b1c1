"""One loaded worker: who may command it, what its rows hold, and the threads that run its steps.

All methods but the device thread's own are called from the event loop.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

from quire.rpc.errors import QuireError, Unavailable
from worker_svc.device.device_loop import DeviceLoop, StepLane, StepRunner
from worker_svc.info import WorkerInfo
from worker_svc.protocol.convert import StepDecoder
from worker_svc.protocol.row_ledger import RowLedger
from worker_svc.protocol.session import Session, Sessions
from worker_svc.steps import AdmittedStep, SealedBlocks, Step
from worker_svc.superseded import SupersededError

_NO_STEP = 0
"""In the place of a step's number, before the first step of a session."""
_OTHERS_COME_S = 3.0
"""Less than a scheduler waits for the answer, so that it hears what is missing."""


class SealingRunner(StepRunner, Protocol):
    """A runner that knows which blocks are final."""

    def sealed_blocks(self) -> SealedBlocks: ...


class Worker:
    """A worker that is ready for steps."""

    def __init__(
        self,
        info: WorkerInfo,
        runner: SealingRunner,
        device_loop: DeviceLoop,
        agree: Callable[[int, int], object] = lambda epoch, step_id: None,
    ) -> None:
        """`agree` is `Ranks.agree`, for a worker that shares its model with others."""
        self.info = info
        self.decoder = StepDecoder(info)
        self.runner = runner
        self._device_loop = device_loop
        self._agree = agree
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
            self._supersede(SupersededError(f"epoch {epoch} has taken this worker over"))
        self._supersede = on_superseded
        self._ledger.reset()
        return session

    async def settle(self, epoch: int, others_come_s: float = _OTHERS_COME_S) -> SealedBlocks:
        """Waits until all steps of earlier sessions are finished; the blocks whose content is final then.

        Of several ranks each waits for the others to come to this epoch. One that waits in a step which its scheduler
        did not send to all drops it meanwhile.

        Raises:
            SupersededError: another rank is at a higher epoch.
            Unavailable: no step runs, and not all ranks have come within that time. The device waits for them on, until
                they come to this epoch or to a higher one.
        """

        def take_inventory() -> SealedBlocks:
            self._agree(epoch, _NO_STEP)
            return self.runner.sealed_blocks()

        inventory = self._device_loop.call(take_inventory)
        settled = asyncio.wrap_future(inventory)
        try:
            while not settled.done():
                await asyncio.wait([settled], timeout=others_come_s)
                if not settled.done() and not self.busy_ms() and self.info.world_size > 1:
                    raise self._others_missing(epoch, others_come_s)
            return settled.result()
        finally:
            # At once: the future of the loop would tell it on in the loop's next turn.
            inventory.cancel()

    def _others_missing(self, epoch: int, others_come_s: float) -> Unavailable:
        return Unavailable(
            f"this is rank {self.info.rank} of {self.info.world_size}, and not all were attached under epoch {epoch} "
            f"within {others_come_s:g} s; --workers of a scheduler must name all ranks of one group, in order"
        )

    def admit(self, step: Step) -> AdmittedStep:
        """Checks a step against the rows and takes it over. InvalidArgument when it contradicts them."""
        return AdmittedStep(step, self._ledger.admit(step))

    def submit(self, lane: StepLane, admitted: AdmittedStep) -> None:
        """Queues an admitted step."""
        self._device_loop.submit(lane, admitted)

    def busy_ms(self) -> int:
        """How long the device has been in its current step; 0 when idle."""
        return self._device_loop.busy_ms()
