"""Pinned prefixes: computed once, held until they expire, hit by their tenant, within a quota."""

import pytest

from quire.messages.prefix_hashes import root_hash
from scheduler_svc.core import arrivals
from scheduler_svc.core.block_pool import BlockId, PrefixHashes
from scheduler_svc.core.pins import Pin
from scheduler_svc.core.request import NeverFitsError, PinQuotaError
from scheduler_svc.core.scheduler import Scheduler
from tests.support.core_driver import Driver, make_config, make_request

PREFIX = list(range(1, 13))


def make_driver(**config) -> Driver:
    return Driver(make_config(**({"block_size": 4, "num_blocks": 32} | config)))


def pin(driver: Driver, token_ids: list[int] = PREFIX, tenant: str = "a", time_to_live: float = 1000.0) -> Pin:
    made = driver.scheduler.pin(tenant, token_ids, driver.clock, time_to_live)
    driver.check()
    return made


def pinned(driver: Driver, **options) -> Pin:
    made = pin(driver, **options)
    driver.run_until_idle()
    assert made.is_held
    return made


def run(driver: Driver, handle: int, prompt: list[int], tenant: str = "a") -> int:
    """Runs only this request; returns its cached tokens."""
    request = make_request(handle, prompt=prompt, tenant=tenant, max_tokens=3)
    driver.submit(request)
    driver.finish(request)
    return driver.usage[handle].cached_tokens


def fill(driver: Driver, first_handle: int) -> None:
    """Runs requests that use every block that they can have."""
    for handle in range(first_handle, first_handle + 6):
        run(driver, handle, [40 + handle % 9] * 60, tenant="other")


def test_a_pin_is_computed_once_and_hit_by_its_tenant_alone():
    driver = make_driver()
    made = pinned(driver)
    assert (len(made.blocks), driver.device.num_computed) == (3, 12)
    # A worker accepts no other seeds.
    assert 0 <= made.request().sampling.seed < 2**64
    assert run(driver, 1, [*PREFIX, 90]) == 12
    assert run(driver, 2, [*PREFIX, 90], tenant="b") == 0


def test_the_same_prefix_is_one_pin_whose_time_starts_anew():
    driver = make_driver()
    first = pinned(driver, time_to_live=10.0)
    again = pin(driver, time_to_live=50.0)
    assert again is first
    driver.scheduler.expire_pins(driver.clock + 20)
    assert driver.scheduler.pins.num_pinned == 3
    driver.scheduler.expire_pins(driver.clock + 50)
    assert driver.scheduler.pins.num_pinned == driver.scheduler.batch.blocks.pool.num_used == 0
    # Released blocks are still cached, until another prompt needs the room.
    assert run(driver, 1, [*PREFIX, 90]) == 12


def test_quotas_hold_for_a_tenant_and_for_all():
    driver = make_driver(pin_quota=0.25, max_pinned=0.5)
    pinned(driver, token_ids=[7] * 20)
    with pytest.raises(PinQuotaError, match="the prefix has 4 new blocks and 5 are pinned already; a tenant can pin 8"):
        pin(driver, [8] * 16)
    pinned(driver, token_ids=[8] * 32, tenant="b")
    with pytest.raises(PinQuotaError, match="13 are pinned by all; together they can pin 16"):
        pin(driver, [9] * 16, tenant="c")
    pin(driver, [9] * 12, tenant="c")
    with pytest.raises(PinQuotaError, match="16 are pinned by all"):
        pin(driver, [6] * 4, tenant="c")


def test_each_turn_of_a_conversation_takes_of_the_quota_what_it_adds():
    driver = make_driver(pin_quota=0.25, max_pinned=0.5)
    turns = [pinned(driver, token_ids=[7] * length) for length in (16, 24, 32)]
    # All 8 blocks of the tenant, which belong to the longest turn.
    with pytest.raises(PinQuotaError, match="the prefix has 1 new blocks and 8 are pinned already"):
        pin(driver, [7] * 36)
    assert driver.scheduler.unpin("a", turns[0].pin_id)
    with pytest.raises(PinQuotaError):
        pin(driver, [7] * 36)
    assert driver.scheduler.unpin("a", turns[2].pin_id)
    assert pinned(driver, token_ids=[7] * 28).is_held


def test_a_prefix_that_no_request_could_have_is_refused_and_leaves_nothing():
    driver = make_driver(max_model_len=16, pin_quota=1.0, max_pinned=1.0)
    with pytest.raises(NeverFitsError):
        pin(driver, [1] * 16)
    assert len(driver.scheduler.pins) == 0
    assert pinned(driver, token_ids=[1] * 12).is_held


def test_pins_give_way_to_a_request_that_could_not_run_otherwise():
    driver = make_driver(num_blocks=16, pin_quota=1.0, max_pinned=1.0)
    early = pinned(driver, token_ids=[7] * 32, time_to_live=100.0)
    late = pinned(driver, token_ids=[8] * 28, time_to_live=200.0)
    # 15 of 16 blocks are pinned; this one needs 5 of them.
    assert run(driver, 1, [9] * 18) == 0
    assert not early.is_held
    assert late.is_held
    # And a request that grows to the whole pool while it runs.
    whole = make_request(2, prompt_len=4, max_tokens=60)
    driver.submit(whole)
    driver.finish(whole)
    assert driver.scheduler.pins.num_pinned == 0
    assert driver.usage[2].preemptions == 0


def test_only_a_request_that_enters_takes_the_blocks_of_a_pin():
    """The check whether it could enter changes nothing."""
    driver = make_driver(num_blocks=16, pin_quota=1.0, max_pinned=1.0)
    held = pinned(driver, token_ids=[7] * 48)
    request = make_request(1, prompt=[9] * 18, max_tokens=3)
    driver.submit(request)
    driver.scheduler.planner.advance_queue()
    assert driver.scheduler.planner._can_admit()
    assert held.is_held
    driver.scheduler.abort(request.key)
    driver.run_until_idle()
    assert held.is_held
    assert run(driver, 2, [9] * 18) == 0
    assert not held.is_held


def test_a_request_that_has_no_room_even_then_takes_no_pin():
    """Blocks that are on their way from the tier do not give way: the request waits for them, and may end first."""
    driver = make_driver(num_blocks=24, pin_quota=1.0, max_pinned=1.0)
    held = pinned(driver, token_ids=[7] * 32)
    fetched = make_request(1, prompt=[8] * 41, max_tokens=3)
    hashes = PrefixHashes(fetched.cache_root, 4).first(10, list(fetched.prompt))
    driver.scheduler.tier_changed(range(10), hashes)
    driver.submit(fetched)
    assert driver.scheduler.schedule(driver.clock) is None
    (preparation,) = driver.scheduler.take_preparations()
    # 8 of 24 blocks are pinned and 10 on their way; this request needs 15.
    wide = make_request(2, prompt=[9] * 58, max_tokens=3)
    driver.submit(wide)
    assert driver.scheduler.schedule(driver.clock) is None
    assert held.is_held
    driver.scheduler.abort(wide.key)
    driver.scheduler.prepared(preparation.number, failed=frozenset(range(10)))
    driver.finish(fetched)
    assert held.is_held


def make_scheduler_with_pins(count: int) -> Scheduler:
    """`count` pins of a block each hold their blocks; the first ends at 1.0, the next at 2.0 and so on."""
    scheduler = Scheduler(make_config(num_blocks=4 * count, pin_quota=0.5, max_pinned=0.5))
    prefixes = [[number, 1, 2, 3] for number in range(count + 1)]
    hashes = [PrefixHashes(root_hash("a"), 4).first(1, prefix)[0] for prefix in prefixes]
    scheduler.restore_sealed((BlockId(block), content) for block, content in enumerate(hashes))
    for number in range(count):
        assert scheduler.pin("a", prefixes[number], 0.0, number + 1.0).is_held
    return scheduler


def test_pins_that_end_together_end_over_some_calls(monkeypatch):
    monkeypatch.setattr(arrivals, "_MAX_EXPIRED", 3)
    scheduler = make_scheduler_with_pins(7)
    for num_left, next_change in ((4, 4.0), (1, 7.0), (0, None)):
        assert scheduler.schedule(100.0) is None
        assert len(scheduler.pins) == scheduler.pins.num_pinned == num_left
        assert scheduler.pins.next_change == next_change


@pytest.mark.parametrize("count", [1, 500])
def test_a_pin_that_gets_many_ends_has_the_last_one(count):
    scheduler = make_scheduler_with_pins(2)
    for number in range(count):
        scheduler.pin("a", [0, 1, 2, 3], 0.0, 100.0 + (number * 7) % 50)
    assert scheduler.pins.next_change == 2.0
    scheduler.expire_pins(2.0)
    assert scheduler.pins.next_change == 100.0 + ((count - 1) * 7) % 50
    assert scheduler.room.give_way(may_end_pins=True)
    assert scheduler.pins.next_change is None


def test_a_pin_decays_over_the_second_half_of_its_time_and_is_whole_again_when_it_is_renewed():
    driver = make_driver(num_blocks=64, pin_quota=0.5, max_pinned=0.5)
    prefix = [number % 50 for number in range(64)]
    made = pinned(driver, token_ids=prefix, time_to_live=160.0)
    began, held = made.expires_at - 160.0, list[int]()
    for seconds in (0, 80, 89, 90, 120, 159, 160):
        driver.clock = began + seconds
        driver.scheduler.expire_pins(driver.clock)
        driver.check()
        held.append(driver.scheduler.pins.num_pinned)
    assert held == [16, 16, 16, 14, 8, 2, 0]
    # The end of the prefix went first, and is cached until another prompt needs the room.
    assert run(driver, 1, [*prefix, 7], tenant="a") == 64

    made = pinned(driver, token_ids=prefix, time_to_live=16000.0)
    driver.clock = made.expires_at - 4000.0
    driver.scheduler.expire_pins(driver.clock)
    # Other prefixes of the tenant get the quota of the released part.
    other = pinned(driver, token_ids=[9] * 96)
    with pytest.raises(PinQuotaError, match="8 new blocks and 32 are pinned"):
        pin(driver, token_ids=prefix, time_to_live=16000.0)
    assert (driver.scheduler.pins.num_pinned, len(made.blocks)) == (32, 8)
    assert driver.scheduler.unpin("a", other.pin_id)
    fill(driver, 10)
    assert run(driver, 2, [*prefix, 7]) == 32
    again = pinned(driver, token_ids=prefix, time_to_live=16000.0)
    assert (again.pin_id, len(again.blocks), driver.scheduler.pins.num_pinned) == (made.pin_id, 16, 16)


def test_a_pin_that_is_computed_late_holds_what_its_time_leaves() -> None:
    driver = make_driver()
    made = pin(driver, token_ids=list(range(1, 33)), time_to_live=160.0)
    driver.clock = made.expires_at - 40.0
    driver.scheduler.expire_pins(driver.clock)
    driver.run_what_can()
    # After three quarters of its time it holds only half of its blocks.
    assert (len(made.blocks), driver.scheduler.pins.num_pinned) == (4, 4)


def test_pins_come_with_their_requests_to_another_pool_though_the_queue_is_full() -> None:
    driver = Driver(make_config(max_waiting_requests=2))
    pin = driver.scheduler.pin("", list(range(8)), 0.0, 1000.0)
    driver.run_until_idle()
    assert pin.is_held
    for handle in (1, 2, 3):
        driver.submit(make_request(handle, max_tokens=20))
        driver.run_steps(1)
    driver.crash(config=make_config(num_blocks=63, max_waiting_requests=2))
    assert len(driver.scheduler.pins) == 1
    driver.run_until_idle()
    assert driver.scheduler.pins.num_pinned == 2
