"""Block tables: which physical blocks hold a sequence's tokens (the paper's sections 4.2 and 4.4)."""

import enum
import math

from scheduler_svc.core.block import BlockHash, BlockId
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.sequence import Sequence


class CanAllocate(enum.Enum):
    """Whether a sequence's blocks can be had."""

    OK = enum.auto()
    LATER = enum.auto()
    NEVER = enum.auto()


class BlockManager:
    """Gives sequences blocks as their tokens come, never ahead of them, and lets them share what is cached.

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

    def can_allocate(self, sequence: Sequence) -> CanAllocate:
        """Whether `allocate` of this sequence would succeed now, later, or never."""
        needed = self.blocks_for(sequence.num_tokens)
        if needed > self.pool.num_blocks:
            return CanAllocate.NEVER
        # A hit on a block that somebody holds costs nothing; one on a block that is only cached takes it out of the
        # free ones. With an empty pool the watermark protects nobody.
        needed -= sum(self.pool.ref_count(block) > 0 for block in self._hits(sequence))
        reserve = self._watermark_blocks if self.pool.num_used else 0
        return CanAllocate.OK if needed + reserve <= self.pool.num_free else CanAllocate.LATER

    def allocate(self, sequence: Sequence) -> int:
        """Gives a sequence without blocks those for all its tokens; returns how many tokens are cached in them.

        Raises OutOfBlocksError.
        """
        assert not sequence.block_table, "the sequence has blocks already"
        hits = self._hits(sequence)
        self.pool.touch(hits)
        fresh = self.pool.allocate(self.blocks_for(sequence.num_tokens) - len(hits))
        sequence.block_table = [*hits, *fresh]
        return len(hits) * self.block_size

    def append(self, sequence: Sequence) -> BlockId:
        """Adds one block to the end of a sequence's table. Raises OutOfBlocksError."""
        (block,) = self.pool.allocate(1)
        sequence.block_table.append(block)
        return block

    def seal(self, sequence: Sequence, first: int, end: int) -> list[tuple[BlockId, BlockHash]]:
        """Seals the blocks with logical indices from `first` to before `end`, all of them full; returns those that can
        be hit from now on."""
        hashes = sequence.prefix_hashes.first(end, sequence.token_ids)
        pairs = zip(sequence.block_table[first:end], hashes[first:], strict=True)
        return [(block, content) for block, content in pairs if self.pool.seal(block, content)]

    def free(self, sequence: Sequence) -> None:
        """Takes all blocks of a sequence back."""
        self.pool.free(sequence.block_table)
        sequence.block_table = []

    def _hits(self, sequence: Sequence) -> list[BlockId]:
        """Cached blocks of the sequence's prefix. At least one token is left to compute, so that there are logits."""
        if not sequence.request.uses_prefix_cache:
            return []
        num_blocks = (sequence.num_tokens - 1) // self.block_size
        return self.pool.hits(sequence.prefix_hashes.first(num_blocks, sequence.token_ids))
