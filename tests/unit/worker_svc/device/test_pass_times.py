"""What the next pass of a step is expected to take."""

from worker_svc.device.pass_times import NextPass, PassCosts

COSTS = PassCosts([1, 2, 64], [2.0, 2.5, 10.0])


def test_further_passes_say_what_the_next_takes_and_the_first_only_that_it_may_be_less() -> None:
    next_pass = NextPass(COSTS)
    next_pass.took(64, 40.0, is_first=True)
    assert next_pass.expected_s(64) == 10.0
    for _ in range(60):
        next_pass.took(64, 40.0, is_first=True)
        next_pass.took(64, 15.0, is_first=False)
    assert 14.0 < next_pass.expected_s(64) < 15.0
    assert 2.8 < next_pass.expected_s(1) < 3.0
    next_pass.took(1, 2.2, is_first=True)
    assert 10.9 < next_pass.expected_s(64) < 11.1
    next_pass.took(1, 20.0, is_first=False)
    slow = next_pass.expected_s(1)
    for _ in range(1000):
        next_pass.took(1, 20.0, is_first=True)
    assert next_pass.expected_s(1) == 2.0 < slow


def test_without_costs_the_next_pass_takes_as_long_as_the_last() -> None:
    next_pass = NextPass()
    for seconds, is_first in ((3.0, True), (1.0, False)):
        next_pass.took(64, seconds, is_first=is_first)
        assert next_pass.expected_s(64) == seconds
