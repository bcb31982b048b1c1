"""Blocks that move: the places where a request's blocks are, and the blocks here that another replica may fetch.

A request that continues at another replica leaves its sealed blocks here under a lease: they stay until they are
fetched, the lease expires, or another request needs the room. The other replica allocates new blocks for them. Only the
request holds these until the workers have their content, and then they are cached like any others. So a request never
depends on a move: blocks that do not come are computed. Blocks come from a tier below the pool in the same way.
"""

from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import NewType

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.cache_log import CacheLog
from scheduler_svc.core.paging.block_pool import BlockId

Lease = NewType("Lease", bytes)
"""A random name. A process that knows it may fetch the blocks."""


@dataclass(frozen=True, slots=True)
class KvSource:
    """A place where blocks may be: workers, in order of rank, whose blocks belong to `kv_namespace`."""

    kv_namespace: str = ""
    endpoints: tuple[str, ...] = ()
    lease: Lease = Lease(b"")


@dataclass(slots=True)
class MoveCounts:
    """Counts since the scheduler started: requests that came from other replicas and that left for them; blocks that
    came, or failed to come, from disk and from replicas; blocks that the pool evicted to host memory, and that came
    from there."""

    requests_in: int = 0
    requests_out: int = 0
    from_disk: int = 0
    from_replicas: int = 0
    failed_from_disk: int = 0
    failed_from_replicas: int = 0
    to_host: int = 0
    from_host: int = 0

    def fetched(self, arriving: "Arriving", num_failed: int) -> None:
        """Counts a fetch: all blocks came except `num_failed`."""
        num_came = len(arriving.blocks) - num_failed
        if arriving.source is None:
            self.from_disk, self.failed_from_disk = self.from_disk + num_came, self.failed_from_disk + num_failed
        else:
            self.requests_in += 1
            self.from_replicas += num_came
            self.failed_from_replicas += num_failed


class Tier:
    """Which blocks the workers keep below the pool, according to their reports.

    Attributes:
        log: Records which blocks come and leave; None if no process reads it.
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
        """The block in a slot; None if it is empty."""
        return self._by_slot.get(slot)

    def names(self, first: int, end: int) -> list[BlockHash | None]:
        """The blocks in the slots from `first` to before `end`, up to the last slot that ever held a block."""
        return [self._by_slot.get(slot) for slot in range(first, min(end, self._num_slots))]

    def slot_of(self, content: BlockHash) -> int | None:
        """The slot that holds a block; None if no slot does."""
        return self._slots.get(content)

    def change(self, slots: SequenceOf[int], hashes: SequenceOf[BlockHash]) -> None:
        """Sets the content of these slots: the first slots hold these blocks now, and the other slots are empty."""
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
        """Removes a block that did not come; another fetch is not worth it."""
        if (slot := self._slots.pop(content, None)) is not None:
            del self._by_slot[slot]
            self._note(content, is_stored=False)

    def clear(self) -> None:
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
    """The blocks that all ranks keep below their pools, as one tier with the slots of the first rank. Each rank has a
    part of a block; if one rank lacks its part, the parts of the others are useless."""

    def __init__(self, num_ranks: int) -> None:
        self._tiers = [Tier() for _ in range(num_ranks)]

    def change(
        self, rank: int, slots: SequenceOf[int], hashes: SequenceOf[BlockHash]
    ) -> tuple[list[int], list[BlockHash]]:
        """Applies a rank's report: the first of these slots of its own hold these blocks now, and the others are empty.
        Returns the resulting changes of the common tier in the same form."""
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
    """Blocks of this pool that get their content from another replica, or from the tier if `source` is None, with the
    hashes of that content."""

    source: KvSource | None
    blocks: tuple[BlockId, ...]
    hashes: tuple[BlockHash, ...]

    def came(self, failed: frozenset[int]) -> Iterator[tuple[BlockId, BlockHash]]:
        """The blocks whose content arrived, with its hash."""
        for index, pair in enumerate(zip(self.blocks, self.hashes, strict=True)):
            if index not in failed:
                yield pair
