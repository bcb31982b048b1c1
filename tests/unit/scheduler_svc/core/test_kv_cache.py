"""Cached prefixes, and blocks that are being computed: which are shared, and which requests wait for them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.messages.prefix_hashes import BlockHash, prefix_hash, root_hash
from scheduler_svc.core.kv_cache import VictimTables
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import PrefixHashes, PrefixIndex
from scheduler_svc.core.request import Request
from scheduler_svc.core.step import StepResult
from tests.support.core_driver import Driver, make_config, make_request

SHORT_PROMPT = list(range(10, 23))  # 13 tokens: three full blocks of 4 and one token


def run(driver: Driver, handle: int, **request) -> int:
    """Runs one request to its end; returns the number of tokens that the device computed for it."""
    before = driver.device.num_computed
    submitted = make_request(handle, **request)
    driver.submit(submitted)
    driver.finish(submitted)
    return driver.device.num_computed - before


def test_a_second_request_computes_only_what_is_not_cached():
    driver = Driver(make_config())
    assert run(driver, 1, prompt=SHORT_PROMPT, max_tokens=2) == 14
    assert run(driver, 2, prompt=SHORT_PROMPT, max_tokens=2) == 2
    assert driver.usage[1].cached_tokens == 0
    assert driver.usage[2].cached_tokens == 12
    # At least one token of a prompt is computed.
    run(driver, 3, prompt=SHORT_PROMPT[:12], max_tokens=3)
    assert driver.usage[3].cached_tokens == 8


def test_blocks_of_a_chunk_that_is_not_finite_are_never_shared():
    driver = Driver(make_config(max_num_batched_tokens=16), max_in_flight=1)
    driver.failing[1] = 40
    driver.submit(make_request(1, prompt_len=70, max_tokens=2))
    driver.run_steps(4)
    sealed = driver.device.seals.keys()
    driver.run_until_idle()
    assert driver.failed == {1}
    # The two chunks before it, and none of the later ones.
    assert len(sealed) == 32 // 4
    assert run(driver, 2, prompt=list(make_request(1, prompt_len=70).prompt), max_tokens=2) == 70 - 32 + 1


def test_a_result_that_reports_chunks_of_rows_that_have_none_is_refused():
    driver = Driver(make_config(), max_in_flight=1)
    driver.submit(make_request(1))
    plan = driver.scheduler.schedule(0.0)
    assert plan is not None
    with pytest.raises(ValueError, match=r"chunks of rows \[0\], which compute none"):
        driver.scheduler.apply(StepResult(plan.step_id, np.array([1]), non_finite_chunks=frozenset({0})), 0.0)


def test_sealed_blocks_are_announced_once_and_can_be_adopted_by_a_successor():
    driver = Driver(make_config(), max_in_flight=1)
    driver.submit(make_request(1, prompt=SHORT_PROMPT, max_tokens=3))
    sealed = []
    while (plan := driver.plan()) is not None:
        sealed += plan.sealed
        driver.deliver()
    hashes = PrefixHashes(root_hash(""), 4).first(3, SHORT_PROMPT)
    assert sealed == [(BlockId(index), content) for index, content in enumerate(hashes)]
    successor = Driver(make_config())
    successor.scheduler.restore_sealed(sealed)
    successor.device = driver.device
    successor.device.rows.clear()
    run(successor, 2, prompt=SHORT_PROMPT)
    assert successor.usage[2].cached_tokens == 12


def test_what_a_predecessor_says_twice_of_a_block_or_a_content_holds_as_it_was_first_said():
    pool, (first, second) = PrefixIndex(2), PrefixHashes(root_hash(""), 4).first(2, SHORT_PROMPT)
    pool.restore((BlockId(block), content) for block, content in ((0, first), (0, second), (1, first)))
    assert pool.sealed_hashes() == [first]
    assert pool.names(0, 2) == [first, None]


def test_the_pool_hands_out_unsealed_blocks_first_then_the_least_recently_freed_deepest_first():
    pool = PrefixIndex(6)
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


@pytest.mark.parametrize("num_holders", [1, 2, 3])
def test_a_shared_block_counts_as_free_with_the_last_of_its_holders_that_leaves(num_holders):
    pool = PrefixIndex(2)
    table = pool.allocate(2)
    for _ in range(num_holders - 1):
        pool.touch(table)
    tables = VictimTables(pool, taken=table[1:])
    assert [tables.free(table) for _ in range(num_holders)] == [0] * (num_holders - 1) + [1]


def test_hashes_chain_over_tenant_parent_and_tokens():
    hashes = {
        prefix_hash(root_hash("a"), [1, 2]),
        prefix_hash(root_hash("b"), [1, 2]),
        prefix_hash(root_hash("a"), [2, 1]),
        prefix_hash(prefix_hash(root_hash("a"), [1, 2]), [1, 2]),
    }
    assert len(hashes) == 4
    assert prefix_hash(root_hash("a"), np.array([1, 2]).tolist()) in hashes


LONG_PROMPT = [1 + index % 40 for index in range(1000)]


def make_wide_driver(max_in_flight: int = 2, **config) -> Driver:
    defaults = {"num_blocks": 1200, "block_size": 16, "max_num_seqs": 32, "max_num_batched_tokens": 512}
    return Driver(make_config(**(defaults | {"max_model_len": 2000} | config)), max_in_flight)


def submit(driver: Driver, *prompts: list[int], max_tokens: int = 1, **request) -> list[Request]:
    first = 1 + max(driver.outputs, default=0)
    requests = [
        make_request(first + index, prompt=prompt, max_tokens=max_tokens, **request)
        for index, prompt in enumerate(prompts)
    ]
    driver.submit(*requests)
    return requests


def running(driver: Driver) -> set[int]:
    return {group.request.key.handle for group in driver.scheduler.running}


@pytest.mark.parametrize("max_in_flight", [1, 2, 3])
def test_a_prompt_that_comes_eight_times_at_once_is_computed_once(max_in_flight):
    driver = make_wide_driver(max_in_flight)
    requests = submit(driver, *[LONG_PROMPT] * 8)
    driver.finish(*requests)
    assert driver.device.num_computed == 1000 + 7 * 8


def test_who_shares_the_start_does_not_wait_for_the_rest():
    driver = make_wide_driver(max_in_flight=1, max_num_batched_tokens=600)
    submit(driver, [*LONG_PROMPT, *LONG_PROMPT[:100]], LONG_PROMPT[:401])
    driver.run_steps(2)
    # The second request is in the step after the one that computed their common blocks.
    assert driver.finished == {1, 2}
    assert driver.device.num_computed == 1100 + 1


def test_a_common_start_that_is_too_short_delays_nobody():
    driver = make_wide_driver(max_num_batched_tokens=512)
    submit(driver, [*LONG_PROMPT[:48], 41], [*LONG_PROMPT[:48], 42])
    driver.plan()
    assert running(driver) == {1, 2}


@given(st.lists(st.tuples(st.sampled_from(["allocate", "seal", "touch", "free"]), st.integers(0, 7))))
def test_free_blocks_keep_the_order_of_two_lists(operations):
    pool, names = PrefixIndex(8), dict[BlockId, BlockHash]()
    unnamed, cached, held = [*map(BlockId, range(8))], [], []
    for number, (operation, pick) in enumerate(operations):
        if operation == "allocate" and len(held) < 8:
            count = min(1 + pick % 3, 8 - len(held))
            blocks = [*unnamed, *cached][:count]
            unnamed, cached = [[each for each in free if each not in blocks] for free in (unnamed, cached)]
            held += blocks
            assert pool.allocate(count) == blocks
            names = {block: name for block, name in names.items() if block not in blocks}
        elif operation == "seal" and held and held[pick % len(held)] not in names:
            block = held[pick % len(held)]
            names[block] = BlockHash(number.to_bytes(32))
            assert pool.seal(block, names[block])
        elif operation == "touch" and cached:
            held.append(cached.pop(pick % len(cached)))
            pool.touch([held[-1]])
        elif operation == "free" and held:
            block = held.pop(pick % len(held))
            unnamed, cached = (unnamed, [*cached, block]) if block in names else ([block, *unnamed], cached)
            pool.free([block])
        assert pool.free_blocks() == (*unnamed, *cached)
        assert pool.hits(names.values()) == list(names)
