"""When something runs out: nothing deadlocks, nothing is lost, and refusals say what to do."""

import pytest

from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.request import NeverFitsError, PinQuotaError, QueueFullError, Request
from scheduler_svc.core.sequence import SequenceStatus
from tests.support.core_driver import Driver, expected_output, make_config, make_request


def assert_finish(driver: Driver, requests: list[Request]) -> None:
    driver.run_until_idle()
    for request in requests:
        for index in range(request.num_returned):
            assert driver.samples[request.key.handle, index] == expected_output(request, index)
    assert driver.scheduler.batch.blocks.pool.num_used == driver.scheduler.pins.num_pinned
    assert driver.scheduler.swap_space.pool.num_used == 0


def test_both_pools_full_falls_back_to_recompute():
    driver = Driver(
        make_config(
            num_blocks=16, num_host_blocks=8, block_size=4, preemption_mode=PreemptionMode.SWAP, max_num_seqs=16
        )
    )
    requests = [make_request(handle, prompt_len=7, max_tokens=20, num_sequences=2) for handle in range(8)]
    for request in requests:
        driver.submit(request)
    assert_finish(driver, requests)
    swaps, preemptions = driver.scheduler.num_swap_outs, driver.scheduler.num_preemptions
    assert 0 < swaps < preemptions


def test_admission_stops_at_the_watermark_and_a_lone_group_does_not():
    driver = Driver(make_config(num_blocks=20, block_size=4, watermark=0.25), max_in_flight=1)
    driver.submit(make_request(0, prompt_len=30, max_tokens=2))
    driver.submit(make_request(1, prompt_len=28, max_tokens=2))
    driver.plan()
    # 8 of 20 blocks are taken and 5 are to be left: 7 more would fit, so 7 do.
    assert len(driver.scheduler.running) == 2
    driver.submit(make_request(2, prompt_len=3, max_tokens=2))
    driver.plan()
    assert len(driver.scheduler.waiting) == 1
    driver.run_until_idle()
    lone = make_request(3, prompt_len=70, max_tokens=10)
    driver.submit(lone)
    assert_finish(driver, [lone])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_sequences": 4, "prompt_len": 8, "max_tokens": 24},
            "4 sequences of up to 32 tokens need 26 blocks; the pool has 16: ask for fewer sequences or tokens",
        ),
        ({"num_sequences": 9}, "best_of is 9; at most 8 sequences run at once"),
        ({"prompt_len": 60, "max_tokens": 5}, r"make 65 tokens; a sequence can have at most 64"),
    ],
)
def test_what_can_never_run_is_refused_at_once(options, message):
    driver = Driver(make_config(num_blocks=16, block_size=4))
    with pytest.raises(NeverFitsError, match=message):
        driver.submit(make_request(1, **options))
    assert len(driver.scheduler.waiting) == 0


def test_the_largest_group_that_fits_runs_beside_others():
    driver = Driver(make_config(num_blocks=16, num_host_blocks=16, block_size=4))
    largest = make_request(1, prompt_len=8, max_tokens=22, num_sequences=2, num_returned=2, beam=BeamParameters(2))
    others = [make_request(handle, prompt_len=9, max_tokens=12) for handle in range(2, 6)]
    driver.submit(others[0])
    driver.submit(largest)
    for request in others[1:]:
        driver.submit(request)
    assert_finish(driver, [largest, *others])


def test_the_longest_possible_request_runs_alone_and_others_after_it():
    driver = Driver(make_config(num_blocks=8, num_host_blocks=8, block_size=4, watermark=0.5))
    # 32 tokens in a pool of 32 slots, with the smallest prompt and with the largest.
    requests = [make_request(1, prompt_len=1, max_tokens=31), make_request(2, prompt_len=31, max_tokens=1)]
    requests.append(make_request(3, prompt_len=3, max_tokens=3))
    for request in requests:
        driver.submit(request)
    assert_finish(driver, requests)


@pytest.mark.parametrize("mode", PreemptionMode)
def test_many_beam_groups_take_turns_in_a_pool_that_holds_one(mode):
    driver = Driver(make_config(num_blocks=14, num_host_blocks=20, block_size=4, preemption_mode=mode))
    requests = [
        make_request(handle, prompt_len=6, max_tokens=12, num_sequences=3, num_returned=3, beam=BeamParameters(3))
        for handle in range(6)
    ]
    for request in requests:
        driver.submit(request)
    assert_finish(driver, requests)
    assert driver.scheduler.num_preemptions > 0
    assert (driver.scheduler.num_swap_outs == 0) == (mode is PreemptionMode.RECOMPUTE)


def test_a_group_larger_than_host_memory_is_recomputed_while_smaller_ones_are_swapped():
    driver = Driver(make_config(num_host_blocks=5, block_size=4, preemption_mode=PreemptionMode.SWAP), max_in_flight=1)
    large = make_request(1, prompt_len=12, max_tokens=12, num_sequences=4)
    small = make_request(2, prompt_len=8, max_tokens=12)
    driver.submit(large)
    driver.submit(small)
    for _ in range(4):
        driver.plan()
        driver.deliver()
    assert driver.scheduler.preempt(small.key, driver.clock)
    assert driver.scheduler.preempt(large.key, driver.clock)
    assert [len(queue) for queue in (driver.scheduler.swapped, driver.scheduler.waiting)] == [1, 1]
    assert_finish(driver, [large, small])


def test_pins_that_take_everything_keep_nobody_from_running():
    driver = Driver(make_config(num_blocks=8, block_size=4, pin_quota=1.0, max_pinned=1.0, max_model_len=40))
    driver.scheduler.pin("", [7] * 31, 0.0, 1e6)
    driver.run_until_idle()
    assert driver.scheduler.pins.num_pinned == 7
    with pytest.raises(PinQuotaError):
        driver.scheduler.pin("", [8] * 8, 0.0, 1e6)
    requests = [make_request(1, prompt_len=3, max_tokens=1), make_request(2, prompt_len=20, max_tokens=12)]
    for request in requests:
        driver.submit(request)
    assert_finish(driver, requests)
    assert driver.scheduler.pins.num_pinned == 0


def test_a_pin_gives_way_to_a_swapped_group_too():
    driver = Driver(
        make_config(num_blocks=12, num_host_blocks=12, block_size=4, pin_quota=1.0, max_pinned=1.0), max_in_flight=1
    )
    driver.submit(make_request(1, prompt=[9] * 37, max_tokens=2))
    driver.run_until_idle()
    group = make_request(2, prompt_len=8, max_tokens=16, num_sequences=2)
    driver.submit(group)
    while group.key not in driver.scheduler.running:
        driver.plan()
    driver.deliver()
    driver.plan()
    driver.deliver()
    assert driver.scheduler.preempt(group.key, driver.clock)
    assert group.key in driver.scheduler.swapped
    # What the first request left is still cached, so it is pinned at once.
    assert driver.scheduler.pin("", [9] * 32, driver.clock, 1e6).is_held
    driver.check()
    assert_finish(driver, [group])
    assert driver.scheduler.pins.num_pinned == 0


def test_a_full_queue_refuses_and_goes_on():
    driver = Driver(make_config(max_waiting_requests=3, max_waiting_tokens=20, max_num_seqs=1))
    requests = [make_request(handle, prompt_len=5, max_tokens=3) for handle in range(3)]
    for request in requests:
        driver.submit(request)
    with pytest.raises(QueueFullError, match="4 requests would be waiting; there is room for 3"):
        driver.submit(make_request(9, prompt_len=1))
    assert driver.scheduler.abort(requests.pop().key)
    with pytest.raises(QueueFullError, match="21 tokens would be waiting; there is room for 20"):
        driver.submit(make_request(9, prompt_len=11))
    assert_finish(driver, requests)


def test_aborting_all_at_any_moment_frees_everything():
    statuses = set()
    for moment in range(12):
        driver = Driver(make_config(num_blocks=14, num_host_blocks=8, block_size=4, max_num_seqs=8), max_in_flight=2)
        requests = [make_request(handle, prompt_len=7, max_tokens=14, num_sequences=2) for handle in range(4)]
        for request in requests:
            driver.submit(request)
        for _ in range(moment):
            driver.plan()
            driver.deliver()
        for request in requests:
            statuses |= {sequence.status for group in driver.scheduler.groups() for sequence in group.sequences}
            driver.scheduler.abort(request.key)
            driver.check()
        driver.run_until_idle()
        assert driver.scheduler.batch.blocks.pool.num_used == driver.scheduler.swap_space.pool.num_used == 0
    assert {SequenceStatus.WAITING, SequenceStatus.RUNNING, SequenceStatus.SWAPPED} <= statuses
