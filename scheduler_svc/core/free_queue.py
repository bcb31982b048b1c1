"""The blocks that nobody holds, in the order in which they will be handed out."""

from collections.abc import Iterator

from scheduler_svc.core.block import BlockId


class FreeQueue:
    """A doubly linked list through arrays: every operation is O(1), removal from the middle too.

    `_next[b]` and `_previous[b]` are the neighbours of block b; the entry behind the last block is the ring's anchor.
    """

    def __init__(self, num_blocks: int) -> None:
        self._anchor = num_blocks
        self._next = [*range(1, num_blocks + 1), 0]
        self._previous = [num_blocks, *range(num_blocks)]
        self._length = num_blocks

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[BlockId]:
        block = self._next[self._anchor]
        while block != self._anchor:
            yield BlockId(block)
            block = self._next[block]

    def pop(self) -> BlockId:
        """Removes and returns the first block; IndexError when there is none."""
        if not self._length:
            raise IndexError("the free queue is empty")
        block = BlockId(self._next[self._anchor])
        self.remove(block)
        return block

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

    def _insert(self, block: BlockId, before: int, after: int) -> None:
        self._previous[block], self._next[block] = before, after
        self._next[before] = self._previous[after] = block
        self._length += 1
