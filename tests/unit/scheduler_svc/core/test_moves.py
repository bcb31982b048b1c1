"""Requests move to another replica with their blocks under a lease, and arrive with blocks to fetch."""

import itertools
from collections import deque
from dataclasses import replace

import pytest

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.config import PolicyKind, PreemptionMode
from scheduler_svc.core.moves import CommonTier, KvSource, Lease, Tier
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import PrefixHashes, PrefixIndex
from scheduler_svc.core.preparation import Preparation
from scheduler_svc.core.request import EmittedSequence, Handle, Request, RequestKey
from scheduler_svc.core.reservations import Kind, Reservations
from tests.support.core_driver import Driver, expected_output, make_config, make_request

LEASE, LEASE_S = Lease(b"a lease"), 10.0
SOURCE = KvSource("namespace", ("elsewhere",), LEASE)


def running(driver: Driver, request: Request, num_steps: int = 3) -> None:
    driver.submit(request)
    driver.run_steps(num_steps)


def hand_over(driver: Driver, request: Request) -> list[tuple[BlockId, BlockHash]] | None:
    sealed = driver.scheduler.move_away(request.key, LEASE, driver.clock, LEASE_S)
    driver.check()
    return sealed


def used(driver: Driver) -> int:
    return driver.scheduler.batch.blocks.pool.num_used


def has_promise(driver: Driver, request: Request) -> bool:
    return request.key in driver.scheduler.reservations[Kind.PROMISE]


def told(driver: Driver) -> list[Preparation]:
    found = driver.tell()
    driver.told.clear()
    return found


def test_a_request_that_leaves_keeps_its_sealed_blocks_until_the_lease_is_over() -> None:
    driver, request = Driver(make_config()), make_request(1, prompt_len=9, max_tokens=20)
    running(driver, request)
    # 9 tokens of the prompt and all but the newest output token are computed, 4 a block.
    assert len(hand_over(driver, request) or []) == 2
    assert driver.scheduler.num_live == 0
    assert used(driver) == 2
    driver.scheduler.renew_lease(LEASE, driver.clock, 2 * LEASE_S)
    driver.clock += 1.5 * LEASE_S
    driver.plan()
    assert used(driver) == 2
    driver.clock += LEASE_S
    driver.plan()
    assert used(driver) == 0


def test_a_lease_ends_once_its_blocks_are_fetched() -> None:
    driver, request = Driver(make_config()), make_request(1, prompt_len=9, max_tokens=20)
    running(driver, request)
    hand_over(driver, request)
    driver.scheduler.renew_lease(LEASE, driver.clock, None)
    driver.check()
    assert used(driver) == 0


def test_a_lease_gives_way_to_requests_that_run() -> None:
    driver = Driver(make_config(num_blocks=8))
    first, other = make_request(1, prompt_len=17, max_tokens=8), make_request(2, prompt_len=17, max_tokens=15)
    running(driver, first, num_steps=2)
    assert len(hand_over(driver, first) or []) == 4
    driver.submit(other)
    driver.run_what_can()
    assert driver.outputs[2] == expected_output(other)
    assert driver.scheduler.num_preemptions == 0


def test_a_request_that_selects_at_its_end_stays() -> None:
    driver, request = Driver(make_config()), make_request(1, num_sequences=2, num_returned=1)
    running(driver, request)
    assert hand_over(driver, request) is None
    assert driver.scheduler.num_live == 1


def moved(handle: int, num_emitted: int = 6) -> Request:
    """A request as it arrives from another replica."""
    request = make_request(handle, prompt_len=9, max_tokens=20)
    emitted = [EmittedSequence(tuple(expected_output(request)[:num_emitted]))]
    return replace(request, emitted=emitted, source=SOURCE, accepted_before=True)


def test_requests_that_never_ran_wait_for_others_to_take_them() -> None:
    driver = Driver(make_config(num_blocks=16))
    running(driver, first := make_request(1, prompt_len=9, max_tokens=20))
    driver.scheduler.hold_new(driver.clock, 100.0)
    driver.submit(new := make_request(2))
    driver.submit(replace(moved(3), source=None))
    driver.run_what_can()
    assert driver.finished == {1, 3}
    driver.clock += 100.0
    driver.run_what_can()
    assert [driver.outputs[each] for each in (1, 2)] == list(map(expected_output, (first, new)))


def test_requests_that_never_ran_are_held_in_another_pool_too() -> None:
    driver = Driver(make_config(num_blocks=16))
    running(driver, make_request(1, prompt_len=9, max_tokens=20))
    driver.scheduler.hold_new(driver.clock, 100.0)
    driver.submit(make_request(2))
    driver.crash(config=make_config(num_blocks=17))
    driver.run_what_can()
    assert driver.finished == {1}


def test_only_blocks_that_are_fetched_can_fail() -> None:
    driver = Driver(make_config())
    driver.submit(moved(1))
    (preparation,) = told(driver)
    with pytest.raises(ValueError, match="fetches 3 blocks, and number 3 failed"):
        driver.scheduler.prepared(preparation.number, failed=frozenset({0, 3}))
    driver.check()
    assert driver.scheduler.reservations.num_blocks(Kind.FETCH) == 3


def test_ranks_that_sent_their_parts_are_counted_as_long_as_their_lease_lasts() -> None:
    table = Reservations(PrefixIndex(8))
    table.add(Kind.LEASE, LEASE, [], 1.0)
    assert [table.count_fetched(each) for each in (LEASE, LEASE, Lease(b"other"))] == [1, 2, 0]
    table.expire_leases(1.0)
    assert table.count_fetched(LEASE) == 0


def test_blocks_that_came_are_not_computed() -> None:
    driver, request = Driver(make_config()), moved(1)
    driver.submit(request)
    (preparation,) = told(driver)
    driver.scheduler.prepared(preparation.number, failed=frozenset({2}))
    plan = driver.scheduler.schedule(driver.clock)
    assert plan is not None
    assert plan.num_computed_tokens.tolist() == [8]
    assert plan.num_new_tokens.tolist() == [7]


def test_blocks_are_fetched_once_however_often_the_worker_is_lost() -> None:
    driver, request = Driver(make_config()), moved(1)
    driver.submit(request)
    assert len(told(driver)) == 1
    driver.crash()
    assert told(driver) == []
    driver.run_what_can()
    assert driver.outputs[1] == expected_output(request)


def test_blocks_that_the_lost_worker_was_not_told_to_fetch_are_fetched_by_the_next() -> None:
    driver, request = Driver(make_config()), moved(1)
    driver.submit(request)
    driver.crash()
    driver.plan()
    (preparation,) = told(driver)
    assert preparation.arriving is not None
    assert preparation.arriving.source == SOURCE
    driver.crash()
    assert told(driver) == []
    driver.run_what_can()
    assert driver.outputs[1] == expected_output(request)


def test_blocks_of_a_request_that_came_while_the_worker_was_away_are_fetched_into_another_pool_too() -> None:
    driver, request = Driver(make_config()), moved(1)
    driver.crash(config=make_config(num_blocks=17), arrivals=[request])
    driver.plan()
    (preparation,) = told(driver)
    assert preparation.arriving is not None
    assert preparation.arriving.source == SOURCE
    driver.scheduler.prepared(preparation.number, failed=frozenset({0, 1, 2}))
    driver.run_what_can()
    assert driver.outputs[1] == expected_output(request)


def test_where_there_is_no_room_blocks_are_fetched_once_their_request_is_next() -> None:
    driver, other, request = Driver(make_config(num_blocks=8)), make_request(2, prompt_len=21, max_tokens=8), moved(1)
    running(driver, other, num_steps=1)
    driver.submit(request)
    assert told(driver) == []
    driver.run_what_can()
    assert driver.finished == {2}
    (preparation,) = told(driver)
    driver.scheduler.prepared(preparation.number, failed=frozenset({0, 1, 2}))
    driver.run_what_can()
    assert driver.outputs[1] == expected_output(request)


def test_only_a_plan_fetches_blocks_and_holds_requests() -> None:
    """To ask whether the next request could enter changes nothing."""
    driver, other, request = Driver(make_config(num_blocks=8)), make_request(2, prompt_len=21, max_tokens=8), moved(1)
    running(driver, other, num_steps=1)
    driver.submit(request)
    driver.scheduler.abort(other.key)
    assert not driver.scheduler.planner._can_admit()
    assert (used(driver), told(driver)) == (0, [])
    assert not driver.scheduler.waiting.is_held(request.key)
    driver.plan()
    assert driver.scheduler.waiting.is_held(request.key)
    (preparation,) = told(driver)
    driver.scheduler.prepared(preparation.number, failed=frozenset({0, 1, 2}))
    driver.run_what_can()
    assert driver.outputs[1] == expected_output(request)


def of_prefix(handle: int) -> Request:
    return make_request(handle, prompt=[*range(17)])


def on_disk(driver: Driver, request: Request) -> None:
    """Runs the request, whose blocks are then on the worker's disk, and no longer in the pool."""
    driver.submit(request)
    driver.run_what_can()
    driver.tell_disk(driver.device.keep_on_disk(100))
    pool = driver.scheduler.batch.blocks.pool
    pool.free(pool.allocate(pool.num_free))


def test_blocks_that_the_pool_evicted_come_back_from_the_tier() -> None:
    driver, first, again = Driver(make_config()), of_prefix(1), of_prefix(2)
    on_disk(driver, first)
    driver.submit(again)
    (preparation,) = told(driver)
    assert preparation.arriving is not None
    assert (preparation.arriving.source, len(preparation.arriving.blocks)) == (None, 4)
    driver.plan()
    assert not driver.results
    driver._answer(preparation)
    assert driver.next_plan().num_computed_tokens.tolist() == [16]
    driver.finish(again)


def test_prompts_that_share_a_prefix_fetch_it_once() -> None:
    driver, first = Driver(make_config()), of_prefix(1)
    on_disk(driver, first)
    others = [of_prefix(number) for number in (2, 3)]
    driver.submit(*others)
    (preparation,) = told(driver)
    driver.plan()
    assert not driver.results
    driver._answer(preparation)
    assert driver.next_plan().num_computed_tokens.tolist() == [16, 16]
    driver.finish(*others)


def test_what_the_tier_does_not_give_is_computed_and_not_asked_for_again() -> None:
    driver, first, again = Driver(make_config()), of_prefix(1), of_prefix(2)
    on_disk(driver, first)
    names = [content for content, _ in driver.device.disk.values()]
    driver.submit(again)
    (preparation,) = told(driver)
    assert preparation.arriving is not None
    driver.device.fetch(preparation.arriving)
    driver.scheduler.prepared(preparation.number, failed=frozenset({1, 2, 3}))
    driver.check()
    assert [name in driver.scheduler.tier for name in names[:4]] == [True, False, False, False]
    driver.finish(again)
    assert not driver.told


def test_a_tier_that_takes_too_long_is_not_waited_for_again() -> None:
    driver, first, again = Driver(make_config()), of_prefix(1), of_prefix(2)
    on_disk(driver, first)
    driver.submit(again)
    (preparation,) = told(driver)
    driver.scheduler.end_late_preparation(preparation.number, 5.0)
    driver.check()
    driver.run_what_can()
    assert driver.outputs[2] == expected_output(again)
    driver.scheduler.prepared(preparation.number)
    driver.finish(again)


def test_a_prompt_on_disk_is_passed_once_by_those_that_take_its_room() -> None:
    driver = Driver(make_config(num_blocks=40, max_num_batched_tokens=256, max_model_len=160))
    large = make_request(1, prompt_len=141, max_tokens=4)
    driver.submit(replace(large, key=RequestKey(large.key.client, Handle(2))))
    driver.run_until_idle()
    slots = driver.device.keep_on_disk(64)
    driver.scheduler.forget_cached()
    driver.tell_disk(slots)
    small = (make_request(handle, max_tokens=40) for handle in itertools.count(100))
    driver.submit(next(small))
    driver.run_steps(2)
    driver.submit(large)
    due = deque[tuple[int, Preparation]]()
    for step in range(300):
        while sum(group.request.key != large.key for group in driver.scheduler.waiting) < 3:
            driver.submit(next(small))
        driver.plan()
        due += [(step + 2, told) for told in driver.tell()]
        while due and due[0][0] <= step:
            driver.compile_next()
            due.popleft()
        driver.deliver()
    assert 1 in driver.finished


def test_blocks_that_are_swapped_out_leave_before_others_come_to_their_place() -> None:
    swaps = {"policy": PolicyKind.PRIORITY, "preemption_mode": PreemptionMode.SWAP, "num_host_blocks": 16}
    driver = Driver(make_config(num_blocks=8, **swaps), max_in_flight=1)
    first, other = make_request(1, prompt_len=16, max_tokens=9), make_request(2, prompt_len=19, max_tokens=9)
    on_disk(driver, first)
    driver.submit(other)
    driver.run_steps(3)
    # It preempts the only running request, and waits for its blocks.
    again = make_request(3, prompt=list(first.prompt), max_tokens=9, priority=1)
    driver.submit(again)
    plan = driver.next_plan()
    assert (len(plan.rows), len(plan.swap_out)) == (0, 6)
    driver.tell()
    assert len(driver.told) == 1
    driver.finish(other, again)
    assert driver.usage[3].cached_tokens == 12


@pytest.mark.parametrize("failed", [{2, 3}, {0, 1}])
def test_what_is_cached_of_a_request_is_kept_while_the_rest_is_fetched(failed: set[int]) -> None:
    """Otherwise a request that was preempted for it would come back and evict those blocks, again and again."""
    driver, first, again = Driver(make_config()), of_prefix(1), of_prefix(2)
    on_disk(driver, first)
    driver.submit(once := of_prefix(3))
    (preparation,) = told(driver)
    assert preparation.arriving is not None
    driver.device.fetch(preparation.arriving)
    driver.scheduler.prepared(preparation.number, failed=frozenset(failed))
    assert driver.scheduler.abort(once.key)
    driver.tell_disk([*driver.device.disk])
    driver.submit(again)
    (preparation,) = told(driver)
    assert preparation.arriving is not None
    num_fetched = driver.scheduler.reservations.num_blocks(Kind.FETCH)
    assert (len(preparation.arriving.blocks), num_fetched, used(driver)) == (2, 2, 4)
    pool = driver.scheduler.batch.blocks.pool
    pool.free(pool.allocate(pool.num_free))
    driver._answer(preparation)
    driver.check()
    assert driver.next_plan().num_computed_tokens.tolist() == [16]
    driver.finish(again)


def test_nothing_is_kept_beside_blocks_that_take_too_long() -> None:
    driver, first, again = Driver(make_config()), of_prefix(1), of_prefix(2)
    on_disk(driver, first)
    driver.submit(other := make_request(3, prompt=[*range(9)], max_tokens=1))
    driver.finish(other)
    driver.submit(again)
    (preparation,) = told(driver)
    assert used(driver) == 4
    driver.scheduler.end_late_preparation(preparation.number, 5.0)
    driver.check()
    assert used(driver) == 2
    driver.scheduler.prepared(preparation.number)
    driver.check()
    assert used(driver) == 0


def test_a_block_is_on_disk_once_all_ranks_have_their_part() -> None:
    common, (a, b, c) = CommonTier(2), (BlockHash(bytes([each]) * 32) for each in range(3))
    assert common.change(0, [0, 1], [a, b]) == ([], [])
    # Rank 1 has slots of its own.
    assert common.change(1, [7, 8], [b, c]) == ([1], [b])
    assert common.change(1, [9], [a]) == ([0], [a])
    assert common.change(0, [1, 2], [c, b]) == ([1, 2], [c, b])
    # One part is gone, or belongs to another block.
    assert common.change(1, [9], []) == ([0], [])
    assert common.change(1, [8], [a]) == ([0, 1], [a])
    assert common.change(0, [2, 5], []) == ([2], [])
    assert common.change(0, [6], [b]) == ([6], [b])


def test_a_block_on_disk_gets_another_name() -> None:
    tier, (a, b, c) = Tier(), (BlockHash(bytes([each]) * 32) for each in range(3))
    tier.change([3], [a])
    tier.rename(a, b)
    tier.rename(c, a)
    assert (tier.names(3, 9), tier.slot_of(b), len(tier), a in tier) == ([b], 3, 1, False)


def offer(request: Request) -> Request:
    """Same as `moved`, while it still runs at the other replica."""
    return replace(request, source=None, is_offer=True)


def test_an_offer_gets_room_in_its_turn_which_is_kept_until_the_request_comes() -> None:
    driver = Driver(make_config(num_blocks=12))
    running(driver, first := make_request(1, prompt_len=17, max_tokens=8))
    asked, other = moved(2), make_request(3, prompt_len=17, max_tokens=4)
    driver.submit(offer(asked))
    assert driver.plan() is not None
    assert driver.scheduler.promised == [asked.key]
    assert used(driver) == 5 + 4
    driver.submit(other)
    driver.deliver()
    driver.run_what_can()
    # The next request may not take the blocks that are kept, but only blocks that `first` has left.
    assert driver.finished == {1, 3}
    assert (driver.scheduler.promised, driver.scheduler.num_live) == ([], 1)
    order = driver.scheduler.waiting.get(asked.key).order
    driver.submit(come := replace(moved(4), replaces=asked.key.handle))
    assert driver.scheduler.waiting.get(come.key).order == order
    (preparation,) = told(driver)
    driver.scheduler.prepared(preparation.number, failed=frozenset({0, 1, 2}))
    driver.run_what_can()
    assert driver.outputs[4] == expected_output(come)
    assert (first.max_tokens, used(driver)) == (8, 0)


def test_a_request_that_comes_keeps_its_row_while_its_blocks_are_fetched() -> None:
    driver = Driver(make_config(num_blocks=40, max_num_seqs=1))
    asked, behind, new = moved(1), moved(2), make_request(3)
    driver.submit(offer(asked))
    driver.plan()
    assert driver.scheduler.promised == [asked.key]
    driver.submit(replace(moved(4), replaces=asked.key.handle))
    (preparation,) = told(driver)
    driver.submit(offer(behind))
    driver.submit(new)
    driver.run_what_can()
    assert (driver.scheduler.promised, driver.finished) == ([], set())
    driver.scheduler.prepared(preparation.number, failed=frozenset({0, 1, 2}))
    driver.plan()
    assert new.key in driver.scheduler.waiting
    driver.run_what_can()
    assert driver.finished == {4}
    assert has_promise(driver, behind)


def test_who_goes_before_a_request_whose_blocks_came_takes_the_rows_that_were_kept_for_it() -> None:
    """Otherwise neither would ever run."""
    driver = Driver(make_config(policy=PolicyKind.PRIORITY, num_blocks=40, max_num_seqs=2))
    driver.submit(offer(asked := moved(1)))
    driver.plan()
    driver.submit(replace(moved(4), replaces=asked.key.handle))
    (preparation,) = told(driver)
    driver.submit(make_request(2, num_sequences=2, priority=1))
    driver.scheduler.prepared(preparation.number, failed=frozenset({0, 1, 2}))
    driver.run_what_can()
    assert driver.finished == {2, 4}


def test_an_offer_that_replaces_another_one_has_its_rows_kept_once() -> None:
    driver = Driver(make_config(num_blocks=40, max_num_seqs=2))
    driver.submit(offer(asked := moved(1)))
    driver.plan()
    driver.submit(replace(offer(moved(2)), replaces=asked.key.handle))
    driver.plan()
    assert len(driver.scheduler.promised) == 1
    driver.submit(new := make_request(3))
    driver.plan()
    assert new.key in driver.scheduler.running


@pytest.mark.parametrize("others", [[], [5]])
def test_nobody_is_displaced_for_rows_that_are_kept_for_an_offer(others: list[int]) -> None:
    """Neither if all running requests would have to leave nor if only some."""
    driver = Driver(make_config(policy=PolicyKind.PRIORITY, max_num_seqs=2 + len(others)))
    for handle, priority in enumerate([0, *others], start=5):
        running(driver, make_request(handle, max_tokens=20, priority=priority), 1)
    driver.submit(offer(asked := moved(1)))
    driver.plan()
    assert has_promise(driver, asked)
    driver.submit(wide := make_request(2, num_sequences=2, priority=1))
    driver.plan()
    assert driver.scheduler.num_preemptions == 0
    driver.scheduler.abort(asked.key)
    driver.deliver()
    driver.plan()
    assert wide.key in driver.scheduler.running
    assert driver.scheduler.num_preemptions == 1


@pytest.mark.parametrize("blocks_first", [False, True])
def test_rows_that_are_kept_for_a_request_that_comes_do_not_hold_up_those_that_go_before(blocks_first: bool) -> None:
    driver = Driver(make_config(policy=PolicyKind.PRIORITY, max_num_seqs=2))
    wide = make_request(2, num_sequences=2, priority=1)
    driver.submit(offer(asked := moved(1)))
    driver.plan()
    assert has_promise(driver, asked)
    if not blocks_first:
        driver.submit(wide)
    driver.submit(replace(moved(4), replaces=asked.key.handle))
    (preparation,) = told(driver)
    if blocks_first:
        driver.submit(wide)
    driver.run_what_can()
    driver.scheduler.prepared(preparation.number, failed=frozenset({0, 1, 2}))
    driver.run_what_can()
    assert driver.finished == {2, 4}


@pytest.mark.parametrize("num_others", [0, 10])
def test_a_request_without_room_is_not_looked_at_block_by_block_in_each_step(
    num_others: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = Driver(make_config(num_blocks=30, max_num_seqs=4))
    running(driver, make_request(1, prompt_len=61, max_tokens=40))
    request = make_request(2, prompt_len=81, max_tokens=2)
    hashes = PrefixHashes(request.cache_root, 4).first(20, list(request.prompt))
    others = [make_request(10 + number, prompt=[number] * 57, max_tokens=2) for number in range(num_others)]
    for each in others:
        hashes += PrefixHashes(each.cache_root, 4).first(14, list(each.prompt))
    driver.scheduler.tier_changed(range(len(hashes)), hashes)
    num_looked_up = 0
    contains = Tier.__contains__

    def count(tier: Tier, content: object) -> bool:
        nonlocal num_looked_up
        num_looked_up += 1
        assert isinstance(content, bytes)
        return contains(tier, BlockHash(content))

    monkeypatch.setattr(Tier, "__contains__", count)
    driver.submit(request)
    for number in range(10):
        # Later requests have no room, either.
        driver.submit(*others[number : number + 1])
        driver.run_steps(1)
    assert request.key in driver.scheduler.waiting
    assert 20 <= num_looked_up < 60 + 15 * num_others
    driver.scheduler.abort(make_request(1).key)
    driver.run_steps(2)
    (preparation,) = told(driver)
    assert preparation.arriving is not None
    assert preparation.arriving.hashes == tuple(hashes[:20])


def test_a_promise_is_broken_before_a_request_is_preempted_and_made_again() -> None:
    driver = Driver(make_config(num_blocks=10, max_num_seqs=4))
    first, second = (make_request(number, prompt_len=9, max_tokens=12) for number in (1, 2))
    running(driver, first, 1)
    driver.submit(offer(asked := moved(3)))
    driver.plan()
    assert has_promise(driver, asked)
    driver.deliver()
    driver.submit(second)
    num_broken = 0
    while driver.plan() is not None or driver.results:
        num_broken += not has_promise(driver, asked)
        driver.deliver()
    assert num_broken
    assert driver.finished == {1, 2}
    assert driver.scheduler.num_preemptions == 0
    assert has_promise(driver, asked)
    driver.crash()
    assert not has_promise(driver, asked)
    driver.plan()
    assert has_promise(driver, asked)
