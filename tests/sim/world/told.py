"""Changes of a prefix cache that its watchers receive: all blocks in it and in the tiers below, none of them
unchanged."""

from typing import Any

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.cache_log import CacheChanges, CachedTokens, CacheLog
from scheduler_svc.core.scheduler import Scheduler
from tests.sim.world.watch import Names, report


def watched_log(log: CacheLog, scheduler: Scheduler, names: Names) -> CacheLog:
    """A new log of a scheduler, which records the knowledge of watchers. `names` are the names of all blocks."""
    take, stored, restored, read = log.take, log.stored, log.restored, log.read
    pool = scheduler.batch.blocks.pool
    # Watchers request the earlier blocks separately.
    told = set(pool.sealed_hashes())
    on_disk, on_host = set(scheduler.tier._slots), set(scheduler.batch.blocks.host.pool.sealed_hashes())
    changed, unread = set[BlockHash](), set[BlockHash]()
    # Blocks on disk or in host memory that were there before, and whose tokens are known now.
    read_on_disk, read_on_host = set[BlockHash](), set[BlockHash]()

    def note(call: Any) -> Any:
        def noted(content: BlockHash, *arguments: CachedTokens) -> None:
            changed.add(content)
            call(content, *arguments)

        return noted

    def read_below(content: BlockHash, tokens: CachedTokens) -> None:
        changed.add(content)
        if content in scheduler.tier:
            read_on_disk.add(content)
        if content in scheduler.batch.blocks.host:
            read_on_host.add(content)
        read(content, tokens)

    def note_below(call: Any, known: set[BlockHash]) -> Any:
        def noted(content: BlockHash, *, is_stored: bool) -> None:
            known.discard(content)
            call(content, is_stored=is_stored)

        return noted

    def take_checked() -> CacheChanges | None:
        nonlocal pool
        changes = (taken := take()) or CacheChanges(False, [], {})
        blocks = scheduler.batch.blocks
        if blocks.pool is not pool:
            for known in (told, on_disk, on_host, unread, read_on_disk, read_on_host):
                known.clear()
            pool = blocks.pool
        told.difference_update(changes.removed)
        told.update(changes.stored)
        if told != set(pool.sealed_hashes()):
            report(AssertionError("watchers are told of other blocks than are cached"))
        if any(each not in (None, names[content][3]) for content, each in changes.stored.items()):
            report(AssertionError("watchers are told of other tokens than blocks hold"))
        if changes.stored.keys() - changed:
            report(AssertionError("watchers are told of blocks again that are as they were"))
        places = {content: place for place, content in enumerate(changes.stored)}
        parents = [(content, each.parent) for content, each in changes.stored.items() if each is not None]
        if any(parent is not None and places.get(parent, -1) > places[content] for content, parent in parents):
            report(AssertionError("watchers are told of a block before its parent"))
        changed.clear()
        if not (read_on_disk <= set(changes.tier_stored) and read_on_host <= set(changes.host_stored)):
            report(AssertionError("watchers are not told the tokens of blocks below the pool"))
        read_on_disk.clear()
        read_on_host.clear()
        on_disk.difference_update(changes.tier_removed)
        on_disk.update(changes.tier_stored)
        on_host.difference_update(changes.host_removed)
        on_host.update(changes.host_stored)
        if on_disk != scheduler.tier._slots.keys() or on_host != set(blocks.host.pool.sealed_hashes()):
            report(AssertionError("watchers are told of other blocks below the pool than there are"))
        unread.intersection_update(told)
        unread.difference_update(content for content, each in changes.stored.items() if each is not None)
        unread.update(content for content, each in changes.stored.items() if each is None)
        if log.unread - told:
            report(AssertionError("it waits for tokens of blocks that are gone"))
        if unread and any(name in unread for table in _taken(scheduler) for name in pool.hashes_of(table)):
            report(AssertionError("a request uses a block whose tokens watchers are not told"))
        return taken

    log.take, log.stored, log.restored, log.read = take_checked, note(stored), note(restored), read_below
    log.tier_changed = note_below(log.tier_changed, read_on_disk)
    log.host_changed = note_below(log.host_changed, read_on_host)
    return log


def _taken(scheduler: Scheduler) -> list[list[Any]]:
    """The blocks that sequences in the batch hold."""
    return [each.block_table for group in scheduler.running for each in group.unfinished]
