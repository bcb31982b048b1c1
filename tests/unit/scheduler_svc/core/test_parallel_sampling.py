"""Several samples of one prompt (the paper's section 4.4, figure 8): computed once, stored once, copied on write."""

import pytest

from scheduler_svc.core.request import sequence_seed
from tests.support.core_driver import Driver, expected_output, make_config, make_request, token_logprob


def test_the_prompt_is_computed_once_whatever_the_number_of_samples():
    driver = Driver(make_config())
    request = make_request(1, prompt_len=10, max_tokens=5, num_sequences=4)
    driver.submit(request)
    driver.run_until_idle()
    assert driver.device.num_computed == 10 + 4 * 4
    driver.finish(request)


def test_all_copies_of_a_step_go_out_as_one_list():
    driver = Driver(make_config(), max_in_flight=1)
    driver.submit(make_request(1, prompt_len=6, max_tokens=5, num_sequences=5))
    driver.run_steps(1)
    plan = driver.next_plan()
    assert [source for source, _ in plan.copies.tolist()] == [1, 1, 1, 1]
    assert len({target for _, target in plan.copies.tolist()}) == 4


def test_a_prompt_that_fills_its_blocks_is_never_copied():
    driver = Driver(make_config(block_size=4))
    driver.submit(make_request(1, prompt_len=8, max_tokens=6, num_sequences=3))
    copies = 0
    while (plan := driver.plan()) is not None or driver.results:
        copies += 0 if plan is None else len(plan.copies)
        driver.deliver()
    assert copies == 0
    driver.finish(make_request(1, prompt_len=8, max_tokens=6, num_sequences=3))


def test_the_first_sample_is_what_the_request_alone_would_get():
    request = make_request(1, num_sequences=3)
    assert request.sampling_of(0).seed == request.sampling.seed
    assert len({request.sampling_of(index).seed for index in range(3)}) == 3
    assert 0 <= sequence_seed(2**64 - 1, 5) < 2**64


def test_best_of_delivers_the_samples_with_the_highest_mean_logprob_at_the_end():
    driver = Driver(make_config())
    request = make_request(3, max_tokens=6, num_sequences=5, num_returned=2)
    driver.submit(request)
    while not driver.finished:
        driver.plan()
        events = driver.deliver()
        if not driver.finished:
            assert not events
    outputs = [expected_output(request, index) for index in range(5)]
    seeds = [request.sampling_of(index).seed for index in range(5)]
    mean = [sum(token_logprob(seed, t) for t in out) / len(out) for seed, out in zip(seeds, outputs, strict=True)]
    best = sorted(range(5), key=lambda index: -mean[index])
    assert [driver.samples[3, 0], driver.samples[3, 1]] == [outputs[best[0]], outputs[best[1]]]
    assert driver.usage[3].generated_tokens == 30


@pytest.mark.parametrize("steps", range(6))
def test_one_sequence_can_be_ended_while_it_recomputes_what_the_others_share(steps: int) -> None:
    driver = Driver(make_config(num_blocks=40, max_num_batched_tokens=8, max_num_seqs=8))
    request = make_request(1, prompt_len=21, max_tokens=10, num_sequences=3)
    driver.submit(request)
    while len(driver.samples[1, 0]) < 4:
        driver.run_steps(1)
    driver.crash()
    driver.run_steps(steps)
    assert driver.scheduler.abort_sequence(request.key, 0)
    driver.run_until_idle()
    for index in (1, 2):
        assert driver.samples[1, index] == expected_output(request, index)
