"""Bookkeeping of the physical blocks of one pool (the paper's section 4.3, block allocator).

The tensors live in the worker; here a block is a number with a reference count.
"""

from collections import deque
from collections.abc import Iterable
from typing import NewType

BlockId = NewType("BlockId", int)


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. Callers check first, so this is a defect of the caller."""


class BlockPool:
    """Hands out blocks and takes them back. Oldest freed first, so that freed content stays untouched for long."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least 1 block, got {num_blocks}")
        self.num_blocks = num_blocks
        self._free: deque[BlockId] = deque(BlockId(i) for i in range(num_blocks))
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

    def allocate(self, count: int) -> list[BlockId]:
        """Takes `count` free blocks, each with a reference count of 1. Raises OutOfBlocksError and changes nothing."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popleft() for _ in range(count)]
        for block in blocks:
            self._ref_counts[block] = 1
        return blocks

    def free(self, blocks: Iterable[BlockId]) -> None:
        """Drops one reference of each block; those that nobody holds any more become free."""
        for block in blocks:
            assert self._ref_counts[block] > 0, f"block {block} was freed twice"
            self._ref_counts[block] -= 1
            if self._ref_counts[block] == 0:
                self._free.append(block)

    def free_blocks(self) -> tuple[BlockId, ...]:
        """The free blocks in the order in which they will be handed out."""
        return tuple(self._free)
