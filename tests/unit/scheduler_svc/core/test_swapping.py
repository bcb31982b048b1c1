"""Preemption by swap (the paper's section 4.5): all or nothing per group, shared blocks once, back before others."""

from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.sequence import SequenceStatus
from tests.support.core_driver import Driver, make_config, make_request


def make_driver(max_in_flight: int = 1, **config) -> Driver:
    return Driver(make_config(**({"num_host_blocks": 32} | config)), max_in_flight)


def test_auto_swaps_several_sequences_and_recomputes_one():
    driver = make_driver()
    several = make_request(1, prompt_len=6, max_tokens=8, num_sequences=2)
    one = make_request(2, prompt_len=6, max_tokens=8)
    driver.submit(several, one)
    driver.run_steps(3)
    driver.preempt(several)
    driver.preempt(one)
    assert several.key in driver.scheduler.swapped
    assert one.key in driver.scheduler.waiting
    assert (driver.scheduler.num_preemptions, driver.scheduler.num_swap_outs) == (2, 1)
    driver.finish(several, one)


def test_a_shared_block_moves_once_and_is_shared_again():
    driver = make_driver(block_size=4)
    request = make_request(1, prompt_len=8, max_tokens=8, num_sequences=3)
    driver.submit(request)
    driver.run_steps(3)
    driver.preempt(request)
    # Two blocks of the prompt, once, and one for each sequence.
    host = driver.scheduler.swap_space.pool
    assert host.num_used == 2 + 3
    tables = [sequence.block_table for sequence in driver.scheduler.swapped.first().sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert [host.ref_count(block) for block in tables[0]] == [3, 3, 1]
    # Somebody else takes all blocks for a moment, so that nothing of it is cached any more.
    pool = driver.scheduler.batch.blocks.pool
    pool.free(pool.allocate(pool.num_free))
    plan = driver.next_plan()
    assert len(plan.swap_out) == len(plan.swap_in) == 5
    tables = [sequence.block_table for sequence in driver.scheduler.running.first().sequences]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    assert [driver.scheduler.batch.blocks.pool.ref_count(block) for block in tables[0]] == [3, 3, 1]
    driver.deliver()
    driver.finish(request)


def test_what_the_prefix_cache_still_has_is_not_moved_back():
    driver = make_driver(block_size=4)
    request = make_request(1, prompt_len=8, max_tokens=8, num_sequences=2)
    driver.submit(request)
    driver.run_steps(3)
    driver.preempt(request)
    plan = driver.next_plan()
    assert (len(plan.swap_out), len(plan.swap_in)) == (4, 2)
    driver.deliver()
    driver.finish(request)


def test_samples_that_have_not_parted_yet_copy_their_tail_after_they_are_back():
    driver = make_driver(block_size=4)
    request = make_request(1, prompt_len=6, max_tokens=6, num_sequences=3)
    driver.submit(request)
    driver.run_steps(1)
    # Forked, each with a first token of its own, and nothing written yet: figure 8 before its second step.
    driver.preempt(request)
    assert driver.scheduler.swap_space.pool.num_used == 2
    plan = driver.next_plan()
    assert len(plan.copies) == 2
    driver.deliver()
    driver.finish(request)


def test_a_group_comes_back_only_with_room_for_the_copies_that_it_makes_then():
    driver = make_driver(num_blocks=7, block_size=4)
    other = make_request(1, prompt_len=14, max_tokens=3)
    request = make_request(2, prompt_len=6, max_tokens=3, num_sequences=3)
    driver.submit(other, request)
    driver.run_steps(1)
    driver.preempt(request)
    # 3 blocks are free: enough for the 2 of the prompt, not for those and 2 copies of the second.
    driver.run_steps(1)
    assert request.key in driver.scheduler.swapped
    driver.finish(other, request)


def test_while_something_is_swapped_nothing_is_admitted():
    driver = make_driver(num_blocks=8, block_size=4)
    old = make_request(1, prompt_len=8, max_tokens=12)
    group = make_request(2, prompt_len=8, max_tokens=6, num_sequences=2)
    driver.submit(old, group)
    while group.key not in driver.scheduler.swapped:
        driver.run_steps(1)
    newcomer = make_request(3, prompt_len=2, max_tokens=2)
    driver.submit(newcomer)
    while group.key in driver.scheduler.swapped:
        assert newcomer.key in driver.scheduler.waiting
        driver.run_steps(1)
    driver.finish(old, group, newcomer)


def test_a_prompt_that_is_half_computed_goes_on_where_it_was():
    driver = make_driver(preemption_mode=PreemptionMode.SWAP, max_num_batched_tokens=8, block_size=4)
    request = make_request(1, prompt_len=30, max_tokens=4)
    driver.submit(request)
    driver.run_steps(2)
    driver.preempt(request)
    (sequence,) = driver.scheduler.swapped.first().sequences
    assert (sequence.status, sequence.num_swapped_tokens) == (SequenceStatus.SWAPPED, 16)
    computed = driver.device.num_computed
    driver.finish(request)
    assert driver.device.num_computed - computed == 30 - 16 + 3


def test_host_blocks_that_change_hands_before_a_plan_hold_the_last_one():
    driver = make_driver(num_host_blocks=4, block_size=4)
    first, second = (make_request(handle, prompt_len=8, max_tokens=8, num_sequences=2) for handle in (1, 2))
    driver.submit(first, second)
    driver.run_steps(3)
    driver.preempt(first)
    # Its swap out was not planned yet when the second takes the same host blocks.
    assert driver.scheduler.abort(first.key)
    driver.preempt(second)
    assert second.key in driver.scheduler.swapped
    driver.finish(second)
