"""The threads that run steps, so that the event loop never waits for the device.

One thread launches steps in order. If the device works asynchronously, a second one waits for their outputs, so that
a step can be launched while the previous one runs. A process whose device hangs or is lost ends itself, and its
supervisor starts another one.
"""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from quire.rpc.process import leave_process
from quire.runtime import clock
from worker_svc.step import AdmittedStep, StepOutput, SupersededError

Job = TypeVar("Job")
T = TypeVar("T")

_HANG_STEP_TIMEOUTS = 2.0
"""The scheduler gives a step up after one timeout. A device that needs less than this, because kernels were compiled,
is attached again and keeps its model; one that needs more is not expected to recover."""
_MAX_CHECK_INTERVAL_S = 1.0
_logger = logging.getLogger(__name__)


async def end_when_hung(
    busy_ms: Callable[[], int], step_timeout_s: float, leave: Callable[[str], object] = leave_process
) -> None:
    """Calls `leave` and returns when the device has been in its current step for too long at two checks in a row. After
    a pause of the whole process, a working device is in another step at the second check."""
    limit_s = _HANG_STEP_TIMEOUTS * step_timeout_s
    interval_s = min(step_timeout_s / 4, _MAX_CHECK_INTERVAL_S)
    num_too_long = 0
    while num_too_long < 2:
        await asyncio.sleep(interval_s)
        num_too_long = num_too_long + 1 if busy_ms() > limit_s * 1e3 else 0
    leave(f"the device hangs: it has been in one step for more than {limit_s:g} s")


class Launched(Protocol):
    """A step whose work is queued on the device."""

    def wait(self) -> StepOutput: ...


class StepRunner(Protocol):
    """Runs steps: `ModelRunner`, or a fake."""

    @property
    def is_asynchronous(self) -> bool: ...

    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> Launched: ...


@dataclass(slots=True, eq=False)
class StepLane:
    """The steps of one session. When one of them fails, the later ones are dropped.

    Both callbacks run in a device thread: `on_output` once a step, or `on_failure` once for the lane.
    """

    on_output: Callable[[StepOutput], object]
    on_failure: Callable[[int, BaseException], object]
    has_failed: bool = False
    """No further step is launched."""
    has_ended: bool = False
    """The failure was reported, after the outputs of all earlier steps."""


@dataclass(frozen=True, slots=True)
class _StepJob:
    lane: StepLane
    admitted: AdmittedStep
    queued_at: float


@dataclass(frozen=True, slots=True)
class _CallJob(Generic[T]):
    function: Callable[[], T]
    future: "Future[T]"

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            result = self.function()
        except BaseException as error:
            self.future.set_exception(error)
        else:
            self.future.set_result(result)


@dataclass(frozen=True, slots=True)
class _NotLaunched:
    """A step that could not be launched. It is reported in its turn."""

    error: Exception

    def wait(self) -> StepOutput:
        raise self.error


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step on the device."""

    job: _StepJob
    launched: Launched


class JobThread(Generic[Job]):
    """A thread that takes jobs in order. It does not keep the process from ending."""

    def __init__(self, name: str, start_job: Callable[[Job], "Future[None] | None"]) -> None:
        """`start_job` returns a future to wait for before it is called again with the job, or None once it has begun
        it. It must not raise."""
        self._start_job = start_job
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        # The thread runs in the context of this call, which has a test's failpoints for example.
        self._thread = threading.Thread(target=copy_context().run, args=[self._run], name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, job: Job) -> None:
        """Queues a job."""
        self._jobs.put(job)

    def finish(self, timeout_s: float) -> bool:
        """Ends after the queued jobs; returns False if it has not ended in time."""
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            while (earlier := self._start_job(job)) is not None:
                earlier.result()


class DeviceLoop:
    """Runs steps and calls one after the other, outside the event loop's thread."""

    def __init__(
        self,
        name: str = "device",
        leave: Callable[[str], object] = leave_process,
        thread: Callable[[str, Callable[[Any], "Future[None] | None"]], JobThread[Any]] = JobThread,
    ) -> None:
        """
        Args:
            leave: ends the process, for its supervisor to start another.
            thread: makes each of the threads; a simulation has its own kind.
        """
        self._runner: StepRunner | None = None
        self._is_lost: Callable[[], bool] = lambda: False
        self._on_failure: Callable[[str], object] = lambda _: None
        self._leave = leave
        # Steps on the device, oldest first. Each call on it is one operation of the dict, so no lock is needed.
        self._started_at: dict[int, float] = {}
        self._launcher: JobThread[_StepJob | _CallJob] = thread(f"{name}-launch", self._start_job)
        self._waiter: JobThread[RunningStep | _CallJob] = thread(f"{name}-wait", self._wait)

    def start(self) -> None:
        """Starts the threads."""
        self._launcher.start()
        self._waiter.start()

    def stop(self, timeout_s: float) -> bool:
        """Finishes queued jobs, then ends the threads; returns False if they have not ended in time."""
        deadline = clock.monotonic() + timeout_s
        # In this order, because the second thread waits for jobs that the first one launches.
        return self._launcher.finish(timeout_s) and self._waiter.finish(max(deadline - clock.monotonic(), 0))

    def use(
        self,
        runner: StepRunner,
        is_lost: Callable[[], bool] = lambda: False,
        on_failure: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Sets the runner, before the first `submit`.

        Args:
            is_lost: whether the device accepts no more work from this process; called after an error.
            on_failure: called with an error before that, and before the session hears of it. Not for a superseded step.
        """
        self._runner = runner
        self._is_lost = is_lost
        self._on_failure = on_failure

    def submit(self, lane: StepLane, admitted: AdmittedStep) -> None:
        """Queues a step."""
        self._launcher.put(_StepJob(lane, admitted, clock.monotonic()))

    def call(self, function: Callable[[], T]) -> "Future[T]":
        """Runs a function in the launching thread when all earlier steps are finished, if it is not cancelled yet."""
        future: Future[T] = Future()
        self._launcher.put(_CallJob(function, future))
        return future

    def busy_ms(self) -> int:
        """Milliseconds that the oldest unfinished step has been on the device; 0 if there is none."""
        started = tuple(self._started_at.values())
        return max(int((clock.monotonic() - min(started)) * 1e3), 0) if started else 0

    def _start_job(self, job: _StepJob | _CallJob) -> "Future[None] | None":
        if isinstance(job, _StepJob):
            if not job.lane.has_failed:
                self._launch(job)
        elif self._started_at:
            passed: Future[None] = Future()
            self._waiter.put(_CallJob(lambda: None, passed))
            return passed
        else:
            job.run()
        return None

    def _launch(self, job: _StepJob) -> None:
        assert self._runner is not None
        now = clock.monotonic()
        self._started_at[id(job)] = now
        try:
            launched = self._runner.launch(job.admitted, int((now - job.queued_at) * 1e6))
        except Exception as error:
            job.lane.has_failed = True
            launched = _NotLaunched(error)
        running = RunningStep(job, launched)
        if self._runner.is_asynchronous:
            self._waiter.put(running)
        else:
            self._finish(running)

    def _wait(self, running: RunningStep | _CallJob) -> None:
        if isinstance(running, _CallJob):
            running.run()
        else:
            self._finish(running)

    def _finish(self, running: RunningStep) -> None:
        job = running.job
        try:
            output = running.launched.wait()
        except SupersededError as error:
            _logger.info("step %d is dropped: %s", job.admitted.step.step_id, error)
            self._fail(job, error)
        except Exception as error:
            self._check_device(job, error)
            self._fail(job, error)
        else:
            del self._started_at[id(job)]
            if not job.lane.has_ended:
                job.lane.on_output(output)

    def _check_device(self, job: _StepJob, error: Exception) -> None:
        """Ends the process if it cannot go on after this error."""
        failed = f"step {job.admitted.step.step_id} failed on the device"
        _logger.error(failed, exc_info=error)
        self._on_failure(failed)
        if self._is_lost():
            # The scheduler would take a refusal for a fault of one request after the other.
            self._leave("the device accepts no more work from this process")

    def _fail(self, job: _StepJob, error: Exception) -> None:
        del self._started_at[id(job)]
        lane = job.lane
        lane.has_failed = True
        if not lane.has_ended:
            lane.has_ended = True
            lane.on_failure(job.admitted.step.step_id, error)
