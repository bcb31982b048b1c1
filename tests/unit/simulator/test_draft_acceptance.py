"""Drafts with synthetic acceptance: their savings follow from the cost model."""

from dataclasses import replace

import numpy as np
import pytest

from quire.load import LoadRequest
from quire.load.requests import frozen
from scheduler_svc.core.config import SchedulerConfig
from simulator.replica import Outcome, Replica
from simulator.tokens import SyntheticDrafts, fixed_tokens
from tests.unit.simulator.test_load import LinearSteps

NUM_TOKENS = 200
CONFIG = SchedulerConfig(num_blocks=256, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512)


READS_WEIGHTS, COMPUTES = LinearSteps(), LinearSteps(0.0)


def run(acceptance: float, max_drafts: int = 7, costs: LinearSteps = READS_WEIGHTS, num_requests: int = 1) -> Outcome:
    config = replace(CONFIG, max_drafts=max_drafts, fixed_tokens=fixed_tokens(costs))
    tokens = frozen(np.arange(10, 30))
    load = [LoadRequest(index, tokens, NUM_TOKENS, num_new_tokens=len(tokens)) for index in range(num_requests)]
    return Replica(config, costs, 1000, tokens=SyntheticDrafts(costs, acceptance)).run(load, max_concurrency=16)


def test_each_step_gives_as_many_tokens_as_its_drafts_are_right_and_takes_what_they_cost() -> None:
    plain, perfect = run(0.0), run(1.0)
    assert [record.output_tokens for record in (*plain.records, *perfect.records)] == [NUM_TOKENS] * 2
    assert plain.simulation.num_drafts == 0
    assert len(plain.simulation.steps) == NUM_TOKENS
    # The last step would go beyond the end.
    assert perfect.simulation.num_right_drafts == pytest.approx(NUM_TOKENS * 7 / 8, abs=8)
    with_drafts = perfect.simulation.steps[3]
    assert with_drafts.work.num_tokens == with_drafts.work.num_samples == 8
    assert with_drafts.over - with_drafts.began == pytest.approx(0.0108)
    assert 6 < plain.simulation.seconds / perfect.simulation.seconds < 7.5


def test_drafts_are_right_as_often_as_the_acceptance_says_and_the_same_each_time() -> None:
    outcome, again = run(0.7, max_drafts=1, num_requests=16), run(0.7, max_drafts=1, num_requests=16)
    simulation = outcome.simulation
    assert simulation.num_right_drafts / simulation.num_drafts == pytest.approx(0.7, abs=0.05)
    assert outcome.counters() == again.counters()


def test_there_are_no_drafts_where_a_token_costs_as_much_as_a_draft_may_save() -> None:
    assert run(1.0, costs=COMPUTES, num_requests=16).simulation.num_drafts == 0
    assert run(0.1).simulation.num_drafts == 0
