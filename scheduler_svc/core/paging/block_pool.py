"""Physical blocks of one pool, as numbers with reference counts (the paper's section 4.3, block allocator)."""

from collections.abc import Iterable, Sequence
from typing import NewType

BlockId = NewType("BlockId", int)
"""Index of a block in its pool."""


class OutOfBlocksError(RuntimeError):
    """More blocks were requested than are free, which is a defect of the caller."""


class BlockPool:
    """Hands out blocks and takes them back. A block with several references is shared; it is free without any."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        # A stack: the last block is handed out first.
        self._free = [BlockId(block) for block in reversed(range(num_blocks))]
        self._ref_counts = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return len(self._free)

    def ref_count(self, block: BlockId) -> int:
        """How many block tables hold this block."""
        return self._ref_counts[block]

    def num_free_of(self, blocks: Sequence[BlockId]) -> int:
        """The number of these blocks that have no holder."""
        return sum(self._ref_counts[block] == 0 for block in blocks)

    def allocate(self, count: int) -> list[BlockId]:
        """Takes `count` free blocks, each with a reference count of 1. Raises OutOfBlocksError and changes nothing."""
        if count > self.num_free:
            raise OutOfBlocksError(f"{count} blocks requested, {self.num_free} of {self.num_blocks} are free")
        start = len(self._free) - count
        blocks = self._free[start:][::-1]
        del self._free[start:]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each of these blocks, which have a holder."""
        for block in blocks:
            self._ref_counts[block] += 1

    def free(self, *tables: Sequence[BlockId]) -> None:
        """Drops one reference of each block of the tables, of each table the last block first."""
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
        """These blocks lost their last holder. An index of their content may keep some of them longer."""
        self._free += blocks
