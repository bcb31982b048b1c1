"""What sharing saves: cases computed by hand."""

import numpy as np
import pytest

from bench.rule_source import Drive, RuleSource, key_of
from bench.sharing import Workload, mean_shares, saved, shareable
from bench.texts import real_prompts
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request, RowSampling
from scheduler_svc.core.scheduler import Scheduler


def make_scheduler() -> Scheduler:
    config = SchedulerConfig(
        num_blocks=64, block_size=16, max_num_seqs=4, max_num_batched_tokens=256, max_model_len=256, watermark=0.0
    )
    return Scheduler(config)


def test_two_samples_share_the_prompt_and_copy_the_block_that_they_part_in() -> None:
    scheduler = make_scheduler()
    drive = Drive(scheduler, RuleSource(4))
    request = Request(key_of(0), "0", list(range(40)), RowSampling(0), 8, num_sequences=2, num_returned=2)
    scheduler.submit(request, 0.0)
    drive.plan()
    assert saved(scheduler) == pytest.approx(3 / 6)
    assert shareable(scheduler) == pytest.approx(3 / 6)
    drive.deliver()
    drive.plan()
    assert saved(scheduler) == pytest.approx(2 / 6)
    assert shareable(scheduler) == pytest.approx(2 / 6)


def test_one_sequence_saves_nothing() -> None:
    scheduler = make_scheduler()
    drive = Drive(scheduler, RuleSource(4))
    scheduler.submit(Request(key_of(0), "0", list(range(40)), RowSampling(0), 8), 0.0)
    drive.plan()
    assert saved(scheduler) == 0


def test_requests_with_equal_prompts_share_nothing_in_the_measurement() -> None:
    work = Workload([[7] * 33] * 6, [4] * 6, width=1)
    assert mean_shares(Drive(make_scheduler(), RuleSource(4)), work, 2, (saved,)) == [0]


def test_too_few_requests_are_refused() -> None:
    work = Workload([[7] * 33] * 2, [4] * 2, width=1)
    with pytest.raises(ValueError, match="2 requests are too few for 4 at once"):
        mean_shares(Drive(make_scheduler(), RuleSource(4)), work, 4, (saved,))


def test_prompts_of_real_text_have_the_lengths_asked_for() -> None:
    lengths = [1, 2, 19, 512, 19]
    prompts = real_prompts(lengths)
    assert [len(prompt) for prompt in prompts] == lengths
    assert {prompt[0] for prompt in prompts} == {1}
    assert prompts[2] != prompts[4]
    assert np.array(prompts[3]).max() < 2048
