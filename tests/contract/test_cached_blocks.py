"""What a gateway knows of a prefix cache is what the scheduler's core has there: the names of blocks, and updates."""

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.replicas.events import cache_update_from
from gateway.replicas.routing import CachedBlocks, prompt_hashes
from scheduler_svc.core.block_pool import PrefixHashes
from scheduler_svc.service import cache_digest
from scheduler_svc.service.cache_digest import CacheDigest, sampling_bits_for
from scheduler_svc.service.cache_feed import CacheFeed
from scheduler_svc.service.gateway_messages import gateway_messages
from scheduler_svc.service.outbox import Outbox
from tests.support.core_driver import Driver, make_config, make_request

TENANTS = ("", "a")


@given(
    token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=200),
    block_size=st.integers(1, 40),
    tenant=st.text(max_size=9),
)
def test_both_sides_name_blocks_alike(token_ids, block_size, tenant):
    num_blocks = len(token_ids) // block_size
    of_core = PrefixHashes(tenant, block_size).first(num_blocks, token_ids)
    assert prompt_hashes(np.array(token_ids, np.int32), tenant, block_size) == of_core


class Timer:
    """Calls what is due when the test says so."""

    def __init__(self) -> None:
        self._due: list[Callable[[], None]] = []

    def call_later(self, seconds: float, call: Callable[[], None]) -> None:
        self._due.append(call)

    def fire(self) -> None:
        due, self._due = self._due, []
        for call in due:
            call()


class Gateway:
    """A gateway's end of a stream that it reads when the test says so."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.cached = CachedBlocks()

    def read(self) -> None:
        while (outgoing := self.outbox.poll()) is not None:
            for message in gateway_messages(outgoing):
                self.cached.update(cache_update_from(message.cache))


@settings(deadline=None)
@given(data=st.data(), is_sampled=st.booleans())
def test_gateways_know_the_cache_whenever_they_read(data, is_sampled):
    with pytest.MonkeyPatch.context() as patch:
        if is_sampled:
            # About every fourth block of the pool is told.
            patch.setattr(cache_digest, "_MAX_TOLD", 8)
        driver, timer = Driver(make_config(num_blocks=24, max_waiting_requests=100)), Timer()
        feed = CacheFeed()
        feed.follow(driver.scheduler)
        digest = CacheDigest(feed, timer.call_later)
        gateways: list[Gateway] = []
        for handle in range(data.draw(st.integers(1, 25), label="operations")):
            match data.draw(st.sampled_from(["run", "run", "run", "fire", "read", "connect", "crash"])):
                case "run":
                    prompt = [data.draw(st.sampled_from([1, 2]))] * data.draw(st.integers(1, 30))
                    tenant = data.draw(st.sampled_from(TENANTS))
                    driver.submit(make_request(handle, prompt=prompt, tenant=tenant, max_tokens=4))
                    for _ in range(40):
                        driver.run_steps(1)
                        feed.tell()
                case "fire":
                    timer.fire()
                case "read":
                    for gateway in gateways:
                        gateway.read()
                case "connect":
                    gateways.append(Gateway())
                    digest.add(gateways[-1].outbox)
                case "crash":
                    driver.crash()
                    feed.tell()
        gateways.append(Gateway())
        digest.add(gateways[-1].outbox)
        timer.fire()
        pool = driver.scheduler.batch.blocks.pool
        mask = (1 << sampling_bits_for(24)) - 1 if is_sampled else 0
        told = [content for content in pool.sealed_hashes() if not content[-1] & mask]
        for gateway in gateways:
            gateway.read()
            assert len(gateway.cached) == len(told)
            assert all(gateway.cached.num_cached([content]) == 1 for content in told)


def test_while_no_gateway_wants_updates_the_core_notes_nothing():
    driver, feed = Driver(make_config()), CacheFeed()
    feed.follow(driver.scheduler)
    CacheDigest(feed)
    assert driver.scheduler.batch.blocks.pool.log is None


def test_an_update_has_a_bounded_part_of_a_large_pool():
    assert [sampling_bits_for(num_blocks) for num_blocks in (1, 65_536, 65_537, 131_072, 131_073)] == [0, 0, 1, 1, 2]
    assert sampling_bits_for(1 << 40) == 8
