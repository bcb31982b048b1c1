"""If the worker refuses or dies of a request's steps, only that request fails, among any other requests."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest

from scheduler_svc.core.fault_isolation import LOSSES_BEFORE_TRIALS, LOSSES_ON_TRIAL
from scheduler_svc.core.pins import PIN_CLIENT
from tests.support.core_driver import CLIENT, Driver, expected_output, make_config, make_request

ENOUGH = LOSSES_BEFORE_TRIALS + LOSSES_ON_TRIAL


def make_driver(
    *,
    poisoned: Mapping[int, int] | None = None,
    deadly: Mapping[int, int] | None = None,
    num_requests: int = 6,
    max_in_flight: int = 2,
    **config,
) -> Driver:
    """A driver with requests of 12 tokens, by handle; see `Driver` for `poisoned` and `deadly`."""
    driver = Driver(make_config(**config), max_in_flight)
    driver.poisoned, driver.deadly = dict(poisoned or {}), dict(deadly or {})
    for handle in range(num_requests):
        driver.submit(make_request(handle, max_tokens=12, priority=min(handle, 100)))
    return driver


def assert_others_finish(driver: Driver, num_requests: int = 6) -> None:
    """Only and all requests without a fault get their whole output."""
    driver.run_until_idle()
    assert driver.failed == {*driver.poisoned, *driver.deadly}
    assert driver.finished == set(range(num_requests)) - driver.failed
    for handle in driver.finished:
        assert driver.outputs[handle] == expected_output(make_request(handle, max_tokens=12))
    assert driver.scheduler.batch.blocks.pool.num_used == 0


@pytest.mark.parametrize(("fault", "num_refusals", "num_deaths"), [("_is_refused", 2, 0), ("_is_deadly", 0, ENOUGH)])
def test_a_pin_that_steps_fail_for_is_removed(monkeypatch, fault, num_refusals, num_deaths):
    driver = Driver(make_config())
    monkeypatch.setattr(driver, fault, lambda plan: True)
    pin = driver.scheduler.pin("", [1] * 8, 0.0, 100.0)
    driver.run_until_idle()
    assert (driver.num_refusals, driver.num_deaths) == (num_refusals, num_deaths)
    assert not pin.is_held
    assert list(driver.scheduler.pins) == []
    assert driver.scheduler.num_live == 0
    assert pin.key.client == PIN_CLIENT


def test_a_pin_in_another_pool_has_no_losses_of_an_earlier_one():
    driver = Driver(make_config())
    core = driver.scheduler
    pins = [core.pin("", [number] * 8, 0.0, 100.0) for number in range(2)]
    kill_after(driver, 0)
    core.unpin("", pins[0].pin_id)
    assert core.trials._losses.keys() == {pins[1].key}
    assert driver.plan() is not None
    driver.crash(config=make_config(num_blocks=13))
    assert [pin.pin_id for pin in core.pins] == [pins[1].pin_id]
    assert not core.trials._losses


@pytest.mark.parametrize(
    ("fault", "num_refusals", "num_deaths"),
    [("poisoned", 4, 0), ("deadly", 0, LOSSES_BEFORE_TRIALS + 3 * LOSSES_ON_TRIAL)],
)
def test_each_further_request_at_fault_costs_one_refusal_or_as_many_losses_as_a_trial_takes(
    fault, num_refusals, num_deaths
):
    culprits: dict[str, Any] = {fault: {1: 1, 4: 1, 5: 1}}
    driver = make_driver(**culprits)
    assert_others_finish(driver)
    assert (driver.num_refusals, driver.num_deaths) == (num_refusals, num_deaths)


def test_the_failure_says_what_the_worker_said():
    driver = make_driver(poisoned={0: 1}, num_requests=1)
    driver.plan()
    assert driver.deliver() == {}
    driver.plan()
    (failure,) = driver.deliver()[CLIENT].failed
    assert failure.key == make_request(0).key
    assert failure.reason == "STEP_REFUSED"
    assert failure.message.endswith("row 0 is poisoned")


def test_suspects_run_alone_and_what_came_later_waits_for_the_end_of_the_trials():
    driver = make_driver(poisoned={0: 1}, num_requests=3, max_in_flight=1)
    driver.run_steps(1)
    driver.poisoned = {}
    driver.submit(make_request(9))
    batches = []
    while 9 not in driver.finished:
        driver.plan()
        batches.append([group.request.key.handle for group in driver.scheduler.running])
        driver.deliver()
    assert batches[:9] == [[0]] * 3 + [[1]] * 3 + [[2]] * 3
    assert batches[9] == [0, 1, 2, 9]


def test_requests_that_are_refused_only_together_finish_all_the_same(monkeypatch):
    driver = make_driver(poisoned={}, num_requests=3)
    monkeypatch.setattr(driver, "_is_refused", lambda plan: None in driver.results or len(plan.rows) > 1)
    assert_others_finish(driver, num_requests=3)
    assert 0 < driver.num_refusals <= 4


MANY = 100
"""Ten cohorts of ten."""


def make_crowd(**culprits: Any) -> Driver:
    return make_driver(num_requests=MANY, max_num_seqs=128, num_blocks=600, max_num_batched_tokens=800, **culprits)


def run_until_failed(driver: Driver) -> int:
    """Returns the number of steps until a request was found to be at fault."""
    for num_steps in range(2000):
        if driver.failed:
            return num_steps
        driver.run_steps(1)
    raise AssertionError("nobody was found to be at fault")


@pytest.mark.parametrize(
    ("fault", "culprit", "num_refusals", "num_deaths"),
    [("poisoned", 37, 3, 0), ("deadly", 99, 0, LOSSES_BEFORE_TRIALS + 1 + LOSSES_ON_TRIAL)],
)
def test_many_suspects_are_tried_in_cohorts_at_the_cost_of_one_loss_more(fault, culprit, num_refusals, num_deaths):
    driver = make_crowd(**{fault: {culprit: 6}})
    num_steps = run_until_failed(driver)
    assert driver.failed == {culprit}
    assert (driver.num_refusals, driver.num_deaths) == (num_refusals, num_deaths)
    # Ten cohorts and ten requests of three steps each; tried one by one it would be a hundred.
    assert num_steps <= 3 * (10 + 10) + (12 if fault == "poisoned" else 16)
    assert_others_finish(driver, num_requests=MANY)


def test_the_failure_says_how_often_the_worker_was_lost():
    driver = make_driver(deadly={0: 1}, num_requests=1)
    for _ in range(ENOUGH - 1):
        driver.plan()
        assert driver.deliver() == {}
    driver.plan()
    (failure,) = driver.deliver()[CLIENT].failed
    assert failure.key == make_request(0).key
    assert failure.reason == "WORKER_LOST"
    assert failure.message == (
        "the worker was lost 6 times in a row while this request ran, the last 3 times at the same step, in which only "
        "it ran"
    )


def kill_after(driver: Driver, num_answered: int, *, was_alive: bool = False) -> None:
    """The worker is killed with a step in flight, after `num_answered` steps were answered."""
    driver.run_steps(num_answered)
    assert driver.plan() is not None
    driver.crash(was_alive=was_alive)


def test_kills_that_let_no_step_be_answered_fail_one_request_at_the_sixth_and_not_before():
    driver = make_driver(deadly={})
    for _ in range(ENOUGH - 1):
        kill_after(driver, 0)
        assert driver.failed == set()
    kill_after(driver, 0)
    assert driver.failed == {0}


def test_a_suspect_that_ran_alone_for_all_losses_that_count_but_came_to_other_chunks_stays():
    driver = Driver(make_config(max_num_batched_tokens=8, num_blocks=60, max_model_len=200))
    driver.submit(make_request(0, prompt_len=80, max_tokens=4))
    for num_answered in itertools.islice(itertools.cycle([2, 5, 3, 6]), 12):
        kill_after(driver, num_answered)
    driver.run_until_idle()
    assert driver.finished == {0}


def test_a_suspect_has_one_step_in_flight():
    driver = make_driver(deadly={}, num_requests=2, max_in_flight=3)
    assert driver.plan() is not None
    assert driver.plan() is not None
    for _ in range(LOSSES_BEFORE_TRIALS):
        driver.crash()
        assert driver.plan() is not None
    assert driver.scheduler.trials.are_on
    assert driver.plan() is None
    driver.deliver()
    assert driver.plan() is not None


def test_a_request_that_came_late_is_not_at_fault_after_the_losses_of_its_trial_alone():
    driver = make_driver(deadly={}, num_requests=1)
    kill_after(driver, 0)
    kill_after(driver, 0)
    driver.submit(make_request(1, max_tokens=12))
    kill_after(driver, 0)
    assert driver.scheduler.abort(make_request(0).key)
    for _ in range(ENOUGH - 2):
        kill_after(driver, 0)
        assert driver.failed == set()
    kill_after(driver, 0)
    assert driver.failed == {1}


def test_what_is_counted_since_the_start_goes_on_with_another_pool():
    driver = Driver(make_config(num_blocks=12))
    for handle in range(6):
        driver.submit(make_request(handle, prompt_len=8, max_tokens=20))
    driver.run_steps(12)
    core = driver.scheduler
    counts = (core.num_steps, core.num_preemptions, core.num_swap_outs)
    assert min(counts[:2]) > 0
    driver.crash(config=make_config(num_blocks=13))
    assert (core.num_steps, core.num_preemptions, core.num_swap_outs) == counts
