"""A pool that is far too small for what comes: how often requests are preempted, and how long all of them take.

All scenarios run twice: with admission as it is, and with one that looks no step ahead.
"""

from dataclasses import dataclass

from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.request import Request
from tests.support.core_driver import Driver, make_config, make_request


@dataclass(frozen=True, slots=True)
class Pressure:
    """What a scenario cost."""

    num_preemptions: int
    num_steps: int
    num_computed: int
    """Tokens, those included that were computed again."""


def make_requests(count: int, *, prompt_len: int, max_tokens: int, num_sequences: int = 1) -> list[Request]:
    return [
        make_request(handle, prompt_len=prompt_len, max_tokens=max_tokens, num_sequences=num_sequences)
        for handle in range(count)
    ]


SCENARIOS = [
    (
        make_config(num_blocks=20, max_num_seqs=18, max_num_batched_tokens=64),
        make_requests(18, prompt_len=12, max_tokens=40),
    ),
    (
        make_config(num_blocks=20, block_size=16, max_num_seqs=18, max_num_batched_tokens=64, max_model_len=256),
        make_requests(18, prompt_len=16, max_tokens=120),
    ),
    (
        make_config(num_blocks=20, max_num_seqs=18, watermark=0.01),
        make_requests(18, prompt_len=5, max_tokens=60),
    ),
    (
        make_config(
            num_blocks=30, block_size=8, num_host_blocks=40, max_num_seqs=24, preemption_mode=PreemptionMode.SWAP
        ),
        make_requests(12, prompt_len=10, max_tokens=40, num_sequences=3),
    ),
]


def pressure_of_all() -> Pressure:
    """What all scenarios cost together."""
    schedulers, num_computed = [], 0
    for config, requests in SCENARIOS:
        driver = Driver(config)
        for request in requests:
            driver.submit(request)
        driver.run_until_idle()
        assert driver.finished == {request.key.handle for request in requests}
        schedulers.append(driver.scheduler)
        num_computed += driver.device.num_computed
    return Pressure(
        sum(each.num_preemptions for each in schedulers), sum(each.num_steps for each in schedulers), num_computed
    )


def test_looking_ahead_preempts_a_third_less_and_takes_no_longer(monkeypatch):
    ahead = pressure_of_all()
    monkeypatch.setattr("scheduler_svc.core.admission._STEPS_AHEAD", 0)
    blind = pressure_of_all()
    assert ahead.num_preemptions < 0.67 * blind.num_preemptions
    assert ahead.num_computed < blind.num_computed
    # Which groups share the last steps is chance: some scenarios take a few steps more, some fewer.
    assert ahead.num_steps < 1.01 * blind.num_steps


def test_a_group_that_would_be_preempted_by_its_next_step_waits():
    driver = Driver(make_config(num_blocks=5), max_in_flight=1)
    driver.submit(make_request(1, prompt_len=8, max_tokens=8))
    driver.submit(make_request(2, prompt_len=8, max_tokens=8))
    driver.plan()
    # Two blocks each leave one, and both would take another for their ninth token.
    assert [group.request.key.handle for group in driver.scheduler.running] == [1]
    driver.run_until_idle()
    assert driver.finished == {1, 2}
    assert driver.scheduler.num_preemptions == 0


def test_who_needs_no_further_block_is_admitted_into_the_last_ones():
    driver = Driver(make_config(num_blocks=4), max_in_flight=1)
    for handle in (1, 2):
        driver.submit(make_request(handle, prompt_len=7, max_tokens=2))
    driver.plan()
    assert len(driver.scheduler.running) == 2
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions == 0
