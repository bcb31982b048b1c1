"""The prefix cache of a pool and of the host: blocks by the hash of their content (the paper's section 4.4).

A block whose content is final is **sealed** under its hash. When no table holds it any more, it can be found by that
hash until it is handed out anew.

Two sequences that agree on a hash agree on everything up to the end of that block (`quire.messages.prefix_hashes`), so
they can share the block. Hashes are computed here and never taken from others.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from quire.messages.prefix_hashes import BlockHash, PrefixHash, hash_chain, in_group, pack
from scheduler_svc.core.cache_log import CacheLog
from scheduler_svc.core.moves import MoveCounts
from scheduler_svc.core.paging.block_pool import BlockId, BlockPool
from scheduler_svc.core.paging.block_tables import BlockTableLayout, HostBlocks


class PrefixHashes:
    """The hashes of a sequence's full blocks, each computed once, on first use."""

    def __init__(self, root: PrefixHash, block_size: int) -> None:
        """`root` is the `root_hash` of the sequence's tenant and adapter."""
        self._hashes: list[PrefixHash] = []
        self._parent = root
        self.block_size = block_size

    def first(self, count: int, token_ids: Sequence[int]) -> list[PrefixHash]:
        """The hashes of the first `count` blocks. `token_ids` fills all of them."""
        return self.between(0, count, token_ids)

    def between(self, first: int, end: int, token_ids: Sequence[int]) -> list[PrefixHash]:
        """The hashes of the blocks from `first` to before `end`. `token_ids` fills all of them."""
        if end > len(self._hashes):
            self._compute(end, token_ids)
        return self._hashes[first:end]

    def _compute(self, count: int, token_ids: Sequence[int]) -> None:
        known = len(self._hashes)
        packed = pack(token_ids[known * self.block_size : count * self.block_size])
        assert len(packed) == 4 * (count - known) * self.block_size, "only full blocks have a hash"
        self._hashes += hash_chain(self._parent, packed, 4 * self.block_size)
        self._parent = self._hashes[-1]

    def copy(self) -> "PrefixHashes":
        """A copy for a forked sequence: the same hashes so far, and independent from here on."""
        twin = object.__new__(PrefixHashes)
        twin._hashes = list(self._hashes)
        twin._parent, twin.block_size = self._parent, self.block_size
        return twin


class BlockNames:
    """Names of a prefix's last blocks in each group of layers, and of the checkpoint behind it."""

    def __init__(self, layout: BlockTableLayout, state_blocks: int = 0) -> None:
        self._layout = layout
        self._state_blocks = state_blocks

    @property
    def of_state(self) -> range:
        """The blocks of a state, as further groups."""
        return range(self._layout.num_groups, self._layout.num_groups + self._state_blocks)

    def full(self, prefix: PrefixHash) -> list[BlockHash]:
        return [in_group(prefix, group) for group in range(self._layout.num_full)]

    def windowed(self, prefix: PrefixHash) -> list[BlockHash]:
        return [in_group(prefix, group) for group in range(self._layout.num_full, self._layout.num_groups)]

    def state(self, prefix: PrefixHash) -> list[BlockHash]:
        """The blocks of the checkpoint behind these tokens."""
        return [in_group(prefix, group) for group in self.of_state]

    def needed(self, hashes: Sequence[PrefixHash], start: int, num_spare: int = 0) -> Iterator[BlockHash | None]:
        """The names of the entries of a table, for blocks with these hashes and logical indices from `start`, if the
        next token is the first behind them, or begins one of the last `num_spare`; None for entries that no layer
        reads."""
        first = self._layout.first_block_read((start + len(hashes) - num_spare) * self._layout.block_size)
        for index, prefix in enumerate(hashes, start):
            yield from self.full(prefix)
            names = self.windowed(prefix)
            yield from names if index >= first else [None] * len(names)


_MAX_CHANGES = 1 << 16
"""Changes that a pool remembers."""


@dataclass(slots=True, eq=False)
class CachedStart:
    """The cached blocks found so far at the start of a waiting sequence. It holds no references:
    `PrefixIndex.is_current` says whether all of it is still true.

    Attributes:
        version: Changes whenever blocks are found.
        num_changes: `PrefixIndex.num_changes` when it was last known to be true.
        full: With windowed groups or states: the blocks of the full groups, `num_found` of each.
        blocks: The blocks of all groups, in the order of the sequence's table.
        checkpoint: The blocks of the state after these.
        num_free: The number of `blocks` and of `checkpoint` that have no holder.
        num_seals: `PrefixIndex.num_seals` when `blocks` were last found among `full`; None before.
    """

    pool: "PrefixIndex"
    version: int
    num_changes: int
    full: list[BlockId] = field(default_factory=list[BlockId])
    blocks: list[BlockId] = field(default_factory=list[BlockId])
    checkpoint: list[BlockId] = field(default_factory=list[BlockId])
    num_free: int = 0
    num_found: int = 0
    num_seals: int | None = None

    @property
    def all_blocks(self) -> list[BlockId]:
        return [*self.blocks, *self.checkpoint]


class PrefixIndex(BlockPool):
    """A pool whose sealed blocks are found by their content. Hands out the least recently used blocks first.

    Blocks without a hash go before all blocks that can still be hit. When several blocks are freed together, the one
    deepest in its prefix goes first: a prefix without its end is useful, an end without its prefix is not.

    Attributes:
        log: Records which blocks leave the prefix cache; None if no process reads it.
    """

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.log: CacheLog | None = None
        self.num_releases = 0
        """Number of times that references were dropped so far."""
        self._num_blank = 0
        self.num_seals = 0
        """Number of times that a block got a hash so far."""
        # Blocks without a holder that can still be hit, least recently used first. The pool has the other free blocks.
        self._cached: OrderedDict[BlockId, None] = OrderedDict()
        self._hashes: list[BlockHash | None] = [None] * num_blocks
        self._by_hash: dict[BlockHash, BlockId] = {}
        # Blocks that a CachedStart may have, and changed ones: such blocks that got their first holder, lost their last
        # holder or cannot be hit any more, each once until it is found again.
        self._found: set[BlockId] = set()
        self._changes: list[BlockId] = []
        self._num_forgotten = 0

    @property
    def num_changes(self) -> int:
        """Number of changes so far of blocks that a CachedStart has."""
        return self._num_forgotten + len(self._changes)

    @property
    def num_cached(self) -> int:
        """The number of blocks without a holder that can still be hit."""
        return len(self._cached)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that hold something for a holder."""
        return self.num_blocks - self.num_free - self._num_blank

    def take_blank(self) -> BlockId:
        """Takes a block for good, which stands in tables for blocks that no layer reads."""
        self._num_blank += 1
        return self.allocate(1)[0]

    def ref_counts_of(self, blocks: Sequence[BlockId]) -> list[int]:
        return [self._ref_counts[block] for block in blocks]

    def free_blocks(self) -> tuple[BlockId, ...]:
        """The free blocks in the order in which they will be handed out."""
        return (*reversed(self._free), *self._cached)

    def hash_of(self, block: BlockId) -> BlockHash | None:
        """The hash under which the block is sealed."""
        return self._hashes[block]

    def hashes_of(self, blocks: Sequence[BlockId]) -> list[BlockHash | None]:
        return [self._hashes[block] for block in blocks]

    def names(self, first: int, end: int) -> list[BlockHash | None]:
        """`hash_of` of the blocks from `first` to before `end`, or to the last block."""
        return self._hashes[first:end]

    def allocate(self, count: int, evict: Callable[[BlockId, BlockHash], None] | None = None) -> list[BlockId]:
        """Takes `count` free blocks, each with a reference count of 1, and calls `evict` for each block that could be
        hit. Raises OutOfBlocksError and then changes nothing."""
        num_evicted = max(count - len(self._free), 0)
        if num_evicted <= len(self._cached):
            evicted = [self._cached.popitem(last=False)[0] for _ in range(num_evicted)]
            for block in evicted:
                self._forget(block, evict)
            self._free[:0] = reversed(evicted)
        return super().allocate(count)

    def _forget(self, block: BlockId, evict: Callable[[BlockId, BlockHash], None] | None) -> None:
        content, self._hashes[block] = self._hashes[block], None
        assert content is not None
        del self._by_hash[content]
        if block in self._found:
            self._record_changes((block,))
        if self.log is not None:
            self.log.removed(content)
        if evict is not None:
            evict(block, content)

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Adds one reference to each block; cached blocks that had no holder are no longer free."""
        counts, changed = self._ref_counts, list[BlockId]()
        for block in blocks:
            count = counts[block]
            counts[block] = count + 1
            if count == 0:
                del self._cached[block]
                changed.append(block)
        self._record_changes(changed)

    def free(self, *tables: Sequence[BlockId]) -> None:
        self.num_releases += 1
        super().free(*tables)

    def _give_back(self, blocks: list[BlockId]) -> None:
        hashes = self._hashes
        if cached := [block for block in blocks if hashes[block] is not None]:
            blocks = [block for block in blocks if hashes[block] is None]
            self._cached.update(dict.fromkeys(cached))
            self._record_changes(cached)
        super()._give_back(blocks)

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

    def extend(self, start: CachedStart, blocks: list[BlockId], found: list[BlockId], version: int) -> None:
        """Extends `blocks`, which are a part of the start, by these cached blocks."""
        start.version = version
        blocks += found
        if blocks is not start.full:
            start.num_free += self.num_free_of(found)
        self._found.update(found)

    def is_current(self, start: CachedStart) -> bool:
        """Whether all blocks can still be hit, and still have holders, or have none, as when they were found. Costs
        O(1) if no block of any CachedStart changed since the last call."""
        if start.pool is not self or start.num_changes < self._num_forgotten:
            return False
        if start.num_changes < self.num_changes:
            # Most waiting sequences have found nothing.
            found = start.blocks or start.full or start.checkpoint
            recent = set(self._changes[start.num_changes - self._num_forgotten :] if found else ())
            if not all(map(recent.isdisjoint, (start.blocks, start.full, start.checkpoint))):
                return False
            start.num_changes = self.num_changes
        return True

    def _record_changes(self, blocks: Iterable[BlockId]) -> None:
        if not self._found:
            return
        changed = self._found.intersection(blocks)
        self._found -= changed
        self._changes += changed
        if len(self._changes) > _MAX_CHANGES:
            self._num_forgotten += len(self._changes)
            self._changes.clear()

    def seal(self, block: BlockId, content: BlockHash, *, takes_over: bool = False) -> bool:
        """Names the final content of a held block. Returns False if another block with the same content has the name
        already; lookups keep finding that block. With `takes_over` that block loses the name to this one if no
        table holds it: it was used earlier, so it would be evicted earlier, and the name with it."""
        assert self._ref_counts[block] > 0, f"block {block} is sealed while no table holds it"
        other = self._by_hash.get(content)
        if self._hashes[block] is not None or (other is not None and not (takes_over and other in self._cached)):
            return False
        if other is not None:
            del self._cached[other]
            self._hashes[other] = None
            self._free.append(other)
            if self.log is not None:
                self.log.removed(content)
            self._record_changes((other,))
        self._hashes[block] = content
        self._by_hash[content] = block
        self.num_seals += 1
        return True

    def seal_moved(self, moved: Iterable[tuple[BlockId, BlockHash]]) -> None:
        """Seals held blocks whose content came from elsewhere."""
        for block, content in moved:
            if self.seal(block, content) and self.log is not None:
                self.log.restored(content)

    def still_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> list[tuple[BlockId, BlockHash]]:
        """The blocks of `sealed` that were not freed and allocated for other content since."""
        return [(block, content) for block, content in sealed if self.hash_of(block) == content]

    def restore(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        """Names the contents of free blocks that an earlier scheduler sealed."""
        for block, content in sealed:
            if not (self._ref_counts[block] or self._hashes[block] is not None or content in self._by_hash):
                self._hashes[block] = content
                self._by_hash[content] = block
                self._cached[block] = None
                self.num_seals += 1
                if self.log is not None:
                    self.log.restored(content)
        self._free = [block for block in self._free if self._hashes[block] is None]

    def evict_first(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> None:
        """Makes these sealed blocks the next that are evicted, as long as no sequence holds or uses them."""
        for block, _ in sealed:
            if block in self._cached:
                self._cached.move_to_end(block, last=False)

    def sealed_hashes(self) -> list[BlockHash]:
        """The names of all blocks that can be hit."""
        return list(self._by_hash)

    def rename(self, content: BlockHash, name: BlockHash) -> None:
        """Gives a sealed block's content another name, if there is such a block and the name is free."""
        if name not in self._by_hash and (block := self._by_hash.pop(content, None)) is not None:
            self._by_hash[name] = block
            self._hashes[block] = name
            self.num_seals += 1
            self._record_changes((block,))


class HostMemory(HostBlocks):
    """Host memory below the pool. Swapped groups have their blocks here. If the workers support it, blocks that the
    pool evicts are first copied here and found here by their hashes until others need the room, least recently used
    first. Both kinds are blocks of one `PrefixIndex`: a sealed block of a swapped group can be hit, and a block that is
    here already is not copied again.

    A step first copies blocks to the host, then from the host, and then writes other blocks. So a block that the next
    step copies to the pool is held until that step is planned: nothing may be copied to its place before.

    Attributes:
        caches: Whether it also keeps blocks that the pool evicts. Otherwise it holds only swapped groups.
        log: Records which blocks come and leave; None if no process reads it.
        counts: Counts blocks that were evicted and copied here, and blocks that were hit here.
    """

    def __init__(self, num_blocks: int, counts: MoveCounts, *, caches: bool = False) -> None:
        pool = PrefixIndex(num_blocks)
        super().__init__(pool)
        self.pool: PrefixIndex = pool
        self.caches = caches and num_blocks > 0
        self.log: CacheLog | None = None
        self.counts = counts

    def __contains__(self, content: BlockHash) -> bool:
        return self.find(content) is not None

    def find(self, content: BlockHash) -> BlockId | None:
        """The host block with this content."""
        return next(iter(self.pool.hits((content,))), None)

    def save(self, block: BlockId, content: BlockHash | None) -> BlockId:
        """Copies a block of the pool, unless its content is here already. The content of a sealed block is final.
        Returns the host block, with a reference. Raises OutOfBlocksError."""
        name = content if self.caches else None
        if name is not None and (known := self.find(name)) is not None:
            self.pool.touch((known,))
            return known
        (host,) = self.pool.allocate(1, self._forgotten)
        self.saving[host] = block
        if name is not None:
            self.pool.seal(host, name)
            if self.log is not None:
                self.log.host_changed(name, is_stored=True)
        return host

    def evicted(self, block: BlockId, content: BlockHash) -> None:
        """A sealed block of the pool was handed out; the next step or a later one writes it. Its content stays here as
        the most recently used."""
        if self.pool.num_free or content in self:
            num_out = len(self.saving)
            self.pool.free((self.save(block, content),))
            self.counts.to_host += len(self.saving) - num_out

    def forget_cached(self) -> None:
        """Forgets the blocks that no group holds."""
        self.pool.free(self.pool.allocate(self.pool.num_free, self._forgotten))

    def _forgotten(self, _: BlockId, content: BlockHash) -> None:
        if self.log is not None:
            self.log.host_changed(content, is_stored=False)
