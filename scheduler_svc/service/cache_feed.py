"""Notifies watchers of the prefix cache of its changes."""

from typing import Protocol

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.cache_log import CacheChanges, CacheLog
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler


class CacheWatcher(Protocol):
    """Gets changes, and the limits of the pool that they belong to. It must not wait, and must not raise."""

    def __call__(self, changes: CacheChanges, config: SchedulerConfig) -> None: ...


class CacheFeed:
    """Changes of the prefix cache of the current core. Without watchers the core records none."""

    def __init__(self) -> None:
        self._watchers: list[CacheWatcher] = []
        self._scheduler: Scheduler | None = None
        self._log: CacheLog | None = None

    def follow(self, scheduler: Scheduler) -> None:
        """Follows the cache of this core from now on."""
        self._scheduler = scheduler
        self._log = scheduler.log_cache() if self._watchers else None

    def watch(self, watcher: CacheWatcher) -> None:
        """Notifies `watcher` at once that all was cleared, and from then on of each change. The present content of the
        cache is in `names`."""
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
        """The names of the blocks from `first` to before `end`, or to the last block; None for blocks that are not
        cached. All changes up to now are reported first."""
        self.tell()
        return [] if self._scheduler is None else self._scheduler.batch.blocks.pool.names(first, end)

    def names_below(self, first: int, end: int) -> list[BlockHash | None]:
        """The same for the slots of the tier below the pool, followed by the blocks of host memory."""
        self.tell()
        if (scheduler := self._scheduler) is None:
            return []
        return scheduler.tier.names(first, end) + scheduler.batch.blocks.host.pool.names(first, end)

    def unwatch(self, watcher: CacheWatcher) -> None:
        """Stops notifying `watcher`. After the last watcher the core records no changes any more."""
        self._watchers.remove(watcher)
        if not self._watchers and self._scheduler is not None:
            self._scheduler.set_cache_log(None)
            self._log = None

    def tell(self) -> None:
        """Notifies all watchers of the changes since the last call. Called after each step, and when a pool was lost
        or attached."""
        if self._log is None or self._scheduler is None or (changes := self._log.take()) is None:
            return
        for watcher in self._watchers:
            watcher(changes, self._scheduler.config)
