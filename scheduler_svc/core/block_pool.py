"""Bookkeeping of the physical blocks of one pool (the paper's section 4.3, block allocator).

The tensors live in the worker; here a block is a number with a reference count. A block whose content is final is
**sealed** under its hash. It stays findable by that hash when nobody holds it any more, until it is handed out anew.
"""

from collections.abc import Iterable, Sequence

from scheduler_svc.core.block import BlockHash, BlockId
from scheduler_svc.core.free_queue import FreeQueue


class OutOfBlocksError(RuntimeError):
    """More blocks were asked for than are free. Callers check first, so this is a defect of the caller."""


class BlockPool:
    """Hands out blocks and takes them back, least recently used first.

    Blocks without a hash go before all that can still be hit. Of blocks freed together, the one deepest in its prefix
    goes first: a prefix without its end is of use, an end without its prefix is not.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = FreeQueue(num_blocks)
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._num_held_sealed = 0

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, those included that can still be hit."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Blocks that nobody holds and that can still be hit."""
        return len(self._by_hash) - self._num_held_sealed

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block: BlockId) -> int:
        """How many block tables hold this block."""
        return self._ref_counts[block]

    def num_held_alone(self, table: Sequence[BlockId]) -> int:
        """Blocks of a table that no other one holds."""
        counts = self._ref_counts
        return sum(counts[block] == 1 for block in table)

    def num_free_of(self, blocks: Sequence[BlockId]) -> int:
        """Those of the blocks that nobody holds."""
        counts = self._ref_counts
        return sum(counts[block] == 0 for block in blocks)

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """The hash under which the block is sealed."""
        return self._hashes[block]

    def ref_counts_of(self, blocks: Sequence[BlockId]) -> list[int]:
        """`ref_count` of each."""
        return [self._ref_counts[block] for block in blocks]

    def hashes_of(self, blocks: Sequence[BlockId]) -> list[BlockHash | None]:
        """`hash_of` of each."""
        return [self._hashes[block] for block in blocks]

    def allocate(self, count: int) -> list[BlockId]:
        """Takes `count` free blocks, each with a reference count of 1. Raises OutOfBlocksError and changes nothing."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = self._free.pop(count)
        for block in blocks:
            content = self._hashes[block]
            if content is not None:
                del self._by_hash[content]
                self._hashes[block] = None
            self._ref_counts[block] = 1
        return blocks

    def free(self, *tables: Sequence[BlockId]) -> None:
        """Drops one reference of each block of the tables, each given in logical order, one table after the other."""
        counts, hashes = self._ref_counts, self._hashes
        unnamed: list[BlockId] = []
        cached: list[BlockId] = []
        for table in tables:
            for block in reversed(table):
                count = counts[block]
                assert count > 0, f"block {block} was freed twice"
                counts[block] = count - 1
                if count == 1:
                    (unnamed if hashes[block] is None else cached).append(block)
        self._num_held_sealed -= len(cached)
        self._free.extend_first(unnamed)
        self._free.extend(cached)

    def hits(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """The blocks sealed under the first of these hashes, up to the first that is not there."""
        blocks: list[BlockId] = []
        find = self._by_hash.get
        for each in hashes:
            block = find(each)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each block; those that nobody held are no longer free."""
        counts, hashes = self._ref_counts, self._hashes
        free: list[BlockId] = []
        for block in blocks:
            count = counts[block]
            counts[block] = count + 1
            if count == 0:
                free.append(block)
        if free:
            self._free.remove(free)
            self._num_held_sealed += sum(hashes[block] is not None for block in free)

    def seal(self, block: BlockId, content: BlockHash) -> bool:
        """Names the final content of a held block. False when another block holds the same content already, which
        then stays the one that is found."""
        assert self._ref_counts[block] > 0, f"block {block} is sealed while nobody holds it"
        if self._hashes[block] is not None or content in self._by_hash:
            return False
        self._hashes[block] = content
        self._by_hash[content] = block
        self._num_held_sealed += 1
        return True

    def adopt(self, block: BlockId, content: BlockHash) -> None:
        """Takes over a free block whose content an earlier scheduler sealed."""
        if self._ref_counts[block] or self._hashes[block] is not None or content in self._by_hash:
            return
        self._hashes[block] = content
        self._by_hash[content] = block
        self._free.remove([block])
        self._free.extend([block])

    def free_blocks(self) -> tuple[BlockId, ...]:
        """The free blocks in the order in which they will be handed out."""
        return tuple(self._free)
