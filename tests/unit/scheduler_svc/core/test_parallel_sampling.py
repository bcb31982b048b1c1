"""Several samples of one prompt (the paper's section 4.4, figure 8): computed once, stored once, copied on write."""

from dataclasses import replace

import pytest

from scheduler_svc.core.request import EmittedSequence, RefusedError, Request, sequence_seed
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


def test_samples_end_one_by_one_and_the_request_with_the_last():
    request = make_request(1, max_tokens=20, num_sequences=2)
    stop = expected_output(request, 1)[2]
    request = replace(request, stop_token_ids=frozenset([stop]))
    driver = Driver(make_config())
    driver.submit(request)
    driver.run_until_idle()
    assert len(driver.samples[1, 1]) == 3
    assert_all_samples(driver, request)


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


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_a_preempted_group_is_recomputed_as_one_and_loses_nothing(in_flight):
    driver = Driver(make_config(num_blocks=16, block_size=4, max_model_len=40), in_flight)
    requests = [make_request(i, prompt_len=6, max_tokens=18, num_sequences=2) for i in range(3)]
    for request in requests:
        driver.submit(request)
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions > 0
    for request in requests:
        assert_all_samples(driver, request)


def test_a_group_that_fills_the_whole_pool_is_recomputed_with_its_prompt_shared():
    # 3 full prompt blocks and 4 x 2 others: the group fits only if the prompt is stored once.
    config = make_config(num_blocks=11, block_size=4, max_model_len=24)
    driver = Driver(config)
    request = make_request(1, prompt_len=13, max_tokens=8, num_sequences=4)
    driver.submit(request)
    for _ in range(6):
        driver.plan()
        driver.deliver()
    driver.crash()
    driver.run_until_idle()
    assert_all_samples(driver, request)


def test_recompute_of_a_group_in_small_chunks_reads_no_block_before_it_is_computed():
    driver = Driver(make_config(num_blocks=40, max_num_batched_tokens=8, max_num_seqs=8))
    request = make_request(1, prompt_len=21, max_tokens=10, num_sequences=3)
    driver.submit(request)
    while len(driver.samples[1, 0]) < 4:
        driver.plan()
        driver.deliver()
    driver.crash()
    driver.run_until_idle()
    assert_all_samples(driver, request)


@pytest.mark.parametrize("steps", range(6))
def test_one_sequence_can_be_ended_while_it_recomputes_what_the_others_share(steps: int) -> None:
    driver = Driver(make_config(num_blocks=40, max_num_batched_tokens=8, max_num_seqs=8))
    request = make_request(1, prompt_len=21, max_tokens=10, num_sequences=3)
    driver.submit(request)
    while len(driver.samples[1, 0]) < 4:
        driver.plan()
        driver.deliver()
    driver.crash()
    for _ in range(steps):
        driver.plan()
        driver.deliver()
    assert driver.scheduler.abort_sequence(request.key, 0)
    driver.run_until_idle()
    for index in (1, 2):
        assert driver.samples[1, index] == expected_output(request, index)


def test_where_samples_are_selected_at_the_end_nothing_is_thrown_away():
    driver = Driver(make_config(max_num_batched_tokens=8))
    request = make_request(1, prompt_len=30, max_tokens=4, num_sequences=3, num_returned=1)
    driver.submit(request)
    driver.plan()
    driver.deliver()
    assert driver.scheduler.abort_sequence(request.key, 0)
    assert request.key in driver.scheduler.running
    driver.run_until_idle()
    assert driver.finished == {1}


def test_one_sequence_can_be_ended_and_the_others_go_on():
    driver = Driver(make_config())
    request = make_request(1, max_tokens=12, num_sequences=3)
    driver.submit(request)
    while len(driver.samples[1, 0]) < 3:
        driver.plan()
        driver.deliver()
    assert driver.scheduler.abort_sequence(request.key, 1)
    driver.check()
    driver.run_until_idle()
    assert driver.samples[1, 0] == expected_output(request, 0)
    assert driver.samples[1, 2] == expected_output(request, 2)
    assert len(driver.samples[1, 1]) < 12
    assert driver.finished == {1}
    assert not driver.scheduler.abort_sequence(request.key, 0)


def test_ending_every_sequence_ends_the_request():
    driver = Driver(make_config())
    request = make_request(1, num_sequences=2)
    driver.submit(request)
    driver.plan()
    for index in (0, 1):
        assert driver.scheduler.abort_sequence(request.key, index)
        driver.check()
    assert driver.scheduler.batch.blocks.pool.num_used == 0
    assert len(driver.scheduler.running) == 0


def test_a_resubmitted_group_goes_on_where_each_sequence_was():
    request = make_request(1, max_tokens=8, num_sequences=3)
    outputs = [expected_output(request, index) for index in range(3)]
    emitted = [EmittedSequence(outputs[0][:3]), EmittedSequence(outputs[1], has_ended=True), EmittedSequence(())]
    resumed = replace(request, emitted=emitted)
    driver = Driver(make_config())
    driver.submit(resumed)
    driver.run_until_idle()
    assert_all_samples(driver, resumed)
    assert driver.usage[1].generated_tokens == 24


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_sequences": 2, "num_returned": 3}, "n is 3"),
        ({"num_sequences": 2, "emitted": (1, 2)}, "best_of is 2"),
    ],
)
def test_a_group_that_cannot_run_is_refused_with_its_numbers(changes, words):
    driver = Driver(make_config())
    with pytest.raises(RefusedError, match=words):
        driver.submit(make_request(1, **changes))
    assert len(driver.scheduler.waiting) == 0
