"""Whatever a core is told, a replay of its recording plans the very same steps, though token ids are hidden."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.stateful import rule

from scheduler_svc.core import kv_cache, preparation
from scheduler_svc.core.block_pool import BlockId
from scheduler_svc.recording.recorder import Recorder
from scheduler_svc.recording.replay import replay
from tests.support import core_driver
from tests.unit.scheduler_svc.core.test_state_machine import SchedulerMachine


class RecordedMachine(SchedulerMachine):
    def __init__(self):
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.path = Path(self.directory.name) / "recording"
        self.recorder = Recorder.open(str(self.path), with_token_ids=False, max_bytes=1 << 30)
        self.scheduler_patch = pytest.MonkeyPatch()
        self.scheduler_patch.setattr(core_driver, "Scheduler", self.recorder.make_scheduler)

    preempt = None  # pyright: ignore[reportAssignmentType]
    """Not by a rule: a core preempts by itself."""

    @rule()
    def break_stream(self):
        """The worker stays, with what it holds, and all steps in flight are void."""
        driver = self.driver
        driver.scheduler.lose_in_flight()
        driver.scheduler.void_in_flight(driver.clock)
        driver.results.clear()
        driver.told.clear()
        driver.device.rows.clear()
        driver._is_dead = False
        driver.scheduler.restore_sealed((BlockId(block), content) for block, content in driver.device.seals.items())
        driver.scheduler.judge_loss(was_alive=True)
        driver.tell_disk(list(driver.device.disk))

    def teardown(self):
        max_reclaimed, num_kept = kv_cache._MAX_RECLAIMED, preparation.NUM_KEPT
        try:
            super().teardown()
            self.recorder.close()
            self.scheduler_patch.setattr(kv_cache, "_MAX_RECLAIMED", max_reclaimed)
            self.scheduler_patch.setattr(preparation, "NUM_KEPT", num_kept)
            report = replay(self.path)
            assert (report.differences, report.ended_early, report.damage) == ([], None, None)
        finally:
            self.scheduler_patch.undo()
            self.recorder.close()
            self.directory.cleanup()


TestRecorded = RecordedMachine.TestCase
TestRecorded.settings = settings(max_examples=20, stateful_step_count=50, deadline=None)
