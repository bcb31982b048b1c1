"""A request whose steps the worker refuses fails alone, whoever runs beside it."""

import pytest

from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import PolicyKind
from scheduler_svc.core.fault_isolation import LOSSES_BEFORE_TRIALS, LOSSES_ON_TRIAL
from scheduler_svc.core.pins import PIN_CLIENT
from tests.support.core_driver import CLIENT, Driver, expected_output, make_config, make_request
from tests.support.trial_driver import assert_others_finish, make_driver


@pytest.mark.parametrize("culprit", [0, 3, 5])
@pytest.mark.parametrize("num_tokens", [1, 6, 9])
@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_the_request_at_fault_fails_after_two_refusals_and_the_others_finish(culprit, num_tokens, max_in_flight):
    driver = make_driver(poisoned={culprit: num_tokens}, max_in_flight=max_in_flight)
    assert_others_finish(driver)
    assert driver.num_refusals == 2


@pytest.mark.parametrize("policy", PolicyKind)
def test_under_every_policy_the_same_request_is_found(policy):
    assert_others_finish(make_driver(poisoned={2: 1}, policy=policy, num_blocks=12))


def test_each_further_request_at_fault_costs_one_refusal():
    driver = make_driver(poisoned={1: 1, 4: 1, 5: 1})
    assert_others_finish(driver)
    assert driver.num_refusals == 4


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


def test_a_suspect_that_is_aborted_on_trial_makes_way():
    driver = make_driver(poisoned={2: 1}, num_requests=3)
    while driver.num_refusals == 0:
        driver.plan()
        driver.deliver()
    driver.plan()
    assert driver.scheduler.abort(make_request(0).key)
    driver.check()
    driver.run_until_idle()
    assert (driver.failed, driver.finished) == ({2}, {1})


def test_groups_of_several_sequences_are_tried_whole():
    driver = Driver(make_config(num_host_blocks=16))
    samples = make_request(1, num_sequences=3, max_tokens=8)
    search = make_request(2, num_sequences=3, num_returned=3, max_tokens=8, beam=BeamParameters(3))
    driver.poisoned = {3: 7}
    for request in (samples, search, make_request(3, num_sequences=2, max_tokens=8)):
        driver.submit(request)
    driver.run_until_idle()
    assert (driver.failed, driver.finished) == ({3}, {1, 2})
    for request in (samples, search):
        for index in range(3):
            assert driver.samples[request.key.handle, index] == expected_output(request, index)


def test_a_worker_that_is_lost_amid_the_trials_leaves_them_as_they_were():
    driver = make_driver(poisoned={3: 1})
    while driver.num_refusals == 0:
        driver.plan()
        driver.deliver()
    driver.plan()
    driver.crash()
    assert_others_finish(driver)
    assert driver.num_refusals == 2


def test_a_pin_that_is_refused_is_let_go_of(monkeypatch):
    driver = Driver(make_config())
    monkeypatch.setattr(driver, "_is_refused", lambda plan: True)
    pin = driver.scheduler.pin("", [1] * 8, 0.0, 100.0)
    driver.run_until_idle()
    assert driver.num_refusals == 2
    assert not pin.is_held
    assert list(driver.scheduler.pins) == []
    assert driver.scheduler.num_live == 0
    assert pin.key.client == PIN_CLIENT


MANY = 100
"""Ten cohorts of ten."""


def make_crowd(**culprits: dict[int, int]) -> Driver:
    return make_driver(num_requests=MANY, max_num_seqs=128, num_blocks=600, max_num_batched_tokens=800, **culprits)


def run_until_failed(driver: Driver) -> int:
    """Returns in how many steps somebody was found to be at fault."""
    for num_steps in range(2000):
        if driver.failed:
            return num_steps
        driver.plan()
        driver.deliver()
    raise AssertionError("nobody was found to be at fault")


@pytest.mark.parametrize("culprit", [0, 37, 99])
def test_many_suspects_are_tried_in_cohorts_at_the_cost_of_one_refusal_more(culprit):
    driver = make_crowd(poisoned={culprit: 6})
    num_steps = run_until_failed(driver)
    assert (driver.failed, driver.num_refusals) == ({culprit}, 3)
    # Ten cohorts and ten requests of three steps each; one by one it is a hundred.
    assert num_steps <= 3 * (10 + 10) + 12
    assert_others_finish(driver, num_requests=MANY)


@pytest.mark.parametrize("culprit", [0, 99])
def test_many_suspects_of_losses_are_tried_in_cohorts_at_the_cost_of_one_loss_more(culprit):
    driver = make_crowd(deadly={culprit: 6})
    num_steps = run_until_failed(driver)
    assert (driver.failed, driver.num_deaths) == ({culprit}, LOSSES_BEFORE_TRIALS + 1 + LOSSES_ON_TRIAL)
    assert num_steps <= 3 * (10 + 10) + 16
    assert_others_finish(driver, num_requests=MANY)


def test_several_culprits_among_many_are_all_found():
    driver = make_crowd(poisoned={3: 6, 4: 7, 50: 6, 98: 8})
    assert_others_finish(driver, num_requests=MANY)
    # The first, one for each cohort with somebody at fault, and one for each of those.
    assert driver.num_refusals == 1 + 3 + 4


@pytest.mark.parametrize("num_answered", [1, 2, 3, 5])
def test_kills_from_outside_while_cohorts_are_tried_fail_nobody(num_answered):
    driver = make_crowd()
    for _ in range(LOSSES_BEFORE_TRIALS):
        driver.plan()
        driver.crash()
    assert driver.scheduler.trials.are_on
    for _ in range(60):
        driver.run_steps(num_answered)
        driver.plan()
        driver.crash()
        assert not driver.failed
    assert_others_finish(driver, num_requests=MANY)


def test_a_cohort_that_has_no_room_together_is_tried_as_room_comes():
    driver = make_driver(
        num_requests=MANY, max_num_seqs=128, num_blocks=24, max_num_batched_tokens=800, poisoned={42: 6}
    )
    # So many never ran at once, so few are suspects: all of them are made to be.
    driver.scheduler.trials._suspect([make_request(handle).key for handle in range(MANY)])
    assert_others_finish(driver, num_requests=MANY)
