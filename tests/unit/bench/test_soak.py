"""The long run, made short."""

import argparse

import pytest

from bench import soak
from bench.soak import growth_mib
from bench.soak_run import Mark, SoakRun
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


@pytest.mark.parametrize("mode", list(PreemptionMode))
@pytest.mark.parametrize("policy", list(PolicyKind))
def test_nothing_is_held_after_a_run_in_which_groups_were_preempted(mode: PreemptionMode, policy: PolicyKind) -> None:
    run = make_run(250, make_config(mode, policy))
    marks = list(run.marks())
    assert run.faults() == []
    assert marks[-1].num_requests == 250
    assert marks[-1].num_preemptions > 0
    assert marks[-1].num_pins > 0
    assert (marks[-1].num_swap_outs > 0) == (mode is not PreemptionMode.RECOMPUTE)


def test_the_same_seed_runs_the_same_steps() -> None:
    def steps() -> list[tuple[int, int]]:
        run = make_run(150)
        return [(mark.num_steps, mark.num_preemptions) for mark in run.marks()]

    assert steps() == steps()


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


def test_growth_counts_from_the_end_of_the_warm_up() -> None:
    sizes = [(5, 10.0), (10, 50.0), (50, 49.0), (100, 51.5)]
    marks = [Mark(number, 1.0, 1, 0, 0, 0, resident) for number, resident in sizes]
    assert growth_mib(marks) == 1.5
