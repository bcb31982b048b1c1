"""Automatic prefix caching (the paper's section 4.4): whole blocks of a known prefix are not computed again."""

import numpy as np
import pytest

from scheduler_svc.core.block_pool import BlockHash, BlockId, BlockPool, PrefixHashes, block_hash, root_hash
from scheduler_svc.core.step import StepResult
from tests.support.core_driver import Driver, expected_output, make_config, make_request

PROMPT = list(range(10, 23))  # 13 tokens: three full blocks of 4 and one token


def run(driver: Driver, handle: int, **request) -> int:
    """Runs one request to its end; returns how many tokens the device computed for it."""
    before = driver.device.num_computed
    submitted = make_request(handle, **request)
    driver.submit(submitted)
    driver.run_until_idle()
    assert driver.outputs[handle] == expected_output(submitted)
    return driver.device.num_computed - before


def test_a_second_request_computes_only_what_is_not_cached():
    driver = Driver(make_config())
    assert run(driver, 1, prompt=PROMPT, max_tokens=2) == 14
    assert run(driver, 2, prompt=PROMPT, max_tokens=2) == 2
    assert driver.usage[1].cached_tokens == 0
    assert driver.usage[2].cached_tokens == 12


def test_at_least_one_prompt_token_is_always_computed():
    driver = Driver(make_config())
    run(driver, 1, prompt=PROMPT[:12], max_tokens=3)
    run(driver, 2, prompt=PROMPT[:12], max_tokens=3)
    assert driver.usage[2].cached_tokens == 8


def test_a_follow_up_turn_hits_its_whole_history_output_included():
    driver = Driver(make_config())
    first = make_request(1, prompt=PROMPT, max_tokens=9)
    driver.submit(first)
    driver.run_until_idle()
    history = [*PROMPT, *driver.outputs[1]]
    run(driver, 2, prompt=[*history, 7, 8], max_tokens=1)
    # 22 tokens of history, of which 21 were computed and fill five blocks.
    assert driver.usage[2].cached_tokens == 20


def test_running_requests_share_one_physical_copy():
    driver = Driver(make_config(), max_in_flight=1)
    driver.submit(make_request(1, prompt=PROMPT, max_tokens=30))
    driver.plan()
    driver.deliver()
    driver.submit(make_request(2, prompt=PROMPT, max_tokens=30))
    driver.plan()
    first, second = (group.sequences[0] for group in driver.scheduler.running)
    assert first.block_table[:3] == second.block_table[:3]
    assert [driver.scheduler.batch.blocks.pool.ref_count(block) for block in first.block_table[:4]] == [2, 2, 2, 1]
    driver.run_until_idle()
    assert driver.scheduler.batch.blocks.pool.num_used == 0


def test_a_preempted_request_finds_its_own_blocks_again():
    driver = Driver(make_config(num_blocks=10, block_size=4, max_model_len=40))
    requests = [make_request(i, prompt_len=12, max_tokens=16) for i in range(2)]
    for request in requests:
        driver.submit(request)
    driver.run_until_idle()
    assert driver.scheduler.num_preemptions > 0
    for request in requests:
        assert driver.outputs[request.key.handle] == expected_output(request)
    assert driver.device.num_computed < 2 * (12 + 16) + 12


def test_a_prompt_is_shared_chunk_by_chunk():
    driver = Driver(make_config(max_num_batched_tokens=16), max_in_flight=1)
    long = make_request(1, prompt_len=70, max_tokens=2)
    driver.submit(long)
    driver.run_steps(3)
    assert driver.scheduler.abort(long.key)
    run(driver, 2, prompt=[*long.prompt[:66], 1, 2], max_tokens=2)
    assert driver.usage[2].cached_tokens == 48


def test_a_request_that_is_preempted_in_mid_prompt_goes_on_from_its_last_chunk():
    driver = Driver(make_config(max_num_batched_tokens=16))
    request = make_request(1, prompt_len=70, max_tokens=2)
    driver.submit(request)
    driver.run_steps(3)
    driver.preempt(request)
    driver.run_until_idle()
    assert driver.outputs[1] == expected_output(request)
    assert driver.device.num_computed == 70 + 1


def test_blocks_of_a_chunk_that_is_not_finite_are_never_shared():
    driver = Driver(make_config(max_num_batched_tokens=16), max_in_flight=1)
    driver.failing[1] = 40
    driver.submit(make_request(1, prompt_len=70, max_tokens=2))
    driver.run_steps(4)
    sealed = driver.device.seals.keys()
    driver.run_until_idle()
    assert driver.failed == {1}
    # The two chunks before it, and nothing of the third or of those behind it.
    assert len(sealed) == 32 // 4
    assert run(driver, 2, prompt=list(make_request(1, prompt_len=70).prompt), max_tokens=2) == 70 - 32 + 1


def test_a_result_that_reports_chunks_of_rows_that_have_none_is_refused():
    driver = Driver(make_config(), max_in_flight=1)
    driver.submit(make_request(1))
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match=r"chunks of rows \[0\], which have none"):
        driver.scheduler.apply(StepResult(plan.step_id, np.array([1]), non_finite_chunks=frozenset({0})), 0.0)


def test_tenants_share_nothing():
    driver = Driver(make_config())
    run(driver, 1, prompt=PROMPT, tenant="a")
    run(driver, 2, prompt=PROMPT, tenant="b")
    assert driver.usage[2].cached_tokens == 0
    run(driver, 3, prompt=PROMPT, tenant="a")
    assert driver.usage[3].cached_tokens == 12


def test_a_block_counts_for_nothing_without_the_prefix_before_it():
    driver = Driver(make_config())
    run(driver, 1, prompt=PROMPT)
    run(driver, 2, prompt=[99, *PROMPT[1:]])
    assert driver.usage[2].cached_tokens == 0


def test_a_poisoned_request_seals_nothing():
    driver = Driver(make_config())
    driver.submit(make_request(1, prompt=PROMPT))
    driver.plan()
    good = driver.results.popleft()
    driver.results.append(StepResult(good.step_id, good.token_ids, failures={0: "logits hold NaN"}))
    driver.deliver()
    assert driver.scheduler.batch.blocks.pool.num_cached == 0


def test_a_lost_worker_takes_the_cache_with_it():
    driver = Driver(make_config())
    run(driver, 1, prompt=PROMPT)
    driver.crash()
    run(driver, 2, prompt=PROMPT)
    assert driver.usage[2].cached_tokens == 0


def test_sealed_blocks_are_announced_once_and_can_be_adopted_by_a_successor():
    driver = Driver(make_config(), max_in_flight=1)
    driver.submit(make_request(1, prompt=PROMPT, max_tokens=3))
    sealed = []
    while (plan := driver.plan()) is not None:
        sealed += plan.sealed
        driver.deliver()
    hashes = PrefixHashes("", 4).first(3, PROMPT)
    assert sealed == [(BlockId(index), content) for index, content in enumerate(hashes)]
    successor = Driver(make_config())
    successor.scheduler.restore_sealed(sealed)
    successor.device = driver.device
    successor.device.rows.clear()
    run(successor, 2, prompt=PROMPT)
    assert successor.usage[2].cached_tokens == 12


def test_a_block_that_goes_to_another_before_its_seal_was_announced_is_never_announced():
    driver = Driver(make_config(num_blocks=4))
    # Its prompt is sealed by the result that ends it, and the blocks go to the second request at once.
    for handle, prompt in ((1, PROMPT), (2, [*reversed(PROMPT)])):
        driver.submit(make_request(handle, prompt=prompt, max_tokens=1))
    driver.plan()
    driver.deliver()
    assert driver.finished == {1}
    assert driver.scheduler.batch.blocks.pool.num_cached == 3
    plan = driver.plan()
    assert plan is not None
    assert plan.assign[0].block_table == (3, 2, 1, 0)
    assert plan.sealed == ()
    driver.run_until_idle()
    assert driver.finished == {1, 2}


def test_the_pool_hands_out_unsealed_blocks_first_then_the_least_recently_freed_deepest_first():
    pool = BlockPool(6)
    old, new, plain = pool.allocate(2), pool.allocate(2), pool.allocate(1)
    for index, block in enumerate([*old, *new]):
        assert pool.seal(block, BlockHash(bytes([index]) * 32))
    pool.free(old)
    pool.free(new)
    pool.free(plain)
    assert pool.free_blocks() == (*plain, BlockId(5), old[1], old[0], new[1], new[0])
    assert (pool.num_free, pool.num_cached) == (6, 4)
    pool.allocate(3)
    assert pool.hits([BlockHash(bytes([1]) * 32)]) == []
    assert pool.hits([BlockHash(bytes([0]) * 32)]) == [old[0]]


def test_a_hit_takes_a_cached_block_out_of_the_free_ones():
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.seal(block, BlockHash(b"x" * 32))
    pool.free([block])
    pool.touch([block])
    assert (pool.num_free, pool.num_cached, pool.ref_count(block)) == (1, 0, 1)


def test_the_same_content_is_found_in_the_block_that_was_sealed_first():
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    assert pool.seal(first, BlockHash(b"x" * 32))
    assert not pool.seal(second, BlockHash(b"x" * 32))
    assert pool.hits([BlockHash(b"x" * 32)]) == [first]
    pool.free([second])
    assert pool.num_cached == 0


def test_hashes_chain_over_tenant_parent_and_tokens():
    hashes = {
        block_hash(root_hash("a"), [1, 2]),
        block_hash(root_hash("b"), [1, 2]),
        block_hash(root_hash("a"), [2, 1]),
        block_hash(block_hash(root_hash("a"), [1, 2]), [1, 2]),
    }
    assert len(hashes) == 4
    assert block_hash(root_hash("a"), np.array([1, 2]).tolist()) in hashes
