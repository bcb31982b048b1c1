"""Several samples of one prompt (the paper's section 4.4, figure 8): computed once, stored once, copied on write."""

from scheduler_svc.core.request import Request, sequence_seed
from tests.support.core_driver import Driver, expected_output, make_config, make_request, token_logprob


def assert_all_samples(driver: Driver, request: Request) -> None:
    for index in range(request.num_returned):
        assert driver.samples[request.key.handle, index] == expected_output(request, index)
    assert request.key.handle in driver.finished
    assert driver.scheduler.batch.blocks.pool.num_used == 0
    assert driver.scheduler.batch.rows.num_free == driver.scheduler.config.max_num_seqs


def test_the_prompt_is_computed_once_whatever_the_number_of_samples():
    driver = Driver(make_config())
    request = make_request(1, prompt_len=10, max_tokens=5, num_sequences=4)
    driver.submit(request)
    driver.run_until_idle()
    assert driver.device.num_computed == 10 + 4 * 4
    assert_all_samples(driver, request)


def test_all_copies_of_a_step_go_out_as_one_list():
    driver = Driver(make_config(), max_in_flight=1)
    driver.submit(make_request(1, prompt_len=6, max_tokens=5, num_sequences=5))
    driver.plan()
    driver.deliver()
    plan = driver.plan()
    assert plan is not None
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
    assert_all_samples(driver, make_request(1, prompt_len=8, max_tokens=6, num_sequences=3))


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
