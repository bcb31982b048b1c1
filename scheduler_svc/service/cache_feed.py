"""Tells those who watch the prefix cache what changed in it."""

from typing import Protocol

from quire.prefix_hashes import BlockHash
from scheduler_svc.core.cache_log import CacheChanges, CacheLog
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler


class CacheWatcher(Protocol):
    """Is told of changes, and of the limits of the pool that they are of. It must not wait, and must not raise."""

    def __call__(self, changes: CacheChanges, config: SchedulerConfig) -> None: ...


class CacheFeed:
    """Changes of the prefix cache of whichever core there is. While nobody watches, the core notes none."""

    def __init__(self) -> None:
        self._watchers: list[CacheWatcher] = []
        self._scheduler: Scheduler | None = None
        self._log: CacheLog | None = None

    def follow(self, scheduler: Scheduler) -> None:
        """From now on the cache is that of this core."""
        self._scheduler = scheduler
        self._log = scheduler.log_cache() if self._watchers else None

    def watch(self, watcher: CacheWatcher) -> None:
        """`watcher` is told at once that all was cleared, and from then on how the cache changes. What it holds
        already is in `names`."""
        self.tell()
        self._watchers.append(watcher)
        if self._scheduler is None:
            return
        if self._log is None:
            self._log = self._scheduler.log_cache()
            self.tell()
        else:
            watcher(CacheChanges(True, [], {}), self._scheduler.config)

    def names(self, first: int, end: int) -> list[BlockHash | None]:
        """The names of the cached blocks among those from `first` to before `end`, or the last one. All changes up to
        now are told before. None for blocks that are not cached, nothing behind the last block."""
        self.tell()
        return [] if self._scheduler is None else self._scheduler.batch.blocks.pool.names(first, end)

    def names_below(self, first: int, end: int) -> list[BlockHash | None]:
        """As `names`, of the slots of the tier below the pool, and of the blocks of host memory."""
        self.tell()
        if (scheduler := self._scheduler) is None:
            return []
        return scheduler.tier.names(first, end) + scheduler.swap_space.pool.names(first, end)

    def unwatch(self, watcher: CacheWatcher) -> None:
        """`watcher` is told nothing more. After the last one the core notes nothing more."""
        self._watchers.remove(watcher)
        if not self._watchers and self._scheduler is not None:
            self._scheduler.stop_cache_log()
            self._log = None

    def tell(self) -> None:
        """Tells all what changed since the last call. To be called after each step, and when a pool was lost or
        attached."""
        if self._log is None or self._scheduler is None or (changes := self._log.take()) is None:
            return
        for watcher in self._watchers:
            watcher(changes, self._scheduler.config)
