"""The order of eviction of blocks in a pool, and of adapters in slots: least recently used first."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from unittest.mock import patch
from weakref import WeakKeyDictionary

from quire.messages.prefix_hashes import BlockHash
from scheduler_svc.core.adapter_slots import AdapterSlots
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.request import Adapter

_NEWEST = BlockId(-1)
"""A key that is no block, for the time of the block that was freed last."""
_OLDEST = BlockId(-2)
"""A key that is no block, for the time of the block that was made the next to be handed out last."""
_FREED_AT: WeakKeyDictionary[PrefixIndex, dict[BlockId, int]] = WeakKeyDictionary()
"""Times of the last free of blocks, by pool, in this world, as increasing numbers. Recordings use no test classes."""


@contextmanager
def ordered(fail: Callable[[Exception], object], parent_of: Callable[[BlockHash], BlockHash | None]) -> Iterator[None]:
    """Records inside the block the order in which blocks are freed. Blocks must be handed out in that order after all
    blocks without a name; of blocks freed together, the ends of prefixes first. `parent_of` returns the block without
    which the one with this name is useless."""
    free_blocks, restore_blocks, evict_blocks_first = PrefixIndex.free, PrefixIndex.restore, PrefixIndex.evict_first

    def note(pool: PrefixIndex, blocks: Iterable[BlockId]) -> None:
        times = _FREED_AT.setdefault(pool, {})
        for block in blocks:
            times[_NEWEST] = times[block] = times.get(_NEWEST, 0) + 1

    def free(pool: PrefixIndex, *tables: Sequence[BlockId]) -> None:
        for table in tables:
            later = set[BlockHash]()
            # Host memory frees the blocks that a step loads as one table, with a block for each sequence that loads it.
            # Their last reference is the first sequence's. A block without a name may be this sequence's copy of the
            # block before, whose name belongs to another block.
            names = pool.hashes_of([*dict.fromkeys(table)])
            for before, name in reversed([*pairwise([BlockHash(b""), *names])]):
                if name is None:
                    continue
                if before is not None and parent_of(name) in later:
                    fail(AssertionError("the beginning of a prefix is to make way before its end"))
                later.add(name)
        note(pool, (block for table in tables for block in reversed(table)))
        free_blocks(pool, *tables)

    def restore(pool: PrefixIndex, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        sealed = list(sealed)
        new = dict.fromkeys(block for block, _ in sealed if pool.hash_of(block) is None)
        restore_blocks(pool, sealed)
        note(pool, (block for block in new if pool.hash_of(block) is not None))

    def evict_first(pool: PrefixIndex, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        sealed = list(sealed)
        times = _FREED_AT.setdefault(pool, {})
        for block, name in sealed:
            if pool.ref_count(block) == 0 and pool.hash_of(block) == name:
                times[_OLDEST] = times[block] = times.get(_OLDEST, 0) - 1
        evict_blocks_first(pool, sealed)

    _FREED_AT.clear()
    with (
        patch.object(PrefixIndex, "free", free),
        patch.object(PrefixIndex, "restore", restore),
        patch.object(PrefixIndex, "evict_first", evict_first),
    ):
        yield


def out_of_order(pool: PrefixIndex) -> str | None:
    """The error in the order of the free blocks; None if it is right."""
    free, times = pool.free_blocks(), _FREED_AT.get(pool, {})
    names = pool.hashes_of(free)
    num_unnamed = names.count(None)
    if names[:num_unnamed].count(None) != num_unnamed:
        return "a block that can be hit is handed out before one that cannot"
    freed_at = [times.get(block, 0) for block in free[num_unnamed:]]
    return "a block is handed out before one that was used earlier" if freed_at != sorted(freed_at) else None


class AdapterUse:
    """Times at which loaded adapters were loaded, and last used by rows."""

    def __init__(self, slots: AdapterSlots) -> None:
        self._slots = slots
        self._now = 0
        self._used_at = dict[Adapter, int]()
        self._loaded_at = dict[Adapter, int]()

    def observe(self) -> None:
        """Records the present uses. Call it after each operation."""
        self._now += 1
        rows = self._slots.num_rows()
        for adapter, count in rows.items():
            self._loaded_at.setdefault(adapter, self._now)
            if count or adapter not in self._used_at:
                self._used_at[adapter] = self._now
        for gone in self._loaded_at.keys() - rows.keys():
            del self._loaded_at[gone], self._used_at[gone]

    def wrong_choice(self, before: dict[Adapter, int], drained: set[Adapter], kept: set[Adapter]) -> str | None:
        """The error in the choice of an adapter that lost its slot or is drained now; None if it is right. `before` has
        the number of rows of each adapter, and `drained` the adapters that made way already."""
        left = before.keys() - self._slots.num_rows().keys()
        free = {adapter for adapter, count in before.items() if not count and adapter not in kept} | left
        for adapter in left:
            if drained & free and adapter not in drained:
                return f"{adapter.name} leaves its slot, and one that makes way already stays"
            if not drained & free and self._used_at.get(adapter, 0) > min(self._used_at.get(each, 0) for each in free):
                return f"{adapter.name} leaves its slot, and one that was used before stays"
        for adapter in self.drained() - drained:
            used = [each for each, count in before.items() if count]
            if self._loaded_at.get(adapter, 0) > min(self._loaded_at.get(each, 0) for each in used):
                return f"{adapter.name} is to make way, and was loaded after others"
        return None

    def drained(self) -> set[Adapter]:
        """The adapters that make way for others."""
        slots = self._slots
        return {adapter for adapter, slot in slots._of_adapter.items() if slots._slots[slot].is_drained}
