"""The long run, made short."""

import argparse

import pytest

from bench import soak
from bench.soak_run import SoakRun
from scheduler_svc.core import invariants
from scheduler_svc.core.config import PolicyKind, PreemptionMode, SchedulerConfig


def make_config(mode: PreemptionMode = PreemptionMode.AUTO, policy: PolicyKind = PolicyKind.FCFS) -> SchedulerConfig:
    return SchedulerConfig(
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


def make_run(num_requests: int, config: SchedulerConfig | None = None) -> SoakRun:
    return SoakRun(config or make_config(), num_requests, seed=7, memory_in_use=lambda: 0)


@pytest.mark.parametrize(("mode", "policy"), list(zip(PreemptionMode, PolicyKind, strict=True)))
def test_nothing_is_held_after_a_run_in_which_groups_were_preempted(mode: PreemptionMode, policy: PolicyKind) -> None:
    run = make_run(250, make_config(mode, policy))
    marks = list(run.marks())
    assert run.faults() == []
    assert marks[-1].num_requests == 250
    assert marks[-1].num_preemptions > 0
    assert marks[-1].num_pins > 0
    assert (marks[-1].num_swap_outs > 0) == (mode is not PreemptionMode.RECOMPUTE)


def test_blocks_that_nobody_gives_back_are_a_fault_and_fail_the_next_mark() -> None:
    run = make_run(50)
    run.scheduler.batch.blocks.pool.allocate(2)
    assert run.faults() == ["2 blocks are held at the end"]
    with pytest.raises(invariants.InvariantViolationError):
        list(run.marks())


def test_a_run_whose_memory_grew_beyond_the_bound_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    flags = ["--requests", "2", "--max-growth-mib", "-1000"]
    with pytest.raises(SystemExit) as error:
        soak.main(parser.parse_args(flags))
    assert error.value.code == 1
    assert "the bound is -1000.0 MiB" in capsys.readouterr().out
