"""A prefix cache as a reader of its changes sees it."""

from quire.messages.prefix_hashes import BlockHash, in_group, prefix_hash, root_hash
from scheduler_svc.core.cache_log import CacheChanges, CachedTokens, CacheLog
from scheduler_svc.core.scheduler import Scheduler


class CacheMirror:
    """A copy of a scheduler's prefix cache: its content when its log began, plus all changes in the log. Changes are
    checked as they come."""

    def __init__(self, scheduler: Scheduler, tenants: tuple[str, ...] = ("",)) -> None:
        self.blocks: dict[BlockHash, CachedTokens | None] = {}
        self.tier: set[BlockHash] = set()
        self.host: set[BlockHash] = set()
        self._tenants = tenants
        self._log: CacheLog
        self.watch(scheduler)

    def watch(self, scheduler: Scheduler) -> None:
        """Mirrors this scheduler's cache from now on."""
        self._scheduler, self._log = scheduler, scheduler.log_cache()
        assert self._log.take() == CacheChanges(True, [], {})
        self.blocks = dict.fromkeys(scheduler.batch.blocks.pool.sealed_hashes())
        self.tier = set(scheduler.tier._slots)
        self.host = set(scheduler.batch.blocks.host.pool.sealed_hashes())

    def check(self) -> None:
        """Applies new changes, and compares the copy with the cache."""
        changes = self._log.take()
        assert changes is None or self._log.take() is None, "the same changes were told twice"
        if changes is not None:
            self._apply(changes)
        pool = self._scheduler.batch.blocks.pool
        assert self.blocks.keys() == set(pool.sealed_hashes())
        assert self.tier == set(self._scheduler.tier._slots)
        assert self.host == set(self._scheduler.batch.blocks.host.pool.sealed_hashes())

    def _apply(self, changes: CacheChanges) -> None:
        assert len(changes.removed) + len(changes.stored) <= 2 * self._scheduler.config.num_blocks
        if changes.is_cleared:
            self.blocks.clear()
            self.tier.clear()
            self.host.clear()
        assert set(changes.tier_removed) <= self.tier
        assert set(changes.tier_stored).isdisjoint(changes.tier_removed)
        self.tier |= set(changes.tier_stored)
        self.tier -= set(changes.tier_removed)
        assert set(changes.host_removed) <= self.host
        assert set(changes.host_stored).isdisjoint(changes.host_removed)
        self.host |= set(changes.host_stored)
        self.host -= set(changes.host_removed)
        for content in changes.removed:
            del self.blocks[content]
        for content, tokens in changes.stored.items():
            before = self.blocks.get(content, tokens)
            assert before in (None, tokens), "a block's tokens changed"
            if tokens is not None:
                roots = [root_hash(tenant, tokens.adapter_digest) for tenant in self._tenants]
                parents = roots if tokens.parent is None else [tokens.parent]
                names = [prefix_hash(parent, tokens.token_ids) for parent in parents]
                assert content in [in_group(name, tokens.group) for name in names]
            self.blocks[content] = tokens
