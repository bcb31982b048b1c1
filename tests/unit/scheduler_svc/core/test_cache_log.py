"""The log of a prefix cache: stored and evicted blocks, in few changes."""

from quire.messages.prefix_hashes import root_hash
from scheduler_svc.core.cache_log import CachedTokens, CacheLog
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.moves import MoveCounts
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import HostMemory, PrefixHashes
from scheduler_svc.core.sequence import Sequence
from tests.support.cache_mirror import CacheMirror
from tests.support.core_driver import Driver, make_config, make_request

PROMPT = list(range(13))
HASHES = PrefixHashes(root_hash(""), 4).first(3, PROMPT)


def run(driver: Driver, handle: int, prompt: list[int]) -> None:
    driver.submit(make_request(handle, prompt=prompt, max_tokens=1))
    driver.run_until_idle()


def test_restored_blocks_are_stored_again_with_their_tokens_when_a_request_uses_them():
    before = Driver(make_config())
    run(before, 1, PROMPT)
    # A step notifies the worker of blocks that earlier results sealed.
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


def test_a_block_on_disk_is_told_beside_the_pool_and_again_with_its_tokens():
    driver = Driver(make_config())
    mirror = CacheMirror(driver.scheduler)
    run(driver, 1, PROMPT)
    # A step notifies the worker of blocks that earlier results sealed.
    run(driver, 2, [49])
    driver.tell_disk(driver.device.keep_on_disk(100))
    mirror.check()
    assert mirror.tier == mirror.blocks.keys() == set(HASHES)
    pool = driver.scheduler.batch.blocks.pool
    pool.free(pool.allocate(pool.num_free))
    mirror.check()
    assert (mirror.tier, mirror.blocks) == (set(HASHES), {})
    # A late reader gets the tokens when a prompt has them.
    late = driver.scheduler.log_cache()
    late.take()
    run(driver, 3, PROMPT)
    changes = late.take()
    assert changes.tier_stored == HASHES
    assert [each.token_ids for each in changes.stored.values()] == [PROMPT[:4], PROMPT[4:8], PROMPT[8:12]]
    slots = list(driver.device.disk)
    driver.device.disk.clear()
    driver.tell_disk(slots)
    changes = late.take()
    assert (changes.removed, changes.stored, changes.tier_removed) == ([], {}, HASHES)


def test_a_block_below_the_pool_that_is_told_anew_and_leaves_is_told_to_have_left():
    (content, *_), tokens = HASHES, CachedTokens(None, PROMPT[:4])
    log = CacheLog()
    log.tier = log.host = {content}
    log.restored(content)
    log.tier_changed(content, is_stored=True)
    log.host_changed(content, is_stored=True)
    log.take()
    log.read(content, tokens)
    # The block gets another place there, and leaves that one.
    log.tier_changed(content, is_stored=True)
    log.tier_changed(content, is_stored=False)
    log.host_changed(content, is_stored=False)
    changes = log.take()
    assert (changes.tier_removed, changes.host_removed) == ([content], [content])
    assert (changes.tier_stored, changes.host_stored) == ([], [])


def test_a_block_from_disk_behind_blocks_of_the_host_is_told_with_its_tokens_when_a_request_uses_it():
    driver = Driver(make_config(num_blocks=8, num_host_blocks=2, caches_on_host=True), max_in_flight=1)
    mirror = CacheMirror(driver.scheduler)
    run(driver, 1, PROMPT)
    run(driver, 2, [49])
    driver.tell_disk(driver.device.keep_on_disk(100))
    run(driver, 3, list(range(20, 49)))
    mirror.check()
    assert mirror.host == set(HASHES[:2])
    driver.submit(again := make_request(4, prompt=PROMPT, max_tokens=1))
    driver.tell()
    driver.compile_next()
    mirror.check()
    assert mirror.blocks[HASHES[2]] is None
    driver.finish(again)
    mirror.check()
    assert driver.usage[4].cached_tokens == 12
    assert [mirror.blocks[content].token_ids for content in HASHES] == [PROMPT[:4], PROMPT[4:8], PROMPT[8:12]]


def test_blocks_that_came_are_told_with_their_tokens_when_a_request_that_was_swapped_out_comes_back_to_them():
    blocks, log = BlockManager(make_config(num_blocks=8, block_size=4, watermark=0.0)), CacheLog()
    blocks.host, blocks.pool.log = HostMemory(8, MoveCounts()), log
    pool = blocks.pool
    sequence = Sequence.of(make_request(1, prompt=PROMPT), 0, list(PROMPT), 4)
    blocks.allocate_slots([sequence])
    blocks.cache_full_blocks(sequence, 0, 3)
    sequence.num_swapped_tokens = 12
    blocks.swap_out([sequence])
    pool.free(pool.allocate(8))
    came = pool.allocate(3)
    blocks.pool.seal_moved(zip(came, HASHES, strict=True))
    pool.free(came)
    assert log.take().stored == dict.fromkeys(HASHES)
    blocks.swap_in([sequence])
    assert sequence.block_table[:3] == came
    assert [each.token_ids for each in log.take().stored.values()] == [PROMPT[:4], PROMPT[4:8], PROMPT[8:12]]


def test_a_block_that_came_while_a_request_computed_it_is_told_with_its_tokens():
    driver = Driver(make_config(), max_in_flight=1)
    mirror = CacheMirror(driver.scheduler)
    driver.submit(request := make_request(1, prompt=PROMPT, max_tokens=1))
    driver.next_plan()
    blocks = driver.scheduler.batch.blocks
    (block,) = blocks.pool.allocate(1)
    blocks.pool.seal_moved([(block, HASHES[0])])
    blocks.pool.free([block])
    mirror.check()
    assert mirror.blocks == {HASHES[0]: None}
    driver.finish(request)
    mirror.check()
    assert None not in mirror.blocks.values()


def test_a_block_is_told_behind_its_parent_whatever_was_known_of_both():
    (parent, child, _), log = HASHES, CacheLog()
    tokens = {parent: CachedTokens(None, PROMPT[:4]), child: CachedTokens(parent, PROMPT[4:8])}
    log.restored(parent)
    log.take()
    log.read(parent, tokens[parent])
    log.stored(child, tokens[child])
    assert [*log.take().stored.items()] == [*tokens.items()]
    log.cleared()
    log.restored(child)
    log.read(child, tokens[child])
    log.stored(parent, tokens[parent])
    assert [*log.take().stored.items()] == [*tokens.items()]
