"""Physical blocks of one pool, and the hashes of their content (the paper's section 4.3, block allocator).

The tensors live in the worker; here a block is a number with a reference count. A block whose content is final is
**sealed** under its hash. When no table holds it any more, it can be found by that hash until it is handed out anew.

Two sequences that agree on a hash agree on everything up to the end of that block (`quire.messages.prefix_hashes`), so
they can share the block (the paper's section 4.4, shared prefix). Hashes are computed here and never taken from others.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NewType, cast

from quire.messages.prefix_hashes import BlockHash, hash_chain, pack
from scheduler_svc.core.cache_log import CacheLog

BlockId = NewType("BlockId", int)
"""Index of a block in its pool."""


class PrefixHashes:
    """The hashes of a sequence's full blocks, each computed once, on first use."""

    def __init__(self, root: BlockHash, block_size: int) -> None:
        """`root` is the `root_hash` of the sequence's tenant and adapter."""
        self._hashes: list[BlockHash] = []
        self._parent = root
        self._block_size = block_size

    def first(self, count: int, token_ids: Sequence[int]) -> list[BlockHash]:
        """The hashes of the first `count` blocks. `token_ids` fills all of them."""
        return self.between(0, count, token_ids)

    def between(self, first: int, end: int, token_ids: Sequence[int]) -> list[BlockHash]:
        """The hashes of the blocks from `first` to before `end`. `token_ids` fills all of them."""
        if end > len(self._hashes):
            self._compute(end, token_ids)
        return self._hashes[first:end]

    def _compute(self, count: int, token_ids: Sequence[int]) -> None:
        known = len(self._hashes)
        packed = pack(token_ids[known * self._block_size : count * self._block_size])
        assert len(packed) == 4 * (count - known) * self._block_size, "only full blocks have a hash"
        self._hashes += hash_chain(self._parent, packed, 4 * self._block_size)
        self._parent = self._hashes[-1]

    def copy(self) -> "PrefixHashes":
        """A copy for a forked sequence: the same hashes so far, and independent from here on."""
        twin = object.__new__(PrefixHashes)
        twin._hashes = list(self._hashes)
        twin._parent, twin._block_size = self._parent, self._block_size
        return twin


class FreeQueue:
    """The blocks without a holder, in the order of their allocation.

    A doubly linked list through arrays: adding or removing a block costs O(1), in the middle too. `_next[b]` and
    `_previous[b]` are the neighbours of block b; the entry behind the last block is the ring's anchor.
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
    """More blocks were requested than are free. Callers check first, so this is a defect of the caller."""


_MAX_CHANGES = 1 << 16
"""Changes that a pool remembers."""


class CachedStart:
    """The cached blocks found so far at the start of a waiting sequence; `num_free` of them have no holder. It holds no
    references: `BlockPool.is_current` says whether all of it is still true."""

    __slots__ = ("blocks", "num_changes", "num_free", "pool", "version")

    def __init__(self, pool: "BlockPool", version: int) -> None:
        self.pool = pool
        self.version = version
        """Changes whenever anything here changes."""
        self.blocks: list[BlockId] = []
        self.num_free = 0
        self.num_changes = pool.num_changes


class BlockPool:
    """Hands out blocks and takes them back, least recently used first.

    Blocks without a hash go before all blocks that can still be hit. When several blocks are freed together, the one
    deepest in its prefix goes first: a prefix without its end is useful, an end without its prefix is not.

    Attributes:
        log: Records which blocks leave the prefix cache; None if no process reads it.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.log: CacheLog | None = None
        self._free = FreeQueue(num_blocks)
        self._ref_counts = [0] * num_blocks
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        self._num_held_sealed = 0
        # Blocks that a CachedStart may have, and changed ones: such blocks that got their first holder, lost their last
        # holder or cannot be hit any more, each once until it is found again.
        self._found: set[BlockId] = set()
        self._changes: list[BlockId] = []
        self._num_forgotten = 0
        self.num_releases = 0
        """Number of times that references were dropped so far."""

    @property
    def num_changes(self) -> int:
        """Number of changes so far of blocks that a CachedStart has."""
        return self._num_forgotten + len(self._changes)

    @property
    def num_free(self) -> int:
        """The number of blocks without a holder, including blocks that can still be hit."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """The number of blocks without a holder that can still be hit."""
        return len(self._by_hash) - self._num_held_sealed

    @property
    def num_used(self) -> int:
        return self.num_blocks - len(self._free)

    def ref_count(self, block: BlockId) -> int:
        """How many block tables hold this block."""
        return self._ref_counts[block]

    def num_held_alone(self, table: Sequence[BlockId]) -> int:
        """Blocks of a table that no other table holds."""
        counts = self._ref_counts
        return sum(counts[block] == 1 for block in table)

    def num_free_of(self, blocks: Sequence[BlockId]) -> int:
        """The number of these blocks that have no holder."""
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

    def names(self, first: int, end: int) -> list[BlockHash | None]:
        """`hash_of` of the blocks from `first` to before `end`, or to the last block."""
        return self._hashes[first:end]

    def allocate(self, count: int, evict: Callable[[BlockId, BlockHash], None] | None = None) -> list[BlockId]:
        """Takes `count` free blocks, each with a reference count of 1, and calls `evict` for each block that could be
        hit. Raises OutOfBlocksError and then changes nothing."""
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks requested, {len(self._free)} of {self.num_blocks} are free")
        blocks = self._free.pop(count)
        for block in blocks:
            content = self._hashes[block]
            if content is not None:
                del self._by_hash[content]
                self._hashes[block] = None
                if block in self._found:
                    self._note_changes((block,))
                if self.log is not None:
                    self.log.removed(content)
                if evict is not None:
                    evict(block, content)
            self._ref_counts[block] = 1
        return blocks

    def free(self, *tables: Sequence[BlockId]) -> None:
        """Drops one reference of each block of the tables. Each table is in logical order; the first is freed first."""
        self.num_releases += 1
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
        self._note_changes(cached)
        self._free.extend_first(unnamed)
        self._free.extend(cached)

    def hits(self, hashes: Iterable[BlockHash]) -> list[BlockId]:
        """The blocks sealed under the first of these hashes, up to the first hash that is not in the pool."""
        blocks: list[BlockId] = []
        find = self._by_hash.get
        for each in hashes:
            block = find(each)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def extend(self, start: CachedStart, blocks: list[BlockId], version: int) -> None:
        """Extends the start by these cached blocks."""
        start.version = version
        start.blocks += blocks
        start.num_free += self.num_free_of(blocks)
        self._found.update(blocks)

    def is_current(self, start: CachedStart) -> bool:
        """Whether all blocks can still be hit, and still have holders, or have none, as when they were found. Costs
        O(1) if no block of any CachedStart changed since the last call."""
        if start.pool is not self or start.num_changes < self._num_forgotten:
            return False
        if start.num_changes < self.num_changes:
            recent = self._changes[start.num_changes - self._num_forgotten :]
            if not set(recent).isdisjoint(start.blocks):
                return False
            start.num_changes = self.num_changes
        return True

    def _note_changes(self, blocks: Iterable[BlockId]) -> None:
        if not self._found:
            return
        changed = self._found.intersection(blocks)
        self._found -= changed
        self._changes += changed
        if len(self._changes) > _MAX_CHANGES:
            self._num_forgotten += len(self._changes)
            self._changes.clear()

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each block; blocks that had no holder are no longer free."""
        counts, hashes = self._ref_counts, self._hashes
        free: list[BlockId] = []
        for block in blocks:
            count = counts[block]
            counts[block] = count + 1
            if count == 0:
                free.append(block)
        if free:
            self._free.remove(free)
            self._note_changes(free)
            self._num_held_sealed += sum(hashes[block] is not None for block in free)

    def seal(self, block: BlockId, content: BlockHash) -> bool:
        """Names the final content of a held block. Returns False if another block with the same content has the name
        already; lookups keep finding that block."""
        assert self._ref_counts[block] > 0, f"block {block} is sealed while no table holds it"
        if self._hashes[block] is not None or content in self._by_hash:
            return False
        self._hashes[block] = content
        self._by_hash[content] = block
        self._num_held_sealed += 1
        return True

    def restore(self, block: BlockId, content: BlockHash) -> None:
        """Names the content of a free block that an earlier scheduler sealed."""
        if self._ref_counts[block] or self._hashes[block] is not None or content in self._by_hash:
            return
        self._hashes[block] = content
        self._by_hash[content] = block
        self._free.remove([block])
        self._free.extend([block])
        if self.log is not None:
            self.log.restored(content)

    def sealed_hashes(self) -> list[BlockHash]:
        """The names of all blocks that can be hit."""
        return list(self._by_hash)

    def rename(self, content: BlockHash, name: BlockHash) -> None:
        """Gives a sealed block's content another name, if there is such a block and the name is free."""
        if name not in self._by_hash and (block := self._by_hash.pop(content, None)) is not None:
            self._by_hash[name] = block
            self._hashes[block] = name
            self._note_changes((block,))

    def free_blocks(self) -> tuple[BlockId, ...]:
        """The free blocks in the order in which they will be handed out."""
        return tuple(self._free)
