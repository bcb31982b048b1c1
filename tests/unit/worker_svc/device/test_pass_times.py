"""What the next pass of a step is expected to take."""

import numpy as np

from worker_svc.device.pass_times import PassCosts, PassTimes

COSTS = PassCosts([1, 2, 64], [2.0, 2.5, 10.0])
ONE = np.array([1])


def test_further_passes_say_what_the_next_takes_and_the_first_only_that_it_may_be_less() -> None:
    times = PassTimes(COSTS)
    times.took(64, 40.0, is_first=True)
    assert times.expected_s(64) == 10.0
    for _ in range(60):
        times.took(64, 40.0, is_first=True)
        times.took(64, 15.0, is_first=False)
    assert 14.0 < times.expected_s(64) < 15.0
    assert 2.8 < times.expected_s(1) < 3.0
    times.took(1, 2.2, is_first=True)
    assert 10.9 < times.expected_s(64) < 11.1
    times.took(1, 20.0, is_first=False)
    slow = times.expected_s(1)
    for _ in range(1000):
        times.took(1, 20.0, is_first=True)
    assert times.expected_s(1) == 2.0 < slow
    for _ in range(60):
        times.took(64, 2.0, is_first=False)
    assert 2.0 < times.expected_s(64) < 2.2


def test_what_drafts_add_is_learned_and_forgotten_where_they_seem_to_cost_too_much() -> None:
    times = PassTimes(COSTS)
    for _ in range(60):
        times.took(1, 2.0, is_first=False)
        times.took(1, 6.0, ONE, is_first=False)
    assert times.expected_s(1) == 2.0
    assert 5.5 < times.expected_s(1, ONE) < 6.2
    assert times.with_drafts(1, np.array([0, 1]), 1).tolist() == [times.expected_s(1), times.expected_s(1, ONE)]
    for _ in range(1000):
        times.took(1, 2.0, is_first=False)
    assert 2.49 < times.expected_s(1, ONE) < 2.51
    for _ in range(60):
        times.took(1, 2.1, ONE, is_first=False)
    for _ in range(1000):
        times.took(1, 2.0, is_first=False)
    assert times.expected_s(1, ONE) < 2.2


def test_without_costs_the_times_takes_as_long_as_the_last() -> None:
    times = PassTimes()
    for seconds, is_first in ((3.0, True), (1.0, False)):
        times.took(64, seconds, is_first=is_first)
        assert times.expected_s(64) == seconds
