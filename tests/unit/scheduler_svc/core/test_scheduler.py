"""Requests from arrival to end: steps, results, ends, losses of the worker, and their reported usage."""

from dataclasses import replace

import pytest

from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import PolicyKind, PreemptionMode
from scheduler_svc.core.request import (
    DuplicateKeyError,
    NeverFitsError,
    QueueFullError,
    RefusedError,
    Request,
    sequence_seed,
)
from scheduler_svc.core.sequence import Milestone, Timeline
from tests.support.core_driver import Driver, expected_output, make_config, make_request, token_logprob


def test_prefill_is_cut_into_chunks_and_mixed_with_decodes_under_the_budget():
    driver = Driver(make_config(max_num_batched_tokens=10), max_in_flight=1)
    driver.submit(make_request(1, prompt_len=4, max_tokens=10))
    driver.run_steps(1)
    long = make_request(2, prompt_len=25, max_tokens=2)
    driver.submit(long)
    chunks = []
    for _ in range(3):
        plan = driver.next_plan()
        assert plan.num_tokens <= 10
        chunks.append(plan.num_new_tokens.tolist())
        driver.deliver()
    assert chunks == [[1, 9], [1, 9], [1, 7]]
    driver.finish(long)


@pytest.mark.parametrize("logprobs", [None, 1])
def test_usage_of_a_resubmitted_request_tells_prompt_from_output_and_prefill_from_decode(logprobs):
    driver = Driver(make_config(), max_in_flight=1)
    whole = make_request(1, prompt_len=5, max_tokens=30)
    driver.submit(whole)
    driver.run_until_idle()
    again = make_request(2, prompt=list(whole.prompt), max_tokens=30, emitted=tuple(driver.outputs[1][:20]))
    sampling = replace(whole.sampling, logprobs=logprobs)
    driver.submit(replace(again, sampling=sampling))
    arrived = driver.clock
    driver.finish(whole)
    usage = driver.usage[2]
    # Six blocks of 4 tokens are cached, mostly with output.
    assert (usage.prompt_tokens, usage.cached_tokens, usage.generated_tokens) == (5, 5, 30)
    assert (usage.queue_s, usage.prefill_s, usage.decode_s) == (0.0, 1.0, 9.0)
    assert driver.clock == arrived + 10


def test_usage_tells_queueing_prefill_and_decode_apart():
    driver = Driver(make_config(), max_in_flight=1)
    driver.clock = 10.0
    driver.submit(make_request(1, prompt_len=5, max_tokens=3))
    driver.clock = 12.0
    ends = []
    for _ in range(3):
        driver.plan()
        ends += [end for events in driver.deliver().values() for end in events.completed]
    (end,) = ends
    assert (end.usage.prompt_tokens, end.usage.generated_tokens) == (5, 3)
    assert (end.usage.queue_s, end.usage.prefill_s, end.usage.decode_s) == (2.0, 1.0, 2.0)


@pytest.mark.parametrize(
    ("request_", "error", "words"),
    [
        (make_request(1, prompt_len=120, max_tokens=9), NeverFitsError, "make 129 tokens; a sequence can have at most"),
        (
            make_request(1, prompt_len=55, max_tokens=10),
            NeverFitsError,
            "make 65 tokens; a sequence can have at most 64",
        ),
        (
            make_request(1, num_sequences=4, prompt_len=8, max_tokens=24),
            NeverFitsError,
            "4 sequences of up to 32 tokens need 26 blocks; the pool has 16: ask for fewer sequences or tokens",
        ),
        (make_request(1, num_sequences=9), NeverFitsError, "best_of is 9; at most 8 sequences run at once"),
        (make_request(1, prompt_len=0), RefusedError, "prompt"),
        (make_request(1, max_tokens=0), RefusedError, "max_tokens"),
        (make_request(1, max_tokens=2, emitted=(1, 2)), RefusedError, "emitted"),
        (make_request(1, num_sequences=2, num_returned=3), RefusedError, "n is 3"),
        (make_request(1, num_sequences=2, emitted=(1, 2)), RefusedError, "best_of is 2"),
        (
            make_request(1, num_sequences=2, beam=BeamParameters(3)),
            RefusedError,
            "beam_width is 3, best_of is 2: both must be equal",
        ),
        (
            make_request(1, num_sequences=1, beam=BeamParameters(1), emitted=(1,)),
            RefusedError,
            "cannot continue after emitted tokens",
        ),
    ],
)
def test_a_request_that_cannot_run_is_refused_with_its_numbers(request_, error, words):
    # The pool is smaller than the context.
    driver = Driver(make_config(num_blocks=16, block_size=4))
    with pytest.raises(error, match=words):
        driver.submit(request_)
    assert len(driver.scheduler.waiting) == 0


def test_a_full_queue_refuses_by_requests_and_by_tokens_but_takes_what_was_accepted_before():
    driver = Driver(make_config(max_waiting_requests=2, max_waiting_tokens=12))
    driver.submit(make_request(1, prompt_len=5))
    with pytest.raises(QueueFullError, match="13 tokens would be waiting; there is room for 12"):
        driver.submit(make_request(2, prompt_len=8))
    # Tokens that a caller already has count too, and do not let it pass the queue.
    with pytest.raises(QueueFullError, match="13 tokens would be waiting; there is room for 12"):
        driver.submit(make_request(2, prompt_len=5, emitted=(1, 2, 3)))
    driver.submit(make_request(2, prompt_len=5, emitted=(1, 2)))
    with pytest.raises(QueueFullError, match="room for 2"):
        driver.submit(make_request(3, prompt_len=1, emitted=(1,)))
    driver.submit(replace(make_request(3, prompt_len=5), accepted_before=True))


def test_a_prompt_counts_once_in_the_queue_however_many_sequences_are_sampled_from_it():
    driver = Driver(make_config(max_waiting_tokens=20))
    driver.submit(make_request(1, prompt_len=10, num_sequences=8))
    assert driver.scheduler.waiting.num_tokens == 10
    driver.submit(make_request(2, prompt_len=10, num_sequences=4, num_returned=1))
    with pytest.raises(QueueFullError, match="21 tokens"):
        driver.submit(make_request(3, prompt_len=1))


def test_a_group_that_waits_again_counts_its_prompt_once_and_the_output_of_each_sequence():
    driver = Driver(make_config(preemption_mode=PreemptionMode.RECOMPUTE), max_in_flight=1)
    request = make_request(1, prompt_len=10, max_tokens=8, num_sequences=3)
    driver.submit(request)
    driver.run_steps(4)
    driver.preempt(request)
    assert driver.scheduler.waiting.num_tokens == 10 + 3 * 4
    driver.run_until_idle()
    assert driver.scheduler.waiting.num_tokens == 0


def test_a_handle_in_use_is_refused():
    driver = Driver(make_config())
    driver.submit(make_request(1))
    with pytest.raises(DuplicateKeyError):
        driver.submit(make_request(1))


PREEMPTIONS = [(PreemptionMode.SWAP, Milestone.SWAPPED_OUT), (PreemptionMode.RECOMPUTE, Milestone.RECOMPUTED)]


def timeline_of(driver: Driver, request: Request) -> Timeline:
    return next(group.timeline for group in driver.scheduler.groups() if group.request.key == request.key)


@pytest.mark.parametrize(("mode", "milestone"), PREEMPTIONS)
def test_a_preemption_and_the_return_are_told_with_their_times(mode: PreemptionMode, milestone: Milestone) -> None:
    driver = Driver(make_config(num_blocks=9, preemption_mode=mode, num_host_blocks=16))
    older, newer = make_request(1, prompt_len=4, max_tokens=20), make_request(2, prompt_len=4, max_tokens=20)
    driver.submit(older, newer)
    lines = [timeline_of(driver, request) for request in (older, newer)]
    driver.run_steps(3)
    started, preempted_at = lines[1].started, driver.clock
    driver.preempt(newer)
    assert lines[1].milestones == [(milestone, preempted_at)]
    # Later the pool runs out, and the newer request is preempted.
    driver.run_until_idle()
    assert lines[0].milestones == []
    told = [each for each, _ in lines[1].milestones]
    assert told == [milestone, Milestone.RESUMED] * (len(told) // 2)
    assert len(told) > 2
    assert lines[1].started == started
    times = [at for _, at in lines[1].milestones]
    assert times == sorted(times)


def test_a_displaced_request_and_one_whose_worker_was_lost_say_so() -> None:
    driver = Driver(make_config(num_blocks=6, policy=PolicyKind.PRIORITY, num_host_blocks=16))
    low, waits = make_request(1, prompt_len=12, max_tokens=8), make_request(3, prompt_len=12, max_tokens=8, priority=-1)
    driver.submit(low, waits)
    driver.run_steps(1)
    lines = [timeline_of(driver, request) for request in (low, waits)]
    driver.submit(make_request(2, prompt_len=12, max_tokens=8, priority=5))
    driver.run_steps(2)
    driver.crash()
    driver.run_until_idle()
    told = [[each for each, _ in line.milestones] for line in lines]
    assert told == [[Milestone.RECOMPUTED, Milestone.RESUMED], []]
    last = make_request(4, max_tokens=8)
    driver.submit(last)
    line = timeline_of(driver, last)
    driver.run_steps(2)
    driver.crash()
    driver.run_until_idle()
    assert [each for each, _ in line.milestones] == [Milestone.WORKER_LOST, Milestone.RESUMED]


def test_the_first_sample_is_what_the_request_alone_would_get():
    request = make_request(1, num_sequences=3)
    assert request.sampling_of(0).seed == request.sampling.seed
    assert len({request.sampling_of(index).seed for index in range(3)}) == 3
    # The other samples' seeds are the same in every version, so that a sample can be repeated.
    assert sequence_seed(2**64 - 1, 5) == 0xE0B1F3D51CE50AF9


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
