"""The expected time of the next pass of a step."""

import numpy as np
import pytest

from worker_svc.device.pass_times import PassCosts, PassTimes

COSTS = PassCosts([1, 2, 64], [2.0, 2.5, 10.0])
ONE = np.array([1])
TRUE = PassCosts([1, 2, 4, 8, 16, 32, 64], [2.0, 2.2, 2.5, 3.0, 4.0, 6.0, 10.0])


def test_further_passes_say_what_the_next_takes_and_the_first_only_that_it_may_be_less() -> None:
    times = PassTimes(COSTS)
    times.record_pass(64, 40.0, is_first=True)
    assert times.expected_s(64) == 10.0
    for _ in range(60):
        times.record_pass(64, 40.0, is_first=True)
        times.record_pass(64, 15.0, is_first=False)
    assert 14.0 < times.expected_s(64) < 15.0
    assert 2.8 < times.expected_s(1) < 3.0
    times.record_pass(1, 2.2, is_first=True)
    assert 10.9 < times.expected_s(64) < 11.1
    times.record_pass(1, 20.0, is_first=False)
    slow = times.expected_s(1)
    for _ in range(1000):
        times.record_pass(1, 20.0, is_first=True)
    assert times.expected_s(1) == 2.0 < slow
    for _ in range(60):
        times.record_pass(64, 2.0, is_first=False)
    assert 2.0 < times.expected_s(64) < 2.2


def test_what_drafts_add_is_learned_and_tried_anew_where_they_seemed_to_cost_too_much() -> None:
    times = PassTimes(COSTS)
    for _ in range(60):
        times.record_pass(1, 2.0, is_first=False)
        times.record_pass(1, 6.0, ONE, is_first=False)
    assert times.expected_s(1) == 2.0
    assert times.expected_s(1, ONE) > 5.8 < 6.1
    assert times.with_drafts(1, np.array([0, 1]), 1).tolist() == [times.expected_s(1), times.expected_s(1, ONE)]
    # Some passes without drafts between passes with drafts change nothing.
    for _ in range(500):
        times.record_pass(1, 2.0, is_first=False)
    assert times.expected_s(1, ONE) > 5.8
    for _ in range(20):
        times.record_pass(1, 2.0, is_first=False)
    assert 2.2 < times.expected_s(1, ONE) < 2.3
    for _ in range(60):
        times.record_pass(1, 2.1, ONE, is_first=False)
    for _ in range(1000):
        times.record_pass(1, 2.0, is_first=False)
    assert times.expected_s(1, ONE) < 2.2


@pytest.mark.parametrize("disturbed", [0, 1, 3, 6])
def test_a_pass_that_was_disturbed_at_the_start_is_seen_by_those_of_other_numbers_of_rows(disturbed: int) -> None:
    measured = [each * (3 if index == disturbed else 1) for index, each in enumerate(TRUE.seconds)]
    costs = PassCosts.from_measurements(measured, 0.0)
    assert costs.num_rows == TRUE.num_rows
    for seconds, true in zip(costs.seconds, TRUE.seconds, strict=True):
        assert true * 0.99 <= seconds <= 1.34 * true
    assert all(costs.seconds_for(np.array([64, 128])) <= 1.34 * TRUE.seconds_for(np.array([64, 128])))


def test_further_rows_that_seem_to_cost_nothing_cost_something() -> None:
    assert all(np.diff(PassCosts.from_measurements([3.0, 3.0, 2.0], 0.0).seconds) > 0)


@pytest.mark.parametrize("num_rows", [1, 3, 60])
def test_a_start_that_was_three_times_too_slow_for_many_rows_is_corrected_by_a_few_passes(num_rows: int) -> None:
    times = PassTimes(
        PassCosts(
            TRUE.num_rows,
            [each * (3 if number > 2 else 1) for number, each in zip(TRUE.num_rows, TRUE.seconds, strict=True)],
        )
    )
    drafts = np.array([7])
    plain_s, drafted_s = TRUE.seconds_for(np.array([num_rows, num_rows + 7]))
    for _ in range(30):
        times.record_pass(num_rows, plain_s, is_first=False)
    for _ in range(16):
        times.record_pass(num_rows, plain_s, is_first=False)
        times.record_pass(num_rows, drafted_s, drafts, is_first=False)
    assert times.expected_s(num_rows) == pytest.approx(plain_s, rel=0.05)
    assert times.expected_s(num_rows, drafts) == pytest.approx(drafted_s, rel=0.2)


def test_what_drafts_add_to_few_rows_says_nothing_of_many() -> None:
    times = PassTimes(COSTS)
    before = times.expected_s(64, ONE)
    for _ in range(20):
        times.record_pass(1, 6.0, ONE, is_first=False)
    assert times.expected_s(64, ONE) == before


def test_without_costs_the_times_takes_as_long_as_the_last() -> None:
    times = PassTimes()
    for seconds, is_first in ((3.0, True), (1.0, False)):
        times.record_pass(64, seconds, is_first=is_first)
        assert times.expected_s(64) == seconds
