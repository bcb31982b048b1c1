"""The number of drafts that rows may have, how they are counted, and to which tenant."""

import numpy as np
import pytest

from scheduler_svc.core.config import PolicyKind
from scheduler_svc.core.draft_budget import DraftBudget, DraftCounts
from scheduler_svc.core.policy import SAMPLE_WEIGHT, FairPolicy
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepResult
from tests.support.core_driver import make_config, make_request


def test_no_drafts_where_steps_are_full_of_tokens() -> None:
    budget = DraftBudget(64, 7, 4)
    assert budget.of(np.arange(2), 1).tolist() == [7, 7]
    assert not budget.of(np.arange(60), 1).any()


def test_a_row_that_had_none_is_given_fewer_until_it_has_some() -> None:
    budget, rows = DraftBudget(2, 7, 16), np.arange(2)
    assert budget.of(rows, 4).tolist() == [28, 28]
    budget.answered(rows, np.array([0, 3]))
    assert budget.of(rows, 4).tolist() == [7, 28]
    budget.had_some[0] = True
    assert budget.of(rows, 4).tolist() == [28, 28]


def test_right_drafts_are_counted_by_place_and_those_of_several_passes_as_if_each_had_as_many() -> None:
    counts = DraftCounts()
    counts.add(np.array([3, 0, 1]), np.array([5, 2, 1]), 1)
    assert (counts.num_samples, counts.num_drafts, counts.right_at) == (3, 8, [2, 1, 1])
    counts.add(np.array([5]), np.array([9]), 2)
    assert (counts.num_samples, counts.num_drafts, counts.right_at) == (4, 17, [4, 3, 2])


@pytest.mark.parametrize("stop", [None, 9], ids=["goes on", "ends"])
def test_a_tenant_is_charged_for_the_tokens_that_it_gets(stop: int | None) -> None:
    """Not for tokens after the end of a sequence."""
    config = make_config(policy=PolicyKind.FAIR, max_drafts=7, fixed_tokens=1 << 16, max_model_len=64)
    scheduler = Scheduler(config)
    scheduler.submit(make_request(0, max_tokens=30, stop=frozenset() if stop is None else frozenset({stop})), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.apply(StepResult(plan.step_id, np.array([5])), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.max_drafts is not None
    assert isinstance(scheduler.policy, FairPolicy)
    (tenant,) = scheduler.policy.counters
    before = scheduler.policy.counters[tenant]
    tokens = np.array([5, 6, 9, 7, 8])
    scheduler.apply(StepResult(plan.step_id, tokens, num_tokens=np.array([5]), num_drafts=np.array([4])), 0.0)
    num_kept = 5 if stop is None else 3
    # One of the tokens was charged when the step was planned.
    assert scheduler.policy.counters.get(tenant, 0) - before == SAMPLE_WEIGHT * (num_kept - 1)


def test_rows_may_have_a_single_draft() -> None:
    scheduler = Scheduler(make_config(max_drafts=1, fixed_tokens=1 << 16))
    scheduler.submit(make_request(0, max_tokens=30), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    scheduler.apply(StepResult(plan.step_id, np.array([5])), 0.0)
    plan = scheduler.schedule(0.0)
    assert plan is not None
    assert plan.max_drafts is not None
    assert plan.max_drafts.tolist() == [1]
