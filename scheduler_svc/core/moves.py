"""Blocks that move: where those of a request are, and which of ours another replica may fetch.

A request that goes on at another replica leaves its sealed blocks here under a lease: they stay until they were
fetched, the lease is over, or somebody else needs the room. The other replica gives them new blocks, which nobody else
holds until the workers have their content, and then they are cached like any others. So a request never needs a block
that moves: what does not come is computed. Blocks come from a tier below the pool in the same way.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Generic, NewType, TypeVar

from scheduler_svc.core.block_pool import BlockHash, BlockId, BlockPool
from scheduler_svc.core.cache_log import CacheLog

Lease = NewType("Lease", bytes)
"""A random name: who knows it may fetch the blocks."""


@dataclass(frozen=True, slots=True)
class KvSource:
    """Where blocks may be: workers, in order of rank, whose blocks mean the same as those of `kv_namespace`."""

    kv_namespace: str = ""
    endpoints: tuple[str, ...] = ()
    lease: Lease = Lease(b"")


K = TypeVar("K")


@dataclass(slots=True)
class _Leased:
    blocks: list[BlockId]
    expires_at: float
    num_done: int = 0


@dataclass(slots=True)
class Leases(Generic[K]):
    """Blocks that are kept for others than requests that run, with a reference: sealed ones that another replica may
    fetch, by their lease, and room for requests that still run at another one, by their key."""

    _leases: dict[K, _Leased] = field(default_factory=dict[K, _Leased])

    def __len__(self) -> int:
        return len(self._leases)

    def __iter__(self) -> Iterator[K]:
        return iter(self._leases)

    @property
    def newest(self) -> K | None:
        """None where there is none."""
        return next(reversed(self._leases), None)

    @property
    def num_blocks(self) -> int:
        """Blocks of all leases; one that several have counts for each."""
        return sum(len(each.blocks) for each in list(self._leases.values()))

    def held_tables(self) -> list[list[BlockId]]:
        """The blocks of each lease."""
        return [each.blocks for each in self._leases.values()]

    def add(self, lease: K, blocks: list[BlockId], expires_at: float) -> None:
        """Keeps blocks, which it gets with a reference."""
        assert lease not in self._leases, "a lease is given once"
        self._leases[lease] = _Leased(blocks, expires_at)

    def renew(self, lease: K, expires_at: float) -> None:
        """Blocks of it are being fetched. No effect where it is over."""
        if (leased := self._leases.get(lease)) is not None:
            leased.expires_at = expires_at

    def count_done(self, lease: K) -> int:
        """One more rank has sent its part of the blocks. Returns how many have; 0 where the lease is over."""
        if (leased := self._leases.get(lease)) is None:
            return 0
        leased.num_done += 1
        return leased.num_done

    def end(self, lease: K, pool: BlockPool) -> None:
        """The blocks stay cached until they are evicted. Idempotent."""
        if (leased := self._leases.pop(lease, None)) is not None:
            pool.free(leased.blocks)

    def expire(self, now: float, pool: BlockPool) -> None:
        """Ends those whose time is over."""
        for lease in [lease for lease, leased in self._leases.items() if leased.expires_at <= now]:
            self.end(lease, pool)

    def give_way(self, pool: BlockPool) -> bool:
        """Ends the oldest one. Returns whether there was one."""
        for lease in self._leases:
            self.end(lease, pool)
            return True
        return False


@dataclass(slots=True)
class MoveCounts:
    """Requests that came from other replicas and that left for them, blocks that came from disk and from replicas, and
    blocks that did not; blocks that the pool evicted to host memory, and that came from there. Since the scheduler
    started."""

    requests_in: int = 0
    requests_out: int = 0
    from_disk: int = 0
    from_replicas: int = 0
    failed_from_disk: int = 0
    failed_from_replicas: int = 0
    to_host: int = 0
    from_host: int = 0

    def fetched(self, arriving: "Arriving", num_failed: int) -> None:
        """All blocks came but so many."""
        num_came = len(arriving.blocks) - num_failed
        if arriving.source is None:
            self.from_disk, self.failed_from_disk = self.from_disk + num_came, self.failed_from_disk + num_failed
        else:
            self.requests_in += 1
            self.from_replicas += num_came
            self.failed_from_replicas += num_failed


class Tier:
    """Which blocks the workers keep below the pool, as far as they said.

    Attributes:
        log: What is told which blocks come and leave; None if nobody asks.
    """

    def __init__(self) -> None:
        self.log: CacheLog | None = None
        self._by_slot: dict[int, BlockHash] = {}
        self._slots: dict[BlockHash, int] = {}
        self._num_slots = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, content: BlockHash) -> bool:
        return content in self._slots

    def at(self, slot: int) -> BlockHash | None:
        """What a slot holds."""
        return self._by_slot.get(slot)

    def names(self, first: int, end: int) -> list[BlockHash | None]:
        """What the slots from `first` to before `end` hold, nothing behind the last one that ever held something."""
        return [self._by_slot.get(slot) for slot in range(first, min(end, self._num_slots))]

    def slot_of(self, content: BlockHash) -> int | None:
        """Where a block is."""
        return self._slots.get(content)

    def change(self, slots: SequenceOf[int], hashes: SequenceOf[BlockHash]) -> None:
        """The first of these slots hold these blocks now, and the others none."""
        for slot in slots:
            before = self._by_slot.pop(slot, None)
            if before is not None and self._slots.get(before) == slot:
                del self._slots[before]
                self._note(before, is_stored=False)
        for slot, content in zip(slots, hashes, strict=False):
            self._by_slot[slot], self._slots[content] = content, slot
            self._num_slots = max(self._num_slots, slot + 1)
            self._note(content, is_stored=True)

    def forget(self, content: BlockHash) -> None:
        """The block did not come, and is not worth another try."""
        if (slot := self._slots.pop(content, None)) is not None:
            del self._by_slot[slot]
            self._note(content, is_stored=False)

    def clear(self) -> None:
        """Forgets all."""
        for content in list(self._slots):
            self.forget(content)
        self._by_slot.clear()

    def rename(self, content: BlockHash, name: BlockHash) -> None:
        """Gives a block another name, if there is such a block."""
        if (slot := self._slots.pop(content, None)) is not None:
            self._by_slot[slot], self._slots[name] = name, slot

    def _note(self, content: BlockHash, *, is_stored: bool) -> None:
        if self.log is not None:
            self.log.tier_changed(content, is_stored=is_stored)


class CommonTier:
    """The blocks that all ranks keep below their pools, as one tier with the slots of the first rank: each has a part
    of a block, and one that lacks its part makes those of the others useless."""

    def __init__(self, num_ranks: int) -> None:
        self._tiers = [Tier() for _ in range(num_ranks)]

    def change(
        self, rank: int, slots: SequenceOf[int], hashes: SequenceOf[BlockHash]
    ) -> tuple[list[int], list[BlockHash]]:
        """A rank says that the first of these slots of its own hold these blocks now, and the others none. Returns the
        same of the common tier, as far as it changed."""
        first, tier = self._tiers[0], self._tiers[rank]
        common = dict.fromkeys(slots)
        if tier is not first:
            changed = (*filter(None, map(tier.at, slots)), *hashes)
            common = dict.fromkeys(slot for slot in map(first.slot_of, changed) if slot is not None)
        before = {slot: self._at(slot) for slot in common}
        tier.change(slots, hashes)
        after = {slot: content for slot in common if (content := self._at(slot)) != before[slot]}
        held = {slot: content for slot, content in after.items() if content is not None}
        return [*held, *(slot for slot in after if slot not in held)], list(held.values())

    def _at(self, slot: int) -> BlockHash | None:
        content = self._tiers[0].at(slot)
        return content if content is not None and all(content in tier for tier in self._tiers) else None


@dataclass(frozen=True, slots=True)
class Arriving:
    """Blocks of this pool that get their content from another replica, or without a `source` from the tier, with the
    names of what they will hold. `kept` are the cached blocks of the request that waits for them: without those it
    could not use what comes, or would have them fetched next and lose these meanwhile."""

    source: KvSource | None
    blocks: tuple[BlockId, ...]
    hashes: tuple[BlockHash, ...]
    kept: tuple[BlockId, ...] = ()

    def came(self, failed: frozenset[int]) -> Iterator[tuple[BlockId, BlockHash]]:
        """Those whose content is there."""
        for index, pair in enumerate(zip(self.blocks, self.hashes, strict=True)):
            if index not in failed:
                yield pair
