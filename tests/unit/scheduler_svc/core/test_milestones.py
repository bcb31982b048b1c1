"""What a request's timeline tells of the time between its first step and its end."""

from dataclasses import replace

import pytest

from scheduler_svc.core.config import PolicyKind, PreemptionMode
from scheduler_svc.core.request import Request
from scheduler_svc.core.sequence import Milestone, Timeline
from tests.support.core_driver import Driver, make_config, make_request

PREEMPTIONS = [(PreemptionMode.SWAP, Milestone.SWAPPED_OUT), (PreemptionMode.RECOMPUTE, Milestone.RECOMPUTED)]


def timeline_of(driver: Driver, request: Request) -> Timeline:
    return next(group.timeline for group in driver.scheduler.groups() if group.request.key == request.key)


@pytest.mark.parametrize(("mode", "milestone"), PREEMPTIONS)
def test_a_preemption_and_the_return_are_told_with_their_times(mode: PreemptionMode, milestone: Milestone) -> None:
    driver = Driver(make_config(preemption_mode=mode, num_host_blocks=16))
    request = make_request(1, max_tokens=20)
    driver.submit(request)
    line = timeline_of(driver, request)
    driver.run_steps(3)
    started, preempted_at = line.started, driver.clock
    driver.preempt(request)
    assert line.milestones == [(milestone, preempted_at)]
    driver.run_until_idle()
    assert [each for each, _ in line.milestones] == [milestone, Milestone.RESUMED]
    assert line.started == started
    times = [at for _, at in line.milestones]
    assert times == sorted(times)


@pytest.mark.parametrize(("mode", "milestone"), PREEMPTIONS)
def test_running_out_of_blocks_is_told_by_whoever_gives_way(mode: PreemptionMode, milestone: Milestone) -> None:
    driver = Driver(make_config(num_blocks=9, preemption_mode=mode, num_host_blocks=16))
    requests = [make_request(handle, prompt_len=4, max_tokens=20) for handle in (1, 2)]
    for request in requests:
        driver.submit(request)
    older, newer = (timeline_of(driver, request) for request in requests)
    driver.run_until_idle()
    assert older.milestones == []
    assert {each for each, _ in newer.milestones} == {milestone, Milestone.RESUMED}


def test_making_way_for_a_higher_priority_is_told_as_a_recomputation() -> None:
    driver = Driver(make_config(num_blocks=6, policy=PolicyKind.PRIORITY, num_host_blocks=16))
    low = make_request(1, prompt_len=12, max_tokens=8)
    driver.submit(low)
    driver.run_steps(1)
    line = timeline_of(driver, low)
    driver.submit(make_request(2, prompt_len=12, max_tokens=8, priority=5))
    driver.run_until_idle()
    assert [each for each, _ in line.milestones] == [Milestone.RECOMPUTED, Milestone.RESUMED]


def test_losing_the_worker_is_told_by_those_that_ran_alone() -> None:
    driver = Driver(make_config(max_num_seqs=1))
    runs, waits = make_request(1, max_tokens=8), make_request(2, max_tokens=8)
    for request in (runs, waits):
        driver.submit(request)
    lines = [timeline_of(driver, request) for request in (runs, waits)]
    driver.run_steps(2)
    driver.crash()
    driver.run_until_idle()
    assert [[each for each, _ in line.milestones] for line in lines] == [[Milestone.WORKER_LOST, Milestone.RESUMED], []]


def test_a_row_is_told_to_workers_with_the_trace_of_its_request() -> None:
    driver = Driver(make_config())
    driver.submit(make_request(1))
    driver.submit(replace(make_request(2), traceparent="00-a-b-01"))
    plan = driver.plan()
    assert plan is not None
    assert [assigned.traceparent for assigned in plan.assign] == [None, "00-a-b-01"]
