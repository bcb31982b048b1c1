"""Results by a rule."""

import numpy as np

from bench.rule_source import VOCAB_SIZE, Drive, RuleSource, key_of
from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan, StepResult


def make_scheduler() -> Scheduler:
    config = SchedulerConfig(
        num_blocks=64, block_size=4, max_num_seqs=16, max_num_batched_tokens=64, max_model_len=64, watermark=0.0
    )
    return Scheduler(config)


def test_every_sample_has_a_token_of_the_vocabulary() -> None:
    scheduler, source = make_scheduler(), RuleSource(16)
    for index in range(4):
        scheduler.submit(Request(key_of(index), str(index), [1, 2, 3], RowSampling(index), 8), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    result = source(plan)
    assert len(result.token_ids) == len(plan.samples) == 4
    assert len(np.unique(result.token_ids)) == 4
    assert result.token_ids.min() >= 0
    assert result.token_ids.max() < VOCAB_SIZE


def test_beams_get_distinct_candidates_that_fall_until_the_search_ends() -> None:
    scheduler, source = make_scheduler(), RuleSource(16)
    scheduler.submit(
        Request(
            key_of(0), "beams", [1, 2, 3], RowSampling(0), 5, num_sequences=3, num_returned=1, beam=BeamParameters(3)
        ),
        0.0,
    )
    seen: list[StepResult] = []

    def watched(plan: StepPlan) -> StepResult:
        seen.append(source(plan))
        return seen[-1]

    drive = Drive(scheduler, watched)
    completed = 0
    while drive.plan() is not None:
        completed += sum(len(events.completed) for events in drive.deliver().values())
    assert completed == 1
    assert drive.is_idle
    assert len(seen) == 5
    for result in seen:
        assert len(result.candidates) == len(result.token_ids) == 3
        for candidates in result.candidates.values():
            assert len(set(candidates.token_ids)) == len(candidates.token_ids) == 6
            assert list(candidates.logprobs) == sorted(candidates.logprobs, reverse=True)


def test_one_row_fails_in_every_step_that_the_rule_names() -> None:
    scheduler, source = make_scheduler(), RuleSource(16, fail_every=2)
    for index in range(3):
        scheduler.submit(Request(key_of(index), str(index), [1, 2, 3], RowSampling(index), 8), 0.0)
    drive = Drive(scheduler, source, max_in_flight=1)
    drive.plan()
    assert not any(events.failed for events in drive.deliver().values())
    drive.plan()
    assert sum(len(events.failed) for events in drive.deliver().values()) == 1
