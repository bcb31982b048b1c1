"""The blocks that nobody holds, in the order in which they will be handed out."""

from collections.abc import Iterator, Sequence
from typing import cast

from scheduler_svc.core.block import BlockId


class FreeQueue:
    """A doubly linked list through arrays: a block costs O(1) to put in and to take out, from the middle too.

    `_next[b]` and `_previous[b]` are the neighbours of block b; the entry behind the last block is the ring's anchor.
    """

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
        """Removes and returns the first blocks, as many as that; IndexError when there are fewer."""
        if count > self._length:
            raise IndexError(f"the free queue has {self._length} blocks, not {count}")
        following, block = self._next, self._anchor
        blocks = [block := following[block] for _ in range(count)]
        after = following[block]
        following[self._anchor], self._previous[after] = after, self._anchor
        self._length -= count
        return blocks

    def remove(self, blocks: Sequence[BlockId]) -> None:
        """Takes blocks out, wherever they stand. They must be in the queue."""
        following, previous = self._next, self._previous
        for block in blocks:
            before, after = previous[block], following[block]
            following[before], previous[after] = after, before
        self._length -= len(blocks)

    def extend(self, blocks: Sequence[BlockId]) -> None:
        """Puts blocks that are not in the queue last, in this order."""
        following, previous, last = self._next, self._previous, self._previous[self._anchor]
        for block in blocks:
            following[last], previous[block] = block, last
            last = block
        following[last], previous[self._anchor] = self._anchor, last
        self._length += len(blocks)

    def extend_first(self, blocks: Sequence[BlockId]) -> None:
        """Puts blocks that are not in the queue first, each before those that precede it here."""
        following, previous, first = self._next, self._previous, self._next[self._anchor]
        for block in blocks:
            following[block], previous[first] = first, block
            first = block
        following[self._anchor], previous[first] = first, self._anchor
        self._length += len(blocks)
