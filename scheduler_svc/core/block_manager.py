"""Block tables: which physical blocks hold a sequence's tokens (the paper's section 4.2)."""

import enum
import math

from scheduler_svc.core.block_pool import BlockId, BlockPool
from scheduler_svc.core.sequence import Sequence


class CanAllocate(enum.Enum):
    """Whether a sequence's blocks can be had."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class BlockManager:
    """Gives sequences blocks as their tokens come, never ahead of them.

    `watermark` is the share of the pool that admission leaves free, so that a newly admitted sequence is not preempted
    at once for want of a block.
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: float) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._watermark_blocks = math.floor(watermark * num_blocks)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def can_allocate(self, num_tokens: int) -> CanAllocate:
        """Whether `allocate` of a sequence with this many tokens would succeed now, later, or never."""
        needed = self.blocks_for(num_tokens)
        if needed > self.pool.num_blocks:
            return CanAllocate.NEVER
        # With an empty pool the watermark protects nobody.
        reserve = self._watermark_blocks if self.pool.num_used else 0
        return CanAllocate.OK if needed + reserve <= self.pool.num_free else CanAllocate.LATER

    def allocate(self, sequence: Sequence) -> None:
        """Gives a sequence without blocks those for all its tokens. Raises OutOfBlocksError."""
        assert not sequence.block_table, "the sequence has blocks already"
        sequence.block_table = self.pool.allocate(self.blocks_for(sequence.num_tokens))

    def append(self, sequence: Sequence) -> BlockId:
        """Adds one block to the end of a sequence's table. Raises OutOfBlocksError."""
        (block,) = self.pool.allocate(1)
        sequence.block_table.append(block)
        return block

    def free(self, sequence: Sequence) -> None:
        """Takes all blocks of a sequence back, last first: the end of a prefix is the first to be reused."""
        self.pool.free(reversed(sequence.block_table))
        sequence.block_table = []
