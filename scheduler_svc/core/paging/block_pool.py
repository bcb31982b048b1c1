"""Physical blocks of one pool, as numbers with reference counts (the paper's section 4.3, block allocator).

An index of the blocks' content overrides `_give_back` and `_take_back`, and so decides which free blocks go first.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NewType, cast

BlockId = NewType("BlockId", int)
"""Index of a block in its pool."""


class FreeQueue:
    """The blocks without a holder, in the order of their allocation: a doubly linked list through arrays, in which
    adding or removing a block costs O(1). The entry behind the last block is the ring's anchor."""

    def __init__(self, num_blocks: int) -> None:
        self._anchor = BlockId(num_blocks)
        self._next = cast(list[BlockId], [*range(1, num_blocks + 1), 0])
        self._previous = cast(list[BlockId], [num_blocks, *range(num_blocks)])
        self._length = num_blocks

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[BlockId]:
        block = self._next[self._anchor]
        while block != self._anchor:
            yield block
            block = self._next[block]

    def pop(self, count: int) -> list[BlockId]:
        """Removes and returns the first `count` blocks. Raises IndexError if there are fewer."""
        if count > self._length:
            raise IndexError(f"the free queue has {self._length} blocks, not {count}")
        following, block = self._next, self._anchor
        blocks = [block := following[block] for _ in range(count)]
        after = following[block]
        following[self._anchor], self._previous[after] = after, self._anchor
        self._length -= count
        return blocks

    def remove(self, blocks: Sequence[BlockId]) -> None:
        """Removes blocks, wherever they stand. They must be in the queue."""
        following, previous = self._next, self._previous
        for block in blocks:
            before, after = previous[block], following[block]
            following[before], previous[after] = after, before
        self._length -= len(blocks)

    def extend(self, blocks: Sequence[BlockId]) -> None:
        """Appends blocks that are not in the queue, in this order."""
        following, previous, last = self._next, self._previous, self._previous[self._anchor]
        for block in blocks:
            following[last], previous[block] = block, last
            last = block
        following[last], previous[self._anchor] = self._anchor, last
        self._length += len(blocks)

    def extend_first(self, blocks: Sequence[BlockId]) -> None:
        """Prepends blocks that are not in the queue, one after the other: the last of them comes first."""
        following, previous, first = self._next, self._previous, self._next[self._anchor]
        for block in blocks:
            following[block], previous[first] = first, block
            first = block
        following[self._anchor], previous[first] = first, self._anchor
        self._length += len(blocks)


class OutOfBlocksError(RuntimeError):
    """More blocks were requested than are free, which is a defect of the caller."""


class BlockPool:
    """Hands out blocks and takes them back. A block with several references is shared; it is free without any."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.num_releases = 0
        """Number of times that references were dropped so far."""
        self._free = FreeQueue(num_blocks)
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block: BlockId) -> int:
        """How many block tables hold this block."""
        return self._ref_counts[block]

    def num_free_of(self, blocks: Sequence[BlockId]) -> int:
        """The number of these blocks that have no holder."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[BlockId]:
        """Takes `count` free blocks, each with a reference count of 1. Raises OutOfBlocksError and changes nothing."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks requested, {len(self._free)} of {self.num_blocks} are free")
        blocks = self._free.pop(count)
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each block; blocks that had no holder are no longer free."""
        counts = self._ref_counts
        free: list[BlockId] = []
        for block in blocks:
            count = counts[block]
            counts[block] = count + 1
            if count == 0:
                free.append(block)
        if free:
            self._take_back(free)

    def free(self, *tables: Sequence[BlockId]) -> None:
        """Drops one reference of each block of the tables, of each table the last block first."""
        self.num_releases += 1
        counts = self._ref_counts
        free: list[BlockId] = []
        for table in tables:
            for block in reversed(table):
                count = counts[block]
                assert count > 0, f"block {block} was freed twice"
                counts[block] = count - 1
                if count == 1:
                    free.append(block)
        if free:
            self._give_back(free)

    def _give_back(self, blocks: list[BlockId]) -> None:
        """These blocks lost their last holder: they are free, and handed out before all others."""
        self._free.extend_first(blocks)

    def _take_back(self, blocks: list[BlockId]) -> None:
        """These free blocks have a holder again."""
        self._free.remove(blocks)
