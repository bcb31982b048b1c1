"""A short version of the long run."""

import pytest

from bench.soak_run import SoakRun
from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig


def test_blocks_that_nobody_gives_back_are_a_fault_and_fail_the_next_mark() -> None:
    config = SchedulerConfig(120, 8, 64, 256, 128, max_waiting_requests=16, num_host_blocks=40)
    run = SoakRun(config, 50, seed=7, memory_in_use=lambda: 0)
    run.scheduler.batch.blocks.pool.allocate(2)
    assert run.faults() == ["2 blocks are held at the end"]
    with pytest.raises(invariants.InvariantViolationError):
        list(run.marks())
