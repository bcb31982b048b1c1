"""Layers with windows: what sequences hold, what the prefix cache serves, and what may run."""

from dataclasses import replace

import pytest

from quire.messages.prefix_hashes import BlockHash, root_hash
from scheduler_svc.core.prefix_index import PrefixHashes
from scheduler_svc.core.request import NeverFitsError
from tests.support.core_driver import Driver, make_config, make_request

# Blocks of 4 tokens; a token reads itself and the 9 tokens before it.
WINDOWED = {"full_groups": 1, "windowed_groups": 2, "window": 10}


def held(driver: Driver, handle: int) -> list[list[int]]:
    """The logical indices of the blocks that a running request's first sequence has, by group."""
    (group,) = [each for each in driver.scheduler.running if each.request.key.handle == handle]
    table, blank = group.sequences[0].block_table, driver.scheduler.batch.blocks.blank
    entries = [table[group::3] for group in range(3)]
    return [[index for index, block in enumerate(each) if block not in blank] for each in entries]


def test_a_decode_keeps_the_window_and_a_prompt_the_next_chunks():
    driver = Driver(make_config(**WINDOWED, num_blocks=200, max_num_batched_tokens=8), max_in_flight=1)
    request = make_request(1, prompt_len=60, max_tokens=40)
    driver.submit(request)
    driver.plan()
    # The window or the chunk in flight, of 10 tokens at most, and the next chunk: 18 tokens, which span 6 blocks.
    assert held(driver, 1) == [[*range(15)], [*range(6)], [*range(6)]]
    driver.deliver()
    driver.run_steps(20)
    # Token 72 reads tokens 63 to 72.
    assert held(driver, 1) == [[*range(19)], [15, 16, 17, 18], [15, 16, 17, 18]]
    driver.finish(request)


def test_a_later_turn_hits_in_all_groups_and_so_does_a_branch_in_the_middle():
    driver = Driver(make_config(**WINDOWED, num_blocks=200))
    first = make_request(1, prompt_len=60, max_tokens=20)
    driver.submit(first)
    driver.finish(first)
    turn = make_request(2, prompt=[*first.prompt, *driver.outputs[1], 1, 2, 3], max_tokens=4)
    branch = make_request(3, prompt=[*first.prompt[:42], 49, 49, 49], max_tokens=4)
    driver.submit(turn, branch)
    driver.finish(turn, branch)
    assert driver.usage[2].cached_tokens == 76
    assert driver.usage[3].cached_tokens == 40


@pytest.mark.parametrize("num_steps", [1, 4])
@pytest.mark.parametrize("is_lost", [False, True])
def test_requests_that_come_during_a_prompt_wait_for_the_rest_of_it(num_steps: int, is_lost: bool):
    driver = Driver(make_config(**WINDOWED, num_blocks=400, max_num_batched_tokens=16))
    prompt = [7 * place % 50 for place in range(100)]
    if is_lost:
        # The full group has the prompt; the windows at its end and before are gone, as if they were evicted.
        driver.submit(earlier := make_request(3, prompt=prompt, max_tokens=2))
        driver.finish(earlier)
        blocks = driver.scheduler.batch.blocks
        for content in PrefixHashes(earlier.cache_root, 4).first(25, prompt):
            blocks.pool.rename(blocks.names.windowed(content)[1], BlockHash(content[::-1]))
    first, second = (make_request(handle, prompt=prompt, max_tokens=2) for handle in (1, 2))
    driver.submit(first)
    driver.run_steps(num_steps)
    driver.submit(second)
    driver.finish(first, second)
    assert driver.usage[2].cached_tokens == 96


def test_a_hit_ends_where_a_window_is_not_cached_any_more():
    driver = Driver(make_config(**WINDOWED, num_blocks=200))
    first = make_request(1, prompt_len=60, max_tokens=2)
    driver.submit(first)
    driver.finish(first)
    blocks = driver.scheduler.batch.blocks
    twelfth = PrefixHashes(first.cache_root, 4).first(13, first.prompt)[12]
    # One group loses its block, as if it was evicted.
    blocks.pool.rename(blocks.names.windowed(twelfth)[1], BlockHash(bytes(32)))
    again = make_request(2, prompt=[*first.prompt], max_tokens=2)
    driver.submit(again)
    driver.finish(again)
    # Tokens from 48 on read block 12; token 48 itself reads tokens 39 to 47.
    assert driver.usage[2].cached_tokens == 48


def test_a_pool_takes_longer_sequences_than_blocks_of_all_groups_would_hold():
    config = make_config(**WINDOWED, num_blocks=61, max_num_batched_tokens=8, max_model_len=1000)
    # 60 blocks without the blank one. Two groups hold 6 blocks, and 3 + 2 more of a cached window.
    assert (config.windows_reach, config.max_windowed, config.max_len) == (6, 11, (60 - 22) * 4)
    driver = Driver(config)
    longest = make_request(1, prompt_len=config.max_len - 10, max_tokens=10)
    driver.submit(longest)
    driver.finish(longest)
    with pytest.raises(NeverFitsError, match="a sequence can have at most 152"):
        driver.submit(make_request(2, prompt_len=config.max_len, max_tokens=1))


@pytest.mark.parametrize("num_sequences", [2, 3])
def test_samples_of_one_request_share_their_prompt_in_all_groups(num_sequences: int):
    driver = Driver(make_config(**WINDOWED, num_blocks=200, num_host_blocks=200))
    request = make_request(1, prompt_len=42, max_tokens=30, num_sequences=num_sequences)
    driver.submit(request)
    driver.run_steps(8)
    driver.preempt(request)
    driver.finish(request)
    assert driver.usage[1].preemptions == 1


def run_with_fourth_chunk_not_finite(driver: Driver) -> None:
    for chunk in range(4):
        driver.plan()
        result = driver.results[0]
        if chunk == 3 and result is not None:
            driver.results[0] = replace(result, non_finite_chunks=frozenset({0}))
        driver.deliver()
    driver.run_until_idle()


@pytest.mark.parametrize(("start", "fails"), [(None, False), (1, True), (64, True), (65, False)])
def test_a_finite_token_does_not_complete_a_prompt_that_lacks_log_probabilities(start: int | None, fails: bool):
    config = make_config(full_groups=0, windowed_groups=1, window=4, max_num_batched_tokens=16)
    driver = Driver(config, max_in_flight=1)
    driver.submit(make_request(1, prompt_len=90, max_tokens=2, prompt_logprobs_start=start))
    run_with_fourth_chunk_not_finite(driver)
    assert (driver.failed, driver.finished) == (({1}, set()) if fails else (set(), {1}))


def test_a_finite_token_does_not_seal_blocks_of_a_chunk_that_was_not_finite():
    """The token reads the last 4 tokens, and its row holds blocks of tokens before them."""
    config = make_config(full_groups=0, windowed_groups=1, window=4, max_num_batched_tokens=16)
    driver, prompt = Driver(config, max_in_flight=1), list(make_request(1, prompt_len=70).prompt)
    driver.submit(make_request(1, prompt=prompt, max_tokens=2))
    run_with_fourth_chunk_not_finite(driver)
    names, pool = PrefixHashes(root_hash(""), 4).first(17, prompt), driver.scheduler.batch.blocks.pool
    assert [index for index, name in enumerate(names) if pool.hits([name])] == [*range(12)]
