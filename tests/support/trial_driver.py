"""Requests of which some are refused by the worker, or kill it."""

from collections.abc import Mapping

from tests.support.core_driver import Driver, expected_output, make_config, make_request


def make_driver(
    *,
    poisoned: Mapping[int, int] | None = None,
    deadly: Mapping[int, int] | None = None,
    num_requests: int = 6,
    max_in_flight: int = 2,
    **config,
) -> Driver:
    """With requests of 12 tokens, by handle, those `poisoned` and `deadly` as `Driver` has it."""
    driver = Driver(make_config(**config), max_in_flight)
    driver.poisoned, driver.deadly = dict(poisoned or {}), dict(deadly or {})
    for handle in range(num_requests):
        driver.submit(make_request(handle, max_tokens=12, priority=min(handle, 100)))
    return driver


def assert_others_finish(driver: Driver, num_requests: int = 6) -> None:
    """All requests that nothing is wrong with get their whole output, and no others."""
    driver.run_until_idle()
    assert driver.failed == {*driver.poisoned, *driver.deadly}
    assert driver.finished == set(range(num_requests)) - driver.failed
    for handle in driver.finished:
        assert driver.outputs[handle] == expected_output(make_request(handle, max_tokens=12))
    assert driver.scheduler.batch.blocks.pool.num_used == 0
