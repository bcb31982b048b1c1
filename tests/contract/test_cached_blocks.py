"""A gateway's view of a prefix cache equals the content in the scheduler's core: the names of blocks, and updates."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.replicas.cache_messages import CachedBlocks
from gateway.replicas.routing import prompt_hashes
from quire.messages.prefix_hashes import root_hash, short
from scheduler_svc.core.prefix_index import PrefixHashes
from scheduler_svc.service import cache_changes
from scheduler_svc.service.cache_changes import CacheDigest, CacheFeed, sampling_bits_for
from scheduler_svc.service.gateway_messages import gateway_messages
from scheduler_svc.service.outbox import Outbox
from tests.support.core_driver import Driver, make_config, make_request
from tests.support.tiers import few_examples

TENANTS = ("", "a")


@few_examples()
@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=60),
    block_size=st.integers(1, 20),
    tenant=st.text(max_size=9),
)
def test_both_sides_name_blocks_alike(token_ids, block_size, tenant):
    num_blocks = len(token_ids) // block_size
    of_core = PrefixHashes(root_hash(tenant), block_size).first(num_blocks, token_ids)
    assert prompt_hashes(np.array(token_ids, np.int32), tenant, block_size) == of_core


class Timer:
    """Runs due calls when the test says so."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._due.append(call)

    def fire(self) -> None:
        due, self._due = self._due, []
        for call in due:
            call()

    def fire_all(self) -> None:
        """Runs calls until none is due."""
        while self._due:
            self.fire()


class Gateway:
    """A gateway's end of a stream, read when the test says so."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.cached = CachedBlocks()

    def read(self) -> None:
        while (outgoing := self.outbox.poll()) is not None:
            for message in gateway_messages(outgoing):
                self.cached.update(message.cache)


@few_examples()
@given(data=st.data(), is_sampled=st.booleans())
def test_gateways_know_the_cache_whenever_they_read(data, is_sampled):
    with pytest.MonkeyPatch.context() as patch:
        # The pool is read in several turns.
        patch.setattr(cache_changes, "_READ_AT_ONCE", 5)
        if is_sampled:
            # About every fourth block of the pool is reported.
            patch.setattr(cache_changes, "_MAX_REPORTED", 8)
        has_host = data.draw(st.booleans(), label="host memory instead of a disk")
        host = {"num_host_blocks": 30, "caches_on_host": True} if has_host else {}
        driver, timer = Driver(make_config(num_blocks=24, max_waiting_requests=100, **host)), Timer()
        feed = CacheFeed()
        feed.follow(driver.scheduler)
        digest = CacheDigest(feed, timer.call_later)
        gateways: list[Gateway] = []
        for handle in range(data.draw(st.integers(1, 25), label="operations")):
            match data.draw(
                st.sampled_from(["run", "run", "run", "disk", "fire", "read", "connect", "leave", "crash", "rebuild"])
            ):
                case "run":
                    prompt = [data.draw(st.sampled_from([1, 2]))] * data.draw(st.integers(1, 30))
                    tenant = data.draw(st.sampled_from(TENANTS))
                    driver.submit(make_request(handle, prompt=prompt, tenant=tenant, max_tokens=4))
                    while driver.scheduler.num_live:
                        driver.run_steps(1)
                        feed.report_changes()
                case "disk" if not has_host:
                    driver.tell_disk(driver.device.keep_on_disk(20))
                    feed.report_changes()
                case "fire":
                    timer.fire()
                case "read":
                    for gateway in gateways:
                        gateway.read()
                case "connect":
                    gateways.append(Gateway())
                    digest.add(gateways[-1].outbox)
                case "rebuild":
                    # Another core, as after workers with another pool.
                    driver = Driver(make_config(num_blocks=24, max_waiting_requests=100))
                    feed.follow(driver.scheduler)
                    feed.report_changes()
                case "leave":
                    for gateway in gateways[1:]:
                        digest.remove(gateway.outbox)
                    del gateways[1:]
                    if data.draw(st.booleans(), label="all of them"):
                        for gateway in gateways:
                            digest.remove(gateway.outbox)
                        gateways.clear()
                        assert driver.scheduler.batch.blocks.pool.log is None
                case "crash":
                    driver.crash()
                    feed.report_changes()
        gateways.append(Gateway())
        digest.add(gateways[-1].outbox)
        timer.fire_all()
        pool = driver.scheduler.batch.blocks.pool
        mask = (1 << sampling_bits_for(24)) - 1 if is_sampled else 0
        told = [content for content in pool.sealed_hashes() if not content[-1] & mask]
        on_disk = [content for content in filter(None, feed.names_below(0, 99)) if not content[-1] & mask]
        for gateway in gateways:
            gateway.read()
            assert gateway.cached._blocks == set(map(short, told))
            if is_sampled:
                assert gateway.cached._on_disk <= set(map(short, on_disk))
                assert len(gateway.cached._on_disk) <= 8
            else:
                assert gateway.cached._on_disk == set(map(short, on_disk))


def test_a_large_pool_is_told_in_parts_each_of_which_is_small(monkeypatch):
    monkeypatch.setattr(cache_changes, "_READ_AT_ONCE", 4)
    driver, feed, timer = Driver(make_config(num_blocks=16)), CacheFeed(), Timer()
    driver.submit(make_request(1, prompt_len=50))
    driver.run_until_idle()
    feed.follow(driver.scheduler)
    read: list[int] = []
    names = feed.names
    monkeypatch.setattr(feed, "names", lambda first, end: read.append(end - first) or names(first, end))
    digest, gateway = CacheDigest(feed, timer.call_later), Gateway()
    digest.add(gateway.outbox)
    # Blocks that were read in the first turn are reported at once.
    gateway.read()
    assert 0 < len(gateway.cached._blocks) <= 4
    timer.fire_all()
    gateway.read()
    assert len(gateway.cached._blocks) == len(driver.scheduler.batch.blocks.pool.sealed_hashes()) > 4
    assert read == [4] * 5


def test_events_go_on_when_the_last_gateway_leaves():
    driver, feed, told = Driver(make_config()), CacheFeed(), []
    feed.follow(driver.scheduler)
    feed.watch(lambda changes, config: told.append(changes))
    digest, gateway = CacheDigest(feed, Timer().call_later), Outbox()
    digest.add(gateway)
    assert driver.scheduler.batch.blocks.pool.log is not None
    digest.remove(gateway)
    told.clear()
    driver.submit(make_request(1, prompt_len=9))
    driver.run_until_idle()
    feed.report_changes()
    assert sum(len(changes.stored) for changes in told) == 3


def test_an_update_has_a_bounded_part_of_a_large_pool():
    assert [sampling_bits_for(num_blocks) for num_blocks in (1, 65_536, 65_537, 131_072, 131_073)] == [0, 0, 1, 1, 2]
    assert sampling_bits_for(1 << 40) == 8
