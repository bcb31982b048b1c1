"""Changes of the prefix cache: `CacheFeed` notifies watchers, and `CacheDigest` is the watcher that informs gateways.

Gateways send a prompt where most of it is cached. Disk and host memory below the pool are the next best places, and are
reported as one place.

A block is reported by the end of its hash. Changes of a tenth of a second are sent together, the same to every gateway;
a gateway that has not read the earlier ones gets the whole digest instead. A pool with many blocks reports only a part,
chosen by the blocks' hashes, so that a digest is bounded and all replicas and gateways choose the same blocks. If many
blocks are below the pool, the newest are reported.

The content that is cached when the first gateway connects is read in parts, each in a separate turn of the event loop:
for half a million blocks this takes some tenths of a second in total, and no turn takes long.
"""

from collections.abc import Callable, Iterable
from itertools import islice

from quire.messages.prefix_hashes import BlockHash, short
from scheduler_svc.core.cache_log import CacheChanges, CacheLog
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.service.outbox import CacheUpdate, Outbox
from scheduler_svc.service.readers import call_later

_MAX_REPORTED = 1 << 16
"""About the maximum number of reported blocks of the pool, and of blocks below it: half a mebibyte each, and some 5 MB
in a gateway."""

_MAX_SAMPLING_BITS = 8
_INTERVAL_S = 0.1
_READ_AT_ONCE = 8_192
"""Blocks that are read in one turn: about a millisecond."""

_READ_INTERVAL_S = 0.005

CacheWatcher = Callable[[CacheChanges, SchedulerConfig], None]
"""Gets changes, and the limits of the pool that they belong to. It must not wait, and must not raise."""


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
        self.report_changes()
        self._watchers.append(watcher)
        if self._scheduler is None:
            return
        if self._log is None:
            self._log = self._scheduler.log_cache()
            self.report_changes()
        else:
            watcher(CacheChanges(True, [], {}), self._scheduler.config)

    def names(self, first: int, end: int) -> list[BlockHash | None]:
        """The names of the blocks from `first` to before `end`, or to the last block; None for blocks that are not
        cached. All changes up to now are reported first."""
        self.report_changes()
        return [] if self._scheduler is None else self._scheduler.batch.blocks.pool.names(first, end)

    def names_below(self, first: int, end: int) -> list[BlockHash | None]:
        """The same for the slots of the tier below the pool, followed by the blocks of host memory."""
        self.report_changes()
        if (scheduler := self._scheduler) is None:
            return []
        return scheduler.tier.names(first, end) + scheduler.batch.blocks.host.pool.names(first, end)

    def unwatch(self, watcher: CacheWatcher) -> None:
        """Stops notifying `watcher`. After the last watcher the core records no changes any more."""
        self._watchers.remove(watcher)
        if not self._watchers and self._scheduler is not None:
            self._scheduler.set_cache_log(None)
            self._log = None

    def report_changes(self) -> None:
        """Notifies all watchers of the changes since the last call. Called after each step, and when a pool was lost
        or attached."""
        if self._log is None or self._scheduler is None or (changes := self._log.take()) is None:
            return
        for watcher in self._watchers:
            watcher(changes, self._scheduler.config)


def sampling_bits_for(num_blocks: int) -> int:
    """The number of bits of a hash that must be zero for its block to be reported, in a pool of this size."""
    return min(((num_blocks - 1) // _MAX_REPORTED).bit_length(), _MAX_SAMPLING_BITS)


class _ReportedBlocks:
    """The blocks of one place that were reported to gateways, and the changes since."""

    def __init__(self) -> None:
        # Dicts keep the order of reports; sets would have another order in every process.
        self._reported: dict[bytes, None] = {}
        self._removed: dict[bytes, None] = {}
        self._stored: dict[bytes, None] = {}

    def clear(self) -> None:
        for each in (self._reported, self._removed, self._stored):
            each.clear()

    def remove(self, blocks: Iterable[bytes]) -> None:
        for content in blocks:
            self._stored.pop(content, None)
            if content in self._reported:
                self._removed[content] = None

    def store(self, blocks: Iterable[bytes]) -> None:
        for content in blocks:
            self._removed.pop(content, None)
            if content not in self._reported:
                self._stored[content] = None

    def all(self) -> bytes:
        return b"".join(self._reported)

    def take_changes(self, limit: int | None = None) -> tuple[bytes, bytes]:
        """The blocks that left and the blocks that came, which count as reported from now on. Above `limit` the blocks
        that were reported first leave."""
        for content in self._removed:
            self._reported.pop(content, None)
        self._reported |= self._stored
        for content in list(islice(self._reported, 0 if limit is None else max(0, len(self._reported) - limit))):
            del self._reported[content]
            if content in self._stored:
                del self._stored[content]
            else:
                self._removed[content] = None
        changes = b"".join(self._removed), b"".join(self._stored)
        self._removed.clear()
        self._stored.clear()
        return changes


class CacheDigest:
    """The blocks that were reported to gateways, and the changes since. Without gateways nothing is recorded."""

    def __init__(self, feed: CacheFeed, call_later: Callable[[float, Callable[[], None]], object] = call_later) -> None:
        self._feed = feed
        self._call_later = call_later
        self._gateways: dict[Outbox, None] = {}
        self._is_watching = False
        self._sampling_bits = 0
        self._pool, self._below = _ReportedBlocks(), _ReportedBlocks()
        self._is_cleared = False
        self._is_due = False
        # The first unread block; None if all are read, or if changes will report all blocks.
        self._unread: int | None = None
        self._is_read_due = False

    def add(self, gateway: Outbox) -> None:
        """Sends a gateway the present content of the cache, and from now on its changes."""
        if not self._is_watching:
            self._is_watching = True
            self._feed.watch(self.record_changes)
            self._unread = 0
            self._read()
            self._send_changes()
        self._gateways[gateway] = None
        gateway.put_cache(self._snapshot(), self._snapshot)

    def remove(self, gateway: Outbox) -> None:
        """The gateway's stream ended, or it never wanted a digest."""
        self._gateways.pop(gateway, None)
        if self._is_watching and not self._gateways:
            self._is_watching = False
            self._feed.unwatch(self.record_changes)
            self._is_cleared, self._unread = False, None
            self._pool.clear()
            self._below.clear()

    def _snapshot(self) -> CacheUpdate:
        """The whole digest so far, for a gateway that missed some of it."""
        return CacheUpdate(True, b"", self._pool.all(), b"", self._below.all(), self._sampling_bits)

    def record_changes(self, changes: CacheChanges, config: SchedulerConfig) -> None:
        """Records changes, as a watcher of the cache."""
        if changes.is_cleared:
            self._is_cleared = True
            self._pool.clear()
            self._below.clear()
            self._sampling_bits = sampling_bits_for(config.num_blocks)
            self._unread = None
        self._pool.remove(self._sampled(changes.removed))
        self._below.remove(self._sampled((*changes.tier_removed, *changes.host_removed)))
        stored = [content for content, tokens in changes.stored.items() if tokens is None or not tokens.group]
        self._store(stored, (*changes.tier_stored, *changes.host_stored))

    def _store(self, blocks: Iterable[BlockHash], below: Iterable[BlockHash]) -> None:
        self._pool.store(self._sampled(blocks))
        self._below.store(self._sampled(below))
        if not self._is_due:
            self._is_due = True
            self._call_later(_INTERVAL_S, self._send_changes)

    def _read(self) -> None:
        """Adds some of the blocks that were cached before changes were recorded."""
        self._is_read_due = False
        if self._unread is None:
            return
        first, end = self._unread, self._unread + _READ_AT_ONCE
        names, below = self._feed.names(first, end), self._feed.names_below(first, end)
        # `names` may have reported another pool, whose blocks all come as changes.
        if self._unread is None:
            return
        self._unread = end if names or below else None
        self._store(filter(None, names), filter(None, below))
        if not self._is_read_due:
            self._is_read_due = True
            self._call_later(_READ_INTERVAL_S, self._read)

    def _sampled(self, blocks: Iterable[BlockHash]) -> list[bytes]:
        mask = (1 << self._sampling_bits) - 1
        return [short(content) for content in blocks if not content[-1] & mask]

    def _send_changes(self) -> None:
        self._is_due = False
        update = CacheUpdate(
            self._is_cleared, *self._pool.take_changes(), *self._below.take_changes(_MAX_REPORTED), self._sampling_bits
        )
        self._is_cleared = False
        if update != CacheUpdate(False, b"", b"", b"", b"", self._sampling_bits):
            for gateway in self._gateways:
                gateway.put_cache(update, self._snapshot)
