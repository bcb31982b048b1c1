"""Block tables: which physical blocks hold a sequence's tokens (the paper's sections 4.2 and 4.4)."""

import math
from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from scheduler_svc.core.block import BlockHash, BlockId
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.sequence import Sequence

_HASHES_AT_FIRST = 16
"""Blocks at the start of a sequence that are hashed to look for them; more where all of these are cached."""

_MAX_HASHES_AT_ARRIVAL = 5000
"""Blocks of a sequence that are hashed when it comes; those behind them when it is to run. Neither takes long then."""

_MAX_RECLAIMED, _MAX_RECLAIMED_BLOCKS = 256, 4096
"""Sequences that are over, and blocks of them, that are taken back in one call. All rows may end in one step."""


class BlockManager:
    """Gives sequences blocks as their tokens come, never ahead of them, and lets them share what is cached.

    `watermark` is the share of the pool that admission leaves free at the least, so that a newly admitted sequence is
    not preempted at once for want of a block.
    """

    def __init__(self, num_blocks: int, block_size: int, watermark: float) -> None:
        self.block_size = block_size
        self.pool = BlockPool(num_blocks)
        self._watermark_blocks = math.ceil(watermark * num_blocks)
        self._retired: deque[Sequence] = deque()

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def has_room(self, num_blocks: int, *, reserve: int = 0, alone: bool = False) -> bool:
        """Whether a group that takes this many free blocks may start. `reserve` blocks are left free, and no fewer than
        the watermark, unless it would run `alone`, when they protect nobody."""
        return num_blocks + (0 if alone else max(reserve, self._watermark_blocks)) <= self.pool.num_free

    def missing(self, num_blocks: int, *, reserve: int) -> int:
        """How many blocks more must be free before such a group may start beside others."""
        return num_blocks + max(reserve, self._watermark_blocks) - self.pool.num_free

    def allocate(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """Gives sequences without blocks those for all their tokens; returns for each how many tokens it need not
        compute: they are cached, or one of the sequences before it computes them.

        Raises OutOfBlocksError.
        """
        being_computed: dict[BlockHash, BlockId] = {}
        several = len(sequences) > 1
        return [self._allocate_one(sequence, being_computed, several=several) for sequence in sequences]

    def _allocate_one(self, sequence: Sequence, being_computed: dict[BlockHash, BlockId], *, several: bool) -> int:
        assert not sequence.block_table, "the sequence has blocks already"
        shared = self.hits(sequence)
        hashes: list[BlockHash] = []
        if several:
            hashes = self._shareable(sequence)
            for content in hashes[len(shared) :]:
                if content not in being_computed:
                    break
                shared.append(being_computed[content])
        self.pool.touch(shared)
        fresh = self.pool.allocate(self.blocks_for(sequence.num_tokens) - len(shared))
        sequence.block_table = [*shared, *fresh]
        being_computed.update(zip(hashes, sequence.block_table, strict=False))
        return len(shared) * self.block_size

    def blocks_to_allocate(self, sequences: SequenceOf[Sequence]) -> int:
        """Free blocks that `allocate` takes, cached ones included."""
        if len(sequences) == 1:
            hits = self.hits(sequences[0])
            return self.blocks_for(sequences[0].num_tokens) - len(hits) + self.pool.num_free_of(hits)
        known: set[BlockHash] = set()
        needed = 0
        for sequence in sequences:
            hashes = self._shareable(sequence)
            own = self.blocks_for(sequence.num_tokens) - sum(content in known for content in hashes)
            held = sum(
                self.pool.ref_count(block) > 0
                for content, block in zip(hashes, self.pool.hits(hashes), strict=False)
                if content not in known
            )
            needed += own - held
            known.update(hashes)
        return needed

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child, which has no blocks, shares all of the parent's (the paper's section 4.4)."""
        assert not child.block_table, "the child has blocks already"
        self.pool.touch(parent.block_table)
        child.block_table = list(parent.block_table)

    def make_writable(self, sequence: Sequence, index: int) -> tuple[BlockId, BlockId] | None:
        """Copy-on-write of one block of a table: the pair (shared block, the sequence's own copy), or None where the
        sequence holds it alone and writes in place. Raises OutOfBlocksError."""
        shared = sequence.block_table[index]
        if self.pool.ref_count(shared) == 1:
            return None
        (own,) = self.pool.allocate(1)
        self.pool.free([shared])
        sequence.block_table[index] = own
        return shared, own

    def append(self, sequence: Sequence) -> BlockId:
        """Adds one block to the end of a sequence's table. Raises OutOfBlocksError."""
        (block,) = self.pool.allocate(1)
        sequence.block_table.append(block)
        return block

    def seal(self, sequence: Sequence, first: int, end: int) -> list[tuple[BlockId, BlockHash]]:
        """Seals the blocks with logical indices from `first` to before `end`, all of them full; returns those that can
        be hit from now on."""
        hashes = sequence.prefix_hashes.between(first, end, sequence.token_ids)
        pairs = zip(sequence.block_table[first:end], hashes, strict=True)
        return [(block, content) for block, content in pairs if self.pool.seal(block, content)]

    def still_sealed(self, sealed: Iterable[tuple[BlockId, BlockHash]]) -> list[tuple[BlockId, BlockHash]]:
        """Those of `sealed` that were not let go of and handed out anew since, to be filled with something else."""
        return [(block, content) for block, content in sealed if self.pool.hash_of(block) == content]

    def free(self, *sequences: Sequence) -> None:
        """Takes all blocks of the sequences back, of one after the other."""
        self.pool.free(*(sequence.block_table for sequence in sequences))
        for sequence in sequences:
            sequence.block_table = []

    def retire(self, sequences: Iterable[Sequence]) -> None:
        """The same for sequences that are over, of which many may come at once: takes the blocks of some back now, and
        leaves the others to `reclaim`."""
        self._retired.extend(sequences)
        self.reclaim()

    def reclaim(self) -> bool:
        """Takes back the blocks of some sequences that were retired, oldest first: no more than takes long, and at
        least those of one. Returns whether there were any."""
        sequences: list[Sequence] = []
        num_blocks = 0
        while self._retired and num_blocks < _MAX_RECLAIMED_BLOCKS and len(sequences) < _MAX_RECLAIMED:
            sequences.append(self._retired.popleft())
            num_blocks += len(sequences[-1].block_table)
        if sequences:
            self.free(*sequences)
        return bool(sequences)

    @property
    def retired_tables(self) -> list[list[BlockId]]:
        """Blocks of sequences that are over, which will be free soon."""
        return [sequence.block_table for sequence in self._retired]

    def hits(self, sequence: Sequence) -> list[BlockId]:
        """The cached blocks that hold the start of the sequence. Hashes little further than there are hits."""
        return self._hits(sequence, self._num_shareable(sequence))

    def _hits(self, sequence: Sequence, max_blocks: int) -> list[BlockId]:
        end = _HASHES_AT_FIRST
        blocks: list[BlockId] = []
        while True:
            start, end = len(blocks), min(end, max_blocks)
            blocks += self.pool.hits(sequence.prefix_hashes.between(start, end, sequence.token_ids))
            if len(blocks) < end or end == max_blocks:
                return blocks
            end *= 4

    def num_cached(self, sequence: Sequence) -> int:
        """Blocks at the start of a sequence that waits which are cached, as far as that is looked up in no long time.
        Called when it comes, it hashes these, so that the step that admits it need not."""
        return len(self._hits(sequence, min(self._num_shareable(sequence), _MAX_HASHES_AT_ARRIVAL)))

    def next_hashes(self, sequence: Sequence, count: int) -> tuple[int, list[BlockHash]]:
        """How many blocks at the start of the sequence are cached, and the hashes of at most `count` blocks after
        those, as far as the sequence may take them from others."""
        start = len(self.hits(sequence))
        end = min(start + count, self._num_shareable(sequence))
        return start, sequence.prefix_hashes.between(start, end, sequence.token_ids)

    def _shareable(self, sequence: Sequence) -> list[BlockHash]:
        """Hashes of the blocks that the sequence may take from others."""
        return sequence.prefix_hashes.first(self._num_shareable(sequence), sequence.token_ids)

    def _num_shareable(self, sequence: Sequence) -> int:
        """Blocks that the sequence may take from others. At least one token is left to compute, so that there are
        logits."""
        return (sequence.num_tokens - 1) // self.block_size if sequence.uses_prefix_cache else 0


class LeavingTables:
    """Counts the blocks that become free if block tables are given back one after the other, but for those `taken`."""

    def __init__(self, pool: BlockPool, taken: Iterable[BlockId]) -> None:
        self._pool = pool
        self._taken = set(taken)
        self._left: Counter[BlockId] = Counter()
        """How many of its holders left, of each block that had several."""

    def leave(self, table: SequenceOf[BlockId]) -> int:
        """Blocks that this table frees, after those before it."""
        pool = self._pool
        freed = alone = pool.num_held_alone(table)
        if self._taken:
            freed -= sum(block in self._taken and pool.ref_count(block) == 1 for block in table)
        if alone < len(table):
            for block in table:
                if pool.ref_count(block) > 1:
                    self._left[block] += 1
                    freed += self._left[block] == pool.ref_count(block) and block not in self._taken
        return freed
