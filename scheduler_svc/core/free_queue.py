"""The blocks that nobody holds, in the order in which they will be handed out."""

from collections.abc import Iterator
from typing import cast

from scheduler_svc.core.block import BlockId


class FreeQueue:
    """A doubly linked list through arrays: every operation is O(1), removal from the middle too.

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

    def remove(self, block: BlockId) -> None:
        """Takes a block out, wherever it stands. It must be in the queue."""
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self._length -= 1

    def append(self, block: BlockId) -> None:
        """Puts a block that is not in the queue last."""
        self._insert(block, self._previous[self._anchor], self._anchor)

    def append_first(self, block: BlockId) -> None:
        """Puts a block that is not in the queue first."""
        self._insert(block, self._anchor, self._next[self._anchor])

    def _insert(self, block: BlockId, before: BlockId, after: BlockId) -> None:
        self._previous[block], self._next[block] = before, after
        self._next[before] = self._previous[after] = block
        self._length += 1
