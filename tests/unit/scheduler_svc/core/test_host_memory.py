"""Blocks that the pool evicts stay in host memory, and prompts find them there. The device of these tests checks what
each row reads."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.cache_log import CacheLog
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.moves import Lease, MoveCounts
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import HostMemory
from scheduler_svc.core.request import Request
from scheduler_svc.core.reservations import Kind
from scheduler_svc.core.sequence import SequenceGroup
from tests.support.core_driver import Driver, make_config, make_request


def make_driver(**config: Any) -> Driver:
    defaults: dict[str, Any] = {"num_blocks": 8, "num_host_blocks": 16, "caches_on_host": True}
    return Driver(make_config(**(defaults | config)), max_in_flight=1)


def prompt_of(number: int, length: int = 16) -> list[int]:
    return [(number * 11 + place) % 47 for place in range(length)]


def of_prompt(handle: int, number: int, *, prompt_len: int = 16, **more: Any) -> Request:
    """A request for two tokens with prompt number `number`."""
    return make_request(handle, prompt=prompt_of(number, prompt_len), max_tokens=2, **more)


def run(driver: Driver, *requests: Request) -> None:
    """Runs requests one after the other, each to its end."""
    for request in requests:
        driver.submit(request)
        driver.finish(request)


def cached(driver: Driver, request: Request) -> int:
    run(driver, request)
    return driver.usage[request.key.handle].cached_tokens


def test_a_prompt_finds_on_the_host_what_the_pool_evicted() -> None:
    driver = make_driver()
    run(driver, of_prompt(1, 1), of_prompt(2, 2), of_prompt(3, 3))
    num_computed = driver.device.num_computed
    assert cached(driver, of_prompt(4, 1)) == 12
    # The tokens of the prompt's last block, and the first of two output tokens.
    assert driver.device.num_computed - num_computed == 5
    counts = driver.scheduler.move_counts
    assert (counts.from_host, counts.to_host > 0) == (3, True)


def test_a_prompt_finds_on_the_host_what_made_room_for_an_offer() -> None:
    driver = make_driver()
    run(driver, of_prompt(1, 1), of_prompt(2, 2))
    offer = replace(of_prompt(3, 3), is_offer=True, accepted_before=True)
    driver.submit(offer)
    driver.run_until_idle()
    assert offer.key in driver.scheduler.reservations[Kind.PROMISE]
    driver.scheduler.abort(offer.key)
    assert cached(driver, of_prompt(4, 1)) == 12


@pytest.mark.parametrize("config", [{"caches_on_host": False}, {"num_host_blocks": 0}])
def test_without_a_host_cache_it_is_computed(config: dict[str, Any]) -> None:
    driver = make_driver(**config)
    run(driver, of_prompt(1, 1), of_prompt(2, 2), of_prompt(3, 3))
    assert cached(driver, of_prompt(4, 1)) == 0


def test_a_block_that_the_host_has_is_not_copied_there_again() -> None:
    driver = make_driver()
    run(driver, *(of_prompt(handle, handle % 3) for handle in range(1, 10)))
    num_copied = driver.scheduler.move_counts.to_host
    run(driver, *(of_prompt(handle, handle % 3) for handle in range(10, 16)))
    assert driver.scheduler.move_counts.to_host == num_copied


def test_the_block_that_was_used_longest_ago_leaves_the_host_first() -> None:
    driver = make_driver(num_host_blocks=8)
    run(driver, *(of_prompt(handle, handle) for handle in range(1, 5)))
    # The prompts 1 and 2 are on the host.
    assert cached(driver, of_prompt(5, 1)) == 12
    run(driver, of_prompt(6, 6), of_prompt(7, 7))
    assert cached(driver, of_prompt(8, 2)) == 0
    assert cached(driver, of_prompt(9, 1)) == 12


def test_the_workers_learn_that_a_block_that_came_back_is_final() -> None:
    driver = make_driver()
    run(driver, of_prompt(1, 1), of_prompt(2, 2), of_prompt(3, 3))
    driver.submit(of_prompt(4, 1))
    plan = driver.next_plan()
    blocks = driver.scheduler.batch.blocks.pool
    assert [blocks.hash_of(block) for block, _ in plan.sealed[-3:]] == [content for _, content in plan.sealed[-3:]]
    assert {block for block, _ in plan.sealed} >= set(plan.swap_in[:, 1].tolist())


def test_blocks_are_not_offered_to_others_before_they_came_from_the_host() -> None:
    driver = make_driver()
    run(driver, of_prompt(1, 1), of_prompt(2, 2), of_prompt(3, 3))
    again = of_prompt(4, 1)
    driver.submit(again)
    driver.next_plan()
    assert driver.scheduler.move_away(again.key, Lease(b"x"), driver.clock, 5.0) == []
    driver.deliver()
    driver.run_until_idle()
    driver.submit(more := of_prompt(5, 1))
    driver.next_plan()
    sealed = driver.scheduler.move_away(more.key, Lease(b"y"), driver.clock, 5.0)
    assert sealed is not None
    assert len(sealed) == 3


def test_blocks_of_a_swapped_group_that_are_on_the_host_are_not_copied_again() -> None:
    driver = make_driver(num_blocks=10, preemption_mode=PreemptionMode.SWAP)
    run(driver, of_prompt(1, 1), of_prompt(2, 2), of_prompt(3, 3))
    request = make_request(4, prompt=prompt_of(1), max_tokens=9)
    driver.submit(request)
    driver.run_steps(2)
    driver.preempt(request)
    assert request.key in driver.scheduler.swapped
    plan = driver.next_plan()
    assert len(plan.swap_out) == 2
    driver.deliver()
    driver.finish(request)


def test_a_prompt_finds_on_the_host_what_was_swapped_out() -> None:
    driver = make_driver(preemption_mode=PreemptionMode.SWAP)
    first = make_request(1, prompt=prompt_of(1), max_tokens=9)
    driver.submit(first)
    driver.run_steps(3)
    driver.preempt(first)
    driver.scheduler.abort(first.key)
    run(driver, of_prompt(2, 2), of_prompt(3, 3))
    assert cached(driver, of_prompt(4, 1)) == 12


def test_samples_and_tenants_share_no_more_than_in_the_pool() -> None:
    driver = make_driver(num_blocks=10)
    run(driver, of_prompt(1, 1, tenant="a"), of_prompt(2, 2, tenant="a"), of_prompt(3, 3, tenant="a"))
    assert cached(driver, of_prompt(4, 1, tenant="b")) == 0
    run(driver, of_prompt(5, 5), of_prompt(6, 6))
    assert cached(driver, of_prompt(7, 1, tenant="a", num_sequences=3)) == 12


def test_what_is_forgotten_is_forgotten_on_the_host_too() -> None:
    driver = make_driver()
    run(driver, of_prompt(1, 1), of_prompt(2, 2), of_prompt(3, 3))
    driver.scheduler.forget_cached()
    driver.check()
    assert cached(driver, of_prompt(4, 1)) == 0


def test_blocks_are_fetched_from_disk_where_the_host_does_not_have_them() -> None:
    driver = make_driver(num_host_blocks=2)
    first = of_prompt(1, 1)
    run(driver, first)
    driver.tell_disk(driver.device.keep_on_disk(4))
    run(driver, of_prompt(2, 2), of_prompt(3, 3), of_prompt(4, 4))
    again = of_prompt(5, 1)
    driver.submit(again)
    driver.finish(again)
    assert driver.usage[5].cached_tokens == 12


def test_a_full_host_keeps_nothing_more() -> None:
    host, log = HostMemory(1, MoveCounts(), caches=True), CacheLog()
    host.log = log
    names = [BlockHash(bytes([each]) * 32) for each in range(3)]
    held = host.save(BlockId(4), names[0])
    host.evicted(BlockId(5), names[1])
    host.evicted(BlockId(4), names[0])
    assert host.take_copies() == ([(4, held)], [])
    host.pool.free([held])
    host.evicted(BlockId(6), names[2])
    assert host.take_copies() == ([(6, held)], [])
    changes = log.take()
    assert changes is not None
    assert (changes.host_stored, changes.host_removed) == ([names[2]], [])


@pytest.mark.parametrize("state_blocks", [0, 1])
def test_a_request_with_windows_takes_no_more_blocks_than_were_counted_before(state_blocks: int) -> None:
    """If the host continues a prompt, a window of its blocks comes in addition to the window of the cached start."""
    driver = make_driver(
        num_blocks=80,
        num_host_blocks=300,
        max_num_batched_tokens=16,
        max_model_len=256,
        full_groups=1,
        windowed_groups=3,
        window=12,
        state_blocks=state_blocks,
    )
    extra, drawn = note_uncounted(driver), Random(0)
    for handle in range(1, 30):
        prompt = prompt_of(drawn.randrange(3), drawn.choice([16, 40, 64, 100]))
        run(driver, make_request(handle, prompt=prompt, max_tokens=2))
    assert driver.scheduler.move_counts.from_host > 0
    assert max(extra) == 0


def note_uncounted(driver: Driver) -> list[int]:
    """Free blocks that each group takes, as it enters, in addition to the blocks that were counted for it."""
    batch, room, extra = driver.scheduler.batch, driver.scheduler.room, list[int]()
    start = batch.start

    def counted(group: SequenceGroup) -> list[tuple[int, int]]:
        num_counted, num_free = room._blocks_taken(group), batch.blocks.pool.num_free
        starts = start(group)
        extra.append(num_free - batch.blocks.pool.num_free - num_counted)
        return starts

    batch.start = counted
    return extra


@pytest.mark.parametrize("seed", [2, 3])
def test_sequences_of_a_request_with_windows_take_no_more_blocks_than_were_counted_before(seed: int) -> None:
    """The host may have only the windows that one of them reads."""
    driver = make_driver(
        num_blocks=95,
        num_host_blocks=40,
        max_model_len=256,
        full_groups=1,
        windowed_groups=1,
        window=8,
        preemption_mode=PreemptionMode.RECOMPUTE,
    )
    extra, drawn = note_uncounted(driver), Random(seed)
    for handle in range(1, 13):
        prompt, max_tokens = prompt_of(handle, drawn.randrange(18, 40)), drawn.choice([20, 40, 60])
        driver.submit(make_request(handle, prompt=prompt, max_tokens=max_tokens, num_sequences=2))
    driver.run_until_idle()
    assert driver.scheduler.move_counts.to_host > 0
    assert max(extra) == 0
