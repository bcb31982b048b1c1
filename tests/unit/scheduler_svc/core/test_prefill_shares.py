"""A long prompt leaves shorter ones that wait a part of each step, and takes what they leave."""

import pytest

from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.step import StepPlan
from tests.support.core_driver import Driver, expected_output, make_config, make_request


def make_driver(max_in_flight: int = 1, **config) -> Driver:
    defaults = {"num_blocks": 2000, "block_size": 4, "max_num_seqs": 32, "max_num_batched_tokens": 32}
    return Driver(make_config(**(defaults | {"max_model_len": 1500} | config)), max_in_flight)


def plan(driver: Driver) -> StepPlan:
    step = driver.plan()
    assert step is not None
    driver.deliver()
    return step


def chunks(driver: Driver, step: StepPlan) -> dict[int, int]:
    """Tokens that each running request computes in the step."""
    sequences = [driver.scheduler.batch.rows.sequences[row] for row in step.rows.tolist()]
    tokens = zip(sequences, step.num_new_tokens.tolist(), strict=True)
    return {sequence.request.key.handle: count for sequence, count in tokens if sequence is not None}


def steps_to_first_token(driver: Driver, handle: int) -> int:
    for count in range(1, 200):
        plan(driver)
        if driver.outputs[handle]:
            return count
    raise AssertionError("no first token")


@pytest.mark.parametrize(("share", "steps"), [(0.5, 1), (0.9, 2), (1.0, 39)])
def test_a_short_prompt_behind_a_long_one_has_its_first_token_soon(share, steps):
    driver = make_driver(max_prefill_share=share)
    driver.submit(make_request(1, prompt_len=1_250, max_tokens=2))
    plan(driver)
    driver.submit(make_request(2, prompt_len=5, max_tokens=2))
    assert steps_to_first_token(driver, 2) == steps


def test_who_comes_behind_several_long_ones_does_not_wait_for_them_either():
    driver = make_driver()
    for handle in (1, 2, 3):
        driver.submit(make_request(handle, prompt_len=400 + handle, max_tokens=2))
    plan(driver)
    driver.submit(make_request(4, prompt_len=3, max_tokens=2))
    assert steps_to_first_token(driver, 4) == 1


def test_steps_are_as_full_as_without_a_bound():
    num_steps = []
    for share in (0.3, 0.5, 1.0):
        driver = make_driver(max_prefill_share=share)
        for handle in range(1, 40):
            driver.submit(make_request(handle, prompt_len=200 if handle % 10 == 1 else 5, max_tokens=1))
        tokens = []
        while (step := driver.plan()) is not None:
            tokens.append(step.num_tokens)
            driver.deliver()
        assert set(tokens[:-1]) == {32}
        num_steps.append(len(tokens))
    assert len(set(num_steps)) == 1


def test_a_long_prompt_gets_its_share_under_a_stream_of_short_ones():
    driver = make_driver()
    driver.submit(make_request(1, prompt_len=320, max_tokens=1))
    for handle in range(2, 25):
        for extra in range(3):
            driver.submit(make_request(100 * handle + extra, prompt_len=13, max_tokens=1))
        step = plan(driver)
        if 1 in driver.finished:
            break
        assert chunks(driver, step)[1] >= 16
    assert 1 in driver.finished


def test_prompts_of_the_same_length_come_one_after_the_other():
    driver = make_driver()
    for handle in (1, 2):
        driver.submit(make_request(handle, prompt_len=120, max_tokens=2))
    assert [chunks(driver, plan(driver)) for _ in range(3)] == [{1: 32}, {1: 32}, {1: 32}]


def test_what_is_cached_does_not_count_as_length():
    driver = make_driver()
    prompt = [7 + index % 40 for index in range(800)]
    driver.submit(make_request(1, prompt=prompt, max_tokens=1))
    driver.run_until_idle()
    driver.submit(make_request(2, prompt_len=400, max_tokens=1))
    plan(driver)
    driver.submit(make_request(3, prompt=[*prompt, 1, 2, 3], max_tokens=1))
    assert steps_to_first_token(driver, 3) == 1


@pytest.mark.parametrize("mode", PreemptionMode)
def test_sequences_that_read_what_another_one_computes_come_after_it(mode):
    driver = make_driver(max_num_batched_tokens=64, num_host_blocks=100, preemption_mode=mode, max_in_flight=2)
    several = make_request(1, prompt_len=200, max_tokens=60, num_sequences=3)
    driver.submit(several)
    driver.run_steps(30)
    driver.preempt(several)
    pool = driver.scheduler.batch.blocks.pool
    # Nothing of it is cached any more.
    pool.free(pool.allocate(pool.num_free))
    for handle in range(2, 6):
        driver.submit(make_request(handle, prompt_len=30, max_tokens=3))
    driver.run_until_idle()
    assert [driver.samples[1, index] for index in range(3)] == [expected_output(several, index) for index in range(3)]


def test_a_share_of_nothing_is_refused():
    with pytest.raises(ValueError, match="max_prefill_share is 0"):
        make_config(max_prefill_share=0)
