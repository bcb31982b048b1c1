"""The long run, made short."""

import pytest

from bench.soak_run import SoakRun
from scheduler_svc.core import invariants
from scheduler_svc.core.config import PolicyKind, PreemptionMode, SchedulerConfig


def make_run(num_requests: int, mode: PreemptionMode, policy: PolicyKind = PolicyKind.FCFS) -> SoakRun:
    config = SchedulerConfig(
        num_blocks=120,
        block_size=8,
        max_num_seqs=64,
        max_num_batched_tokens=256,
        max_model_len=128,
        max_waiting_requests=16,
        num_host_blocks=40,
        policy=policy,
        preemption_mode=mode,
    )
    return SoakRun(config, num_requests, seed=7, memory_in_use=lambda: 0)


@pytest.mark.parametrize(
    ("mode", "policy"),
    [*zip(PreemptionMode, PolicyKind, strict=True), (PreemptionMode.AUTO, PolicyKind.FAIR)],
)
def test_nothing_is_held_after_a_run_in_which_groups_were_preempted(mode: PreemptionMode, policy: PolicyKind) -> None:
    run = make_run(250, mode, policy)
    marks = list(run.marks())
    assert run.faults() == []
    assert marks[-1].num_requests == 250
    assert marks[-1].num_preemptions > 0
    assert marks[-1].num_pins > 0
    assert (marks[-1].num_swap_outs > 0) == (mode is not PreemptionMode.RECOMPUTE)


def test_blocks_that_nobody_gives_back_are_a_fault_and_fail_the_next_mark() -> None:
    run = make_run(50, PreemptionMode.AUTO)
    run.scheduler.batch.blocks.pool.allocate(2)
    assert run.faults() == ["2 blocks are held at the end"]
    with pytest.raises(invariants.InvariantViolationError):
        list(run.marks())
