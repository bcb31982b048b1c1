"""Requests that need blocks which another one is computing wait for them, and for nothing that cannot come."""

import pytest

from scheduler_svc.core.config import PolicyKind
from scheduler_svc.core.request import Request
from tests.support.core_driver import Driver, expected_output, make_config, make_request

PROMPT = [1 + index % 40 for index in range(1000)]


def make_driver(max_in_flight: int = 2, **config) -> Driver:
    defaults = {"num_blocks": 1200, "block_size": 16, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    return Driver(make_config(**(defaults | {"max_model_len": 2000} | config)), max_in_flight)


def submit(driver: Driver, *prompts: list[int], max_tokens: int = 1, **request) -> list[Request]:
    first = 1 + max(driver.outputs, default=0)
    requests = [
        make_request(first + index, prompt=prompt, max_tokens=max_tokens, **request)
        for index, prompt in enumerate(prompts)
    ]
    for request in requests:
        driver.submit(request)
    return requests


def assert_finish(driver: Driver, *requests: Request) -> None:
    driver.run_until_idle()
    for request in requests:
        assert driver.outputs[request.key.handle] == expected_output(request)
    assert driver.scheduler.batch.blocks.pool.num_used == 0


def running(driver: Driver) -> set[int]:
    return {group.request.key.handle for group in driver.scheduler.running}


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_prompt_that_comes_eight_times_at_once_is_computed_once(max_in_flight):
    driver = make_driver(max_in_flight)
    requests = submit(driver, *[PROMPT] * 8)
    assert_finish(driver, *requests)
    assert driver.device.num_computed == 1000 + 7 * 8


def test_prompts_that_part_after_a_common_start_compute_that_once():
    driver = make_driver()
    requests = submit(driver, *([*PROMPT[:800], *[41 + tail] * 100] for tail in range(8)))
    assert_finish(driver, *requests)
    assert driver.device.num_computed == 800 + 8 * 100


def test_who_shares_the_start_does_not_wait_for_the_rest():
    driver = make_driver(max_in_flight=1, max_num_batched_tokens=600)
    submit(driver, [*PROMPT, *PROMPT[:100]], PROMPT[:401])
    driver.run_steps(2)
    # The second is in the step after the one that computed what both have.
    assert driver.finished == {1, 2}
    assert driver.device.num_computed == 1100 + 1


def test_a_common_start_that_is_too_short_delays_nobody():
    driver = make_driver(max_num_batched_tokens=512)
    submit(driver, [*PROMPT[:48], 41], [*PROMPT[:48], 42])
    driver.plan()
    assert running(driver) == {1, 2}


def test_those_behind_pass_who_waits_for_blocks():
    driver = make_driver(max_in_flight=1, max_num_batched_tokens=1100)
    submit(driver, PROMPT, PROMPT, [7] * 30)
    driver.plan()
    assert running(driver) == {1, 3}
    driver.deliver()
    driver.plan()
    assert running(driver) == {2}


def test_a_request_does_not_wait_for_one_that_it_goes_before():
    driver = make_driver(policy=PolicyKind.PRIORITY)
    submit(driver, PROMPT, priority=0)
    driver.plan()
    submit(driver, PROMPT[:400], priority=1)
    driver.plan()
    assert running(driver) == {1, 2}


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_those_who_wait_go_on_at_once_when_the_one_that_computes_is_gone(steps, max_in_flight):
    for leave in (
        lambda driver, key: driver.scheduler.abort(key),
        lambda driver, key: driver.scheduler.preempt(key, 0),
    ):
        driver = make_driver(max_in_flight, max_num_batched_tokens=256)
        requests = submit(driver, *[PROMPT] * 4)
        for _ in range(steps):
            driver.plan()
        assert leave(driver, requests[0].key)
        driver.check()
        while driver.results:
            driver.deliver()
        driver.plan()
        # The next one computes, from the chunks that were sealed in time; a preempted one goes on itself.
        assert len(running(driver)) == 1
        driver.run_until_idle()
        assert driver.finished >= {2, 3, 4}
        assert driver.device.num_computed <= 1000 + 256 * steps + 3 * 8


def test_those_who_wait_for_one_that_is_not_finite_compute_themselves():
    driver = make_driver(max_num_batched_tokens=256)
    driver.failing[1] = 300
    requests = submit(driver, *[PROMPT] * 4)
    driver.run_until_idle()
    assert (driver.failed, driver.finished) == ({1}, {2, 3, 4})
    for request in requests[1:]:
        assert driver.outputs[request.key.handle] == expected_output(request)
    # The first chunk was sealed, and the next three were computed by the first and by the second.
    assert driver.device.num_computed <= 1000 + 744 + 2 * 8


def test_a_lost_worker_lets_all_go():
    driver = make_driver()
    requests = submit(driver, *[PROMPT] * 4)
    driver.plan()
    driver.plan()
    driver.crash()
    assert_finish(driver, *requests)


def test_who_waits_counts_as_waiting():
    driver = make_driver()
    submit(driver, *[PROMPT] * 8)
    driver.plan()
    assert len(driver.scheduler.waiting) == 7
    assert driver.scheduler.waiting.num_tokens == 7000
    assert [group.request.key.handle for group in driver.scheduler.waiting] == list(range(2, 9))
    assert driver.scheduler.abort(next(iter(driver.scheduler.waiting)).request.key)
    driver.check()
    driver.run_until_idle()
    assert driver.finished == {1, 3, 4, 5, 6, 7, 8}
