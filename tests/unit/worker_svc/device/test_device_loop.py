"""The device threads with a stand-in for the runner, whose steps end when the test says so."""

import logging
import queue
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.processes import wait_true
from tests.support.steps import int32, make_step
from worker_svc.device.device_loop import DeviceLoop, StepLane
from worker_svc.step import AdmittedStep, StepOutput, StepTimings, SupersededError

TIMEOUT_S = 30.0


class GatedRunner:
    """Launches at once; a step ends when its gate opens, or fails if the test says so."""

    def __init__(self, *, is_asynchronous: bool) -> None:
        self.is_asynchronous = is_asynchronous
        self.launched: queue.Queue[int] = queue.Queue()
        self.gates: dict[int, threading.Event] = {step_id: threading.Event() for step_id in range(1, 6)}
        self.failing: set[int] = set()
        self.not_launched: dict[int, Exception] = {}

    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> "GatedStep":
        self.launched.put(admitted.step.step_id)
        if (error := self.not_launched.get(admitted.step.step_id)) is not None:
            raise error
        return GatedStep(self, admitted.step.step_id)


class GatedStep:
    def __init__(self, runner: GatedRunner, step_id: int) -> None:
        self._runner = runner
        self._step_id = step_id

    def wait(self) -> StepOutput:
        assert self._runner.gates[self._step_id].wait(TIMEOUT_S)
        if self._step_id in self._runner.failing:
            raise RuntimeError(f"step {self._step_id} burnt")
        none = int32(())
        return StepOutput(self._step_id, none, none, None, (), (), StepTimings(0, 0, 0, 0))


class Outcomes:
    """Results of the steps of one lane."""

    def __init__(self) -> None:
        self.finished: queue.Queue[int] = queue.Queue()
        self.failed: queue.Queue[int] = queue.Queue()
        self.errors: queue.Queue[BaseException] = queue.Queue()
        self.lane = StepLane(on_output=lambda output: self.finished.put(output.step_id), on_failure=self._take_failure)

    def _take_failure(self, step_id: int, error: BaseException) -> None:
        self.errors.put(error)
        self.failed.put(step_id)


@pytest.fixture(params=[False, True], ids=["synchronous", "asynchronous"])
def runner(request: pytest.FixtureRequest) -> GatedRunner:
    return GatedRunner(is_asynchronous=request.param)


@pytest.fixture
def device_loop(runner: GatedRunner) -> Iterator[DeviceLoop]:
    device_loop = DeviceLoop()
    device_loop.use(runner)
    device_loop.start()
    yield device_loop
    for gate in runner.gates.values():
        gate.set()
    assert device_loop.stop(TIMEOUT_S)


def submit(device_loop: DeviceLoop, lane: StepLane, *step_ids: int) -> None:
    for step_id in step_ids:
        device_loop.submit(lane, AdmittedStep(make_step(step_id=step_id), np.zeros(0, np.int32)))


def test_a_step_is_launched_while_the_one_before_runs_where_the_device_is_asynchronous(
    device_loop: DeviceLoop, runner: GatedRunner
) -> None:
    outcomes = Outcomes()
    submit(device_loop, outcomes.lane, 1, 2)
    assert runner.launched.get(timeout=TIMEOUT_S) == 1
    if runner.is_asynchronous:
        assert runner.launched.get(timeout=TIMEOUT_S) == 2
    assert outcomes.finished.empty()
    runner.gates[1].set()
    assert outcomes.finished.get(timeout=TIMEOUT_S) == 1


def test_steps_behind_a_failed_one_are_dropped_and_other_lanes_go_on(
    device_loop: DeviceLoop, runner: GatedRunner
) -> None:
    doomed, healthy = Outcomes(), Outcomes()
    runner.failing = {1}
    submit(device_loop, doomed.lane, 1, 2)
    submit(device_loop, healthy.lane, 3)
    for gate in runner.gates.values():
        gate.set()
    assert doomed.failed.get(timeout=TIMEOUT_S) == 1
    assert healthy.finished.get(timeout=TIMEOUT_S) == 3
    assert doomed.finished.empty()
    assert doomed.failed.empty()


def test_a_step_that_cannot_be_launched_is_told_after_the_output_of_the_one_before(
    device_loop: DeviceLoop, runner: GatedRunner
) -> None:
    outcomes = Outcomes()
    runner.not_launched[2] = RuntimeError("no room")
    submit(device_loop, outcomes.lane, 1, 2, 3)
    assert runner.launched.get(timeout=TIMEOUT_S) == 1
    if runner.is_asynchronous:
        wait_true(lambda: outcomes.lane.has_failed)
    runner.gates[1].set()
    assert outcomes.finished.get(timeout=TIMEOUT_S) == 1
    assert outcomes.failed.get(timeout=TIMEOUT_S) == 2
    device_loop.call(lambda: None).result(TIMEOUT_S)
    assert 3 not in runner.launched.queue
    assert outcomes.failed.empty()


def test_a_step_that_is_superseded_is_dropped_without_an_error(
    device_loop: DeviceLoop, runner: GatedRunner, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    failures: list[str] = []
    device_loop.use(runner, on_failure=failures.append)
    old, new = Outcomes(), Outcomes()
    runner.not_launched[1] = SupersededError("epoch 1 ended")
    runner.gates[3].set()
    submit(device_loop, old.lane, 1, 2)
    submit(device_loop, new.lane, 3)
    assert new.finished.get(timeout=TIMEOUT_S) == 3
    assert old.failed.get(timeout=TIMEOUT_S) == 1
    assert isinstance(old.errors.get(timeout=TIMEOUT_S), SupersededError)
    assert list(runner.launched.queue) == [1, 3]
    assert failures == []
    dropped = [record for record in caplog.records if record.name == "worker_svc.device.device_loop"]
    assert [(record.levelno, record.exc_info) for record in dropped] == [(logging.INFO, None)]


@pytest.mark.parametrize("when", ["launched", "waited for"])
@pytest.mark.parametrize("is_lost", [False, True])
def test_a_failure_is_told_before_the_session_hears_of_it_and_ends_the_process_where_the_device_is_lost(
    runner: GatedRunner, when: str, is_lost: bool
) -> None:
    left: queue.Queue[str] = queue.Queue()
    device_loop, outcomes = DeviceLoop(leave=left.put), Outcomes()
    told_first: list[tuple[str, bool]] = []
    device_loop.use(
        runner, on_failure=lambda why: told_first.append((why, outcomes.failed.empty())), is_lost=lambda: is_lost
    )
    device_loop.start()
    if when == "launched":
        runner.not_launched[1] = RuntimeError("no room")
    else:
        runner.failing.add(1)
    runner.gates[1].set()
    submit(device_loop, outcomes.lane, 1)
    assert outcomes.failed.get(timeout=TIMEOUT_S) == 1
    assert told_first == [("step 1 failed on the device", True)]
    assert left.empty() != is_lost
    assert device_loop.stop(TIMEOUT_S)


def test_a_call_that_was_cancelled_before_its_turn_is_not_made(device_loop: DeviceLoop, runner: GatedRunner) -> None:
    made: list[int] = []
    outcomes = Outcomes()
    submit(device_loop, outcomes.lane, 1)
    cancelled = device_loop.call(lambda: made.append(1))
    assert cancelled.cancel()
    runner.gates[1].set()
    device_loop.call(lambda: made.append(2)).result(TIMEOUT_S)
    assert made == [2]
