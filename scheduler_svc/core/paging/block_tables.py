"""Block tables: blocks for tokens as they come, copy-on-write, and swapping (the paper's sections 4.2 to 4.5)."""

import math
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Generic

from scheduler_svc.core.paging.block_pool import BlockId, BlockPool
from scheduler_svc.core.paging.sequence import S


@dataclass(frozen=True, slots=True)
class BlockTableLayout:
    """The entries of a block table, for the groups into which the layers of a model are cut. A block has `block_size`
    tokens of the layers of one group. For each `block_size` tokens a table has `num_full` entries of groups whose
    layers read all tokens before a token, then `num_windowed` of groups whose layers read the last `window`."""

    block_size: int
    num_full: int = 1
    num_windowed: int = 0
    window: int = 0

    @property
    def num_groups(self) -> int:
        return self.num_full + self.num_windowed

    def table_length(self, num_tokens: int) -> int:
        """Entries of a table for this many tokens."""
        return -(-num_tokens // self.block_size) * self.num_groups

    def first_block_read(self, position: int) -> int:
        """The first logical block that windowed layers read for the token at this position."""
        return max(position - self.window + 1, 0) // self.block_size

    def hit_length(self, num_blocks: int, has_windowed: Callable[[int], bool]) -> int:
        """Blocks at the start of a sequence that need no computation, for all groups. The full groups have the first
        `num_blocks`, and `has_windowed` says of each of these whether the windowed groups have it."""
        end, index = num_blocks, num_blocks - 1
        while self.num_windowed and index >= self.first_block_read(end * self.block_size):
            end = end if has_windowed(index) else index
            index -= 1
        return end


class HostBlocks:
    """Host memory below the pool, and the copies of the next step: first to the host, then back, before it writes."""

    def __init__(self, pool: BlockPool) -> None:
        self.pool = pool
        self.saving: dict[BlockId, BlockId] = {}  # pool block by host block
        self.loading: list[tuple[BlockId, BlockId]] = []  # host block, held until the step is planned, and pool block

    @property
    def has_copies(self) -> bool:
        return bool(self.saving or self.loading)

    def load(self, host: BlockId, block: BlockId) -> None:
        """Copies a block to the pool. The caller may free the host block from now on."""
        self.pool.touch((host,))
        self.loading.append((host, block))

    def take_copies(self) -> tuple[list[tuple[BlockId, BlockId]], list[tuple[BlockId, BlockId]]]:
        """The copies of a finished step: pairs (pool block, host block), and pairs (host block, pool block)."""
        out, back = [(block, host) for host, block in self.saving.items()], self.loading
        self.pool.free([host for host, _ in back])  # the first blocks of a prefix count as the most recently used
        self.saving, self.loading = {}, []
        return out, back


class BlockTables(Generic[S]):
    """Allocates blocks to sequences as their tokens come, never earlier, and lets forks share them. `watermark` is the
    share of the pool that admission leaves free, so that a newly admitted sequence is not preempted at once."""

    def __init__(self, pool: BlockPool, host: HostBlocks, layout: BlockTableLayout, watermark: float) -> None:
        self.pool = pool
        self.host = host
        self.layout = layout
        self.block_size, self.num_groups = layout.block_size, layout.num_groups
        self._unread: dict[BlockId, BlockId] = {}  # entries of tables that no layer reads, by their host blocks
        self.watermark_blocks = math.ceil(watermark * pool.num_blocks)

    def has_room(self, num_blocks: int, *, reserve: int, others_run: bool) -> bool:
        """Whether a group may take these free blocks, and leave `reserve`, or the watermark, if `others_run`."""
        return num_blocks + (max(reserve, self.watermark_blocks) if others_run else 0) <= self.pool.num_free

    def cached(self, sequence: S) -> list[BlockId]:
        """The blocks of the pool that have the content of the sequence's first blocks."""
        return []

    def reuse(self, sequence: S, blocks: list[BlockId]) -> None:
        """Adds a reference to each of these cached blocks of the sequence, which enters the batch."""
        self.pool.touch(blocks)

    def more_cached(self, sequence: S, shared: list[BlockId]) -> list[BlockId]:
        """`shared`, and blocks after them that the next step fills with the sequence's content from elsewhere."""
        return shared

    def take(self, count: int) -> list[BlockId]:
        """Takes blocks that the next step, or a later one, writes."""
        return self.pool.allocate(count)

    def save(self, block: BlockId) -> BlockId:
        """Copies a block to the host. Returns the host block, with a reference."""
        (host,) = self.host.pool.allocate(1)
        self.host.saving[host] = block
        return host

    def blocks_to_allocate(self, sequences: SequenceOf[S]) -> int:
        """Free blocks that `allocate_slots` takes."""
        return sum(self.num_new(0, sequence) for sequence in sequences)

    def allocate_slots(self, sequences: SequenceOf[S]) -> list[tuple[int, int]]:
        """Gives sequences blocks. Returns for each its first tokens that are computed, and its first cached blocks."""
        return [self._allocate_one(sequence, self.cached(sequence)) for sequence in sequences]

    def _allocate_one(self, sequence: S, shared: list[BlockId]) -> tuple[int, int]:
        assert not sequence.block_table, "the sequence has blocks already"
        self.reuse(sequence, shared)
        shared = self.more_cached(sequence, shared)
        sequence.block_table = self.extended(shared, sequence)
        return len(shared) // self.num_groups * self.block_size, len(shared) // self.num_groups

    def num_new(self, num_entries: int, sequence: S) -> int:
        """Blocks that a table of this many entries takes for all tokens of the sequence."""
        return self.layout.table_length(sequence.num_tokens) - num_entries

    def extended(self, table: list[BlockId], sequence: S) -> list[BlockId]:
        """The table with new blocks for all further tokens of the sequence."""
        return [*table, *self.take(self.num_new(len(table), sequence))]

    def fork(self, parent: S, child: S) -> None:
        """The child, which has no blocks, shares all of the parent's (the paper's section 4.4)."""
        assert not child.block_table, "the child has blocks already"
        self.pool.touch(parent.block_table)
        child.block_table = list(parent.block_table)

    def make_writable(self, sequence: S, index: int) -> tuple[BlockId, BlockId] | None:
        """Copy-on-write of one block of a table. Returns the pair (shared block, own copy), or None if no other
        sequence holds the block: then it is written in place."""
        shared = sequence.block_table[index]
        if self.pool.ref_count(shared) == 1:
            return None
        (own,) = self.take(1)
        self.pool.free([shared])
        sequence.block_table[index] = own
        return shared, own

    def free(self, *sequences: S) -> None:
        """Frees all blocks of the sequences, one sequence after the other."""
        self.pool.free(*(sequence.block_table for sequence in sequences))
        for sequence in sequences:
            sequence.block_table = []

    def retire(self, sequences: SequenceOf[S]) -> None:
        """`free` for finished sequences. An implementation may free some of them later."""
        self.free(*sequences)

    def can_swap_out(self, sequences: SequenceOf[S]) -> bool:
        """Whether the host pool has room for the tokens in `num_swapped_tokens` of each sequence."""
        kept = {block for each in sequences for block in self._kept(each)}
        return len(kept.difference(self._unread.values())) <= self.host.pool.num_free

    def swap_out(self, sequences: SequenceOf[S]) -> None:
        """Moves the sequences' first `num_swapped_tokens` tokens to host blocks, each shared block once."""
        host_of = {block: host for host, block in self._unread.items()}
        for sequence in sequences:
            kept = self._kept(sequence)
            self.host.pool.touch([host_of[block] for block in kept if block in host_of])
            for block in kept:
                if block not in host_of:
                    host_of[block] = self.save(block)
            self.free(sequence)
            sequence.block_table = [host_of[block] for block in kept]

    def blocks_to_swap_in(self, sequences: SequenceOf[S]) -> int:
        """Free blocks that `swap_in` takes, and blocks that the sequences then copy before they write again."""
        num_new, hits = 0, set[BlockId]()
        holders, writers = Counter[BlockId](), Counter[BlockId]()
        for sequence in sequences:
            cached = self.cached(sequence)
            from_host = sequence.block_table[len(cached) :]
            num_new += self.num_new(len(cached) + len(from_host), sequence)
            hits.update(cached)
            holders.update(block for block in from_host if block not in self._unread)
            tail = max(sequence.num_swapped_tokens // self.block_size * self.num_groups - len(cached), 0)
            writers.update(from_host[tail : tail + self.num_groups])
        # The last holder of a block writes in place.
        num_copies = sum(min(count, holders[block] - 1) for block, count in writers.items())
        return self.pool.num_free_of([*hits]) + len(holders) + num_new + num_copies

    def swap_in(self, sequences: SequenceOf[S]) -> list[tuple[int, int]]:
        """Gives the sequences GPU blocks for all their tokens. Returns as `allocate_slots` does."""
        hits = [self.cached(sequence) for sequence in sequences]
        for sequence, cached in zip(sequences, hits, strict=True):
            self.reuse(sequence, cached)
        gpu_of = dict(self._unread)
        starts: list[tuple[int, int]] = []
        for sequence, cached in zip(sequences, hits, strict=True):
            from_host = sequence.block_table[len(cached) :]
            self.pool.touch([gpu_of[block] for block in from_host if block in gpu_of])
            moved = [block for block in from_host if block not in gpu_of]
            for host, block in zip(moved, self.take(len(moved)), strict=True):
                self.host.load(host, block)
                gpu_of[host] = block
            self.free_swapped(sequence)
            known = [*cached, *(gpu_of[block] for block in from_host)]
            sequence.block_table = self.extended(known, sequence)
            num_cached = len(cached) // self.num_groups
            starts.append((max(sequence.num_swapped_tokens, num_cached * self.block_size), num_cached))
        return starts

    def free_swapped(self, sequence: S) -> None:
        """Frees the host blocks of a sequence."""
        self.host.pool.free(sequence.block_table)
        sequence.block_table = []

    def _kept(self, sequence: S) -> list[BlockId]:
        return sequence.block_table[: self.layout.table_length(sequence.num_swapped_tokens)]
