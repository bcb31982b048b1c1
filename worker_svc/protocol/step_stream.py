"""One Run call: attach, then steps in and answers out, with heartbeats between.

The reader judges, checks and queues steps; the device threads post outputs to the event loop; the generator
`responses` sends whatever is ready. An error found by the reader is sent after the answers to all steps before it, so
that the scheduler knows where it stands.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator

from quire.rpc.errors import Internal, QuireError
from worker_svc.device.device_loop import StepLane
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.answer_convert import (
    RunResponse,
    acknowledgement,
    attached_message,
    heartbeat_message,
    result_message,
)
from worker_svc.protocol.convert import RunRequest, StepRequest, step_header, step_of
from worker_svc.protocol.session import Replay, Verdict
from worker_svc.protocol.worker import Worker
from worker_svc.steps import StepOutput
from worker_svc.superseded import SupersededError

_logger = logging.getLogger(__name__)


class _End:
    """The reader has read all, and all is answered."""


class StepStream:
    """The state of one Run call. FailedPrecondition when the epoch is refused."""

    def __init__(self, worker: Worker, metrics: WorkerMetrics, epoch: int, *, heartbeat_interval_s: float) -> None:
        self._worker = worker
        self._metrics = metrics
        self._heartbeat_interval_s = heartbeat_interval_s
        self._outgoing: asyncio.Queue[RunResponse | QuireError | _End] = asyncio.Queue()
        self._idle = asyncio.Event()
        self._idle.set()
        self._session = worker.attach(epoch, on_superseded=self._outgoing.put_nowait)
        post = asyncio.get_running_loop().call_soon_threadsafe
        self._answer = result_message if worker.info.rank == 0 else acknowledgement
        self._lane = StepLane(
            on_output=lambda output: post(self._finish, output),
            on_failure=lambda step_id, error: post(self._fail, step_id, error),
        )

    async def responses(self, requests: AsyncIterator[RunRequest]) -> AsyncGenerator[RunResponse, None]:
        """Serves the call after its first message; raises the QuireError that ends it."""
        session = self._session
        _logger.info("epoch %d attached", session.epoch)
        tasks: list[asyncio.Task[None]] = []
        try:
            sealed = await self._worker.settle(session.epoch)
            self._metrics.attached()
            yield attached_message(session.epoch, self._worker.info, sealed)
            tasks = [asyncio.create_task(self._read(requests)), asyncio.create_task(self._beat())]
            while not isinstance(item := await self._outgoing.get(), _End):
                if isinstance(item, QuireError):
                    raise item
                yield item
        finally:
            session.end()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            _logger.info("epoch %d ended after step %d", session.epoch, session.last_finished_step_id)

    async def _read(self, requests: AsyncIterator[RunRequest]) -> None:
        end: QuireError | _End = _End()
        try:
            async for request in requests:
                self._take(step_of(request))
        except QuireError as error:
            end = error
        except Exception as error:
            _logger.exception("a step could not be taken")
            end = Internal(f"the step could not be taken: {error}", reason="UNEXPECTED")
        await self._idle.wait()
        self._outgoing.put_nowait(end)

    def _take(self, message: StepRequest) -> None:
        """Answers a step from memory, or queues it when it is the next one and valid."""
        verdict = self._session.judge(step_header(message))
        if isinstance(verdict, Replay):
            self._outgoing.put_nowait(self._answer(verdict.output))
        if verdict is not Verdict.RUN:
            return
        admitted = self._worker.admit(self._worker.decoder.decode(message))
        self._session.start(message.step_id)
        self._idle.clear()
        self._worker.submit(self._lane, admitted)

    def _finish(self, output: StepOutput) -> None:
        self._session.finish(output)
        self._metrics.step_finished(output)
        self._outgoing.put_nowait(self._answer(output))
        if not self._session.num_in_flight:
            self._idle.set()

    def _fail(self, step_id: int, error: BaseException) -> None:
        self._session.end()
        if isinstance(error, SupersededError):
            self._outgoing.put_nowait(error)
            return
        self._metrics.step_failed()
        detail = f"step {step_id} failed on the device: {type(error).__name__}: {error}"
        self._outgoing.put_nowait(Internal(detail, reason="STEP_FAILED"))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_interval_s)
            # Whatever else waits to be sent is a sign of life too, and a peer that does not read must not fill memory.
            if self._outgoing.empty():
                beat = heartbeat_message(self._session.last_finished_step_id, self._worker.busy_ms())
                self._outgoing.put_nowait(beat)
