"""The log of a prefix cache: what came, what left, in few changes."""

from scheduler_svc.core.block_pool import BlockId, PrefixHashes
from tests.support.cache_mirror import CacheMirror
from tests.support.core_driver import Driver, make_config, make_request

PROMPT = list(range(13))
HASHES = PrefixHashes("", 4).first(3, PROMPT)


def run(driver: Driver, handle: int, prompt: list[int]) -> None:
    driver.submit(make_request(handle, prompt=prompt, max_tokens=1))
    driver.run_until_idle()


def test_a_new_log_says_that_all_was_cleared_and_not_what_is_there_already():
    driver = Driver(make_config())
    run(driver, 1, PROMPT)
    changes = driver.scheduler.log_cache().take()
    assert (changes.is_cleared, changes.removed, changes.stored) == (True, [], {})


def test_sealed_blocks_come_with_parent_and_tokens_once():
    driver = Driver(make_config())
    log = driver.scheduler.log_cache()
    run(driver, 1, PROMPT)
    stored = log.take().stored
    assert list(stored) == HASHES
    assert [each.parent for each in stored.values()] == [None, *HASHES[:2]]
    assert [each.token_ids for each in stored.values()] == [PROMPT[:4], PROMPT[4:8], PROMPT[8:12]]
    run(driver, 2, PROMPT)
    assert log.take() is None


def test_what_came_and_left_in_between_is_not_told():
    driver = Driver(make_config(num_blocks=4))
    log = driver.scheduler.log_cache()
    log.take()
    run(driver, 1, PROMPT)
    run(driver, 2, PROMPT[::-1])
    changes = log.take()
    assert not changes.removed
    assert list(changes.stored) == PrefixHashes("", 4).first(3, PROMPT[::-1])
    run(driver, 3, PROMPT)
    changes = log.take()
    assert sorted(changes.removed) == sorted(PrefixHashes("", 4).first(3, PROMPT[::-1]))
    assert list(changes.stored) == HASHES


def test_restored_blocks_are_stored_again_with_their_tokens_when_a_request_uses_them():
    before = Driver(make_config())
    run(before, 1, PROMPT)
    # A step tells the worker what the results before it sealed.
    run(before, 2, [49])
    driver = Driver(make_config())
    driver.device = before.device
    driver.device.rows.clear()
    mirror = CacheMirror(driver.scheduler)
    driver.scheduler.restore_sealed((BlockId(block), content) for block, content in before.device.seals.items())
    mirror.check()
    assert mirror.blocks == dict.fromkeys(HASHES)
    run(driver, 2, [*PROMPT[:8], 40, 41, 42, 43, 44])
    mirror.check()
    assert [mirror.blocks[content] is not None for content in HASHES] == [True, True, False]
