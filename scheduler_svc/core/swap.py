"""Swapping: blocks of preempted groups move to host memory and back (the paper's section 4.5).

Here is the bookkeeping only; the worker moves the tensors before it runs the step whose plan names the pairs.
"""

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

from scheduler_svc.core.block import BlockId
from scheduler_svc.core.block_manager import BlockManager
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SwappedIn:
    """What came of a swap in: pairs (host block, GPU block), and for each sequence how many of its tokens are computed
    and how many of its first blocks are sealed."""

    pairs: list[tuple[BlockId, BlockId]]
    num_computed: list[int]
    num_sealed: list[int]


@dataclass(frozen=True, slots=True)
class _Way:
    """How one sequence comes back: sealed blocks of the GPU pool first, then those of the host pool, then new ones."""

    hits: list[BlockId]
    from_host: list[BlockId]
    num_new: int


class SwapSpace:
    """The host pool. All sequences of a group move together; a block that several of them share moves once, and they
    share it again when they are back."""

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)

    def can_swap_out(self, sequences: SequenceOf[Sequence], blocks: BlockManager) -> bool:
        """Whether the host pool has room for the tokens in `num_swapped_tokens` of each sequence."""
        return len(_distinct(self._kept(sequence, blocks) for sequence in sequences)) <= self.pool.num_free

    def swap_out(self, sequences: SequenceOf[Sequence], blocks: BlockManager) -> list[tuple[BlockId, BlockId]]:
        """Moves the sequences' first `num_swapped_tokens` tokens to host blocks and frees all their GPU blocks; returns
        pairs (GPU block, host block). Raises OutOfBlocksError."""
        host_of: dict[BlockId, BlockId] = {}
        for sequence in sequences:
            kept = self._kept(sequence, blocks)
            shared = [host_of[block] for block in kept if block in host_of]
            self.pool.touch(shared)
            moved = [block for block in kept if block not in host_of]
            host_of.update(zip(moved, self.pool.allocate(len(moved)), strict=True))
            blocks.free(sequence)
            sequence.block_table = [host_of[block] for block in kept]
        return list(host_of.items())

    def blocks_needed(self, sequences: SequenceOf[Sequence], blocks: BlockManager) -> int:
        """Free blocks of the GPU pool, cached ones included, that `swap_in` takes, and that the sequences then copy
        before they go on writing."""
        ways = [self._way(sequence, blocks) for sequence in sequences]
        free_hits = (block for block in _distinct(way.hits for way in ways) if blocks.pool.ref_count(block) == 0)
        taken = len(_distinct(way.from_host for way in ways)) + sum(way.num_new for way in ways)
        return sum(1 for _ in free_hits) + taken + self._num_copies(ways, sequences, blocks)

    def swap_in(self, sequences: SequenceOf[Sequence], blocks: BlockManager) -> SwappedIn:
        """Gives the sequences GPU blocks for all their tokens. Raises OutOfBlocksError."""
        ways = [self._way(sequence, blocks) for sequence in sequences]
        for way in ways:
            blocks.pool.touch(way.hits)
        gpu_of: dict[BlockId, BlockId] = {}
        for sequence, way in zip(sequences, ways, strict=True):
            blocks.pool.touch([gpu_of[block] for block in way.from_host if block in gpu_of])
            moved = [block for block in way.from_host if block not in gpu_of]
            gpu_of.update(zip(moved, blocks.pool.allocate(len(moved)), strict=True))
            self.free(sequence)
            back = [gpu_of[block] for block in way.from_host]
            sequence.block_table = [*way.hits, *back, *blocks.pool.allocate(way.num_new)]
        return SwappedIn(
            list(gpu_of.items()),
            [self._num_computed(way, sequence, blocks) for way, sequence in zip(ways, sequences, strict=True)],
            [len(way.hits) for way in ways],
        )

    def free(self, sequence: Sequence) -> None:
        """Takes the host blocks of a sequence back."""
        self.pool.free(sequence.block_table)
        sequence.block_table = []

    def _num_copies(self, ways: SequenceOf[_Way], sequences: SequenceOf[Sequence], blocks: BlockManager) -> int:
        """All writers of a shared block copy it but its last holder."""
        holders = Counter(block for way in ways for block in way.from_host)
        writers: Counter[BlockId] = Counter()
        for way, sequence in zip(ways, sequences, strict=True):
            tail = self._num_computed(way, sequence, blocks) // blocks.block_size - len(way.hits)
            writers.update(way.from_host[tail : tail + 1])
        return sum(min(count, holders[block] - 1) for block, count in writers.items())

    def _num_computed(self, way: _Way, sequence: Sequence, blocks: BlockManager) -> int:
        return max(sequence.num_swapped_tokens, len(way.hits) * blocks.block_size)

    def _kept(self, sequence: Sequence, blocks: BlockManager) -> list[BlockId]:
        return sequence.block_table[: blocks.blocks_for(sequence.num_swapped_tokens)]

    def _way(self, sequence: Sequence, blocks: BlockManager) -> _Way:
        hits = blocks.hits(sequence)
        from_host = sequence.block_table[len(hits) :]
        return _Way(hits, from_host, blocks.blocks_for(sequence.num_tokens) - len(hits) - len(from_host))


def _distinct(tables: Iterable[SequenceOf[BlockId]]) -> set[BlockId]:
    return {block for table in tables for block in table}
