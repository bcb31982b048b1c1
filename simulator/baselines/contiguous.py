"""Block managers that keep each sequence in one contiguous region, reserved when its request is admitted: Orca and
FasterTransformer as in the paper's section 6.1.

The scheduler above it is the real one and batches by iteration, as Orca does. Only this module's answers differ: the
memory that a request takes, and that nothing is shared. A request is never preempted, since its maximum memory is
reserved. Only the policy "first come, first served" is supported: other policies count victims in blocks that several
tables may hold, which do not exist here.
"""

import enum
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, replace

from quire.messages.prefix_hashes import BlockHash, PrefixHash
from scheduler_svc.core.config import PolicyKind, SchedulerConfig
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.request import Request, RequestKey
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence
from simulator.baselines.buddy import BuddyAllocator, next_power_of_two
from simulator.memory import MemoryUse


class Reservation(enum.Enum):
    """The number of slots that a sequence gets (the paper's section 6.1)."""

    MAX = "max"
    """The model's maximum number of tokens: nothing is known of the output."""
    POW2 = "pow2"
    """For the output, the next power of two of its true length: at most twice its need."""
    ORACLE = "oracle"
    """Exactly the need: the true length is known."""

    def slots(self, prompt: int, output: int, longest: int) -> int:
        """Slots for a sequence with these lengths in tokens, if the model takes `longest` tokens."""
        if self is Reservation.MAX:
            return longest
        if self is Reservation.POW2:
            return min(prompt + next_power_of_two(output), longest)
        return prompt + output


class RegionPool(PrefixIndex):
    """Blocks that are allocated in contiguous regions of power-of-two sizes. No block is ever shared or cached."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self.buddy = BuddyAllocator(num_blocks)

    @property
    def num_free(self) -> int:
        return self.buddy.num_free

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.buddy.num_free

    def ref_count(self, block: BlockId) -> int:
        return 1


@dataclass(slots=True)
class _Regions:
    """A request's number of regions, and the first blocks of the regions that none of its sequences uses now."""

    num: int
    spare: list[BlockId]


class ContiguousBlocks(BlockManager):
    """Gives each sequence a region for its maximum number of tokens, and takes the region back at its end.

    The unit of the allocator is a block, so no region is smaller than one; a block table names the blocks of a region
    in order. `max_model_len` is what Reservation.MAX reserves. A request of several sequences reserves a region for
    each, and a sequence that forks copies its parent: `num_copied_blocks` counts the blocks that were copied since the
    start, to compute their cost.
    """

    reservation: Reservation

    def __init__(self, config: SchedulerConfig) -> None:
        if config.policy is not PolicyKind.FCFS:
            raise ValueError(f"policy is {config.policy.value}; contiguous regions take fcfs only")
        if config.layout.num_groups > 1:
            raise ValueError(f"the layers are in {config.layout.num_groups} groups; contiguous regions take one only")
        super().__init__(replace(config, watermark=0.0))
        self.pool: RegionPool = RegionPool(config.num_blocks)
        self.num_copied_blocks = 0
        self.num_reserved_slots = 0
        """Slots that were requested; a region may be larger."""
        self.num_needed_slots = 0
        """Slots of all sequences that hold a region, once each has its last token."""
        self._max_model_len = config.max_model_len
        self._pieces: dict[BlockId, int] = {}
        """First block -> size, of the regions in use."""
        self._of_request: dict[RequestKey, _Regions] = {}

    def slots_for(self, request: Request) -> int:
        """Slots that each sequence of the request reserves."""
        return self.reservation.slots(len(request.prompt), request.max_tokens, self._max_model_len)

    # Queries of admission

    def blocks_to_allocate(self, sequences: SequenceOf[Sequence]) -> int:
        """Blocks of the regions that the sequences' request takes; more than the pool has if no such regions are free.

        Raises ValueError if they do not fit into the whole pool.
        """
        request = sequences[0].request
        if request.key in self._of_request:
            return 0
        pieces = self._reserve(request)
        if pieces is None:
            if not self._pieces:
                raise ValueError(
                    f"{request.num_sequences} regions of {self.slots_for(request)} slots do not fit into a pool of "
                    f"{self.pool.num_blocks * self.block_size} slots"
                )
            return self.pool.num_blocks + 1
        for piece in pieces:
            self.pool.buddy.free(*piece)
        return sum(size for _, size in pieces)

    def versions(self, sequences: SequenceOf[Sequence]) -> list[int]:
        """Always new: the free regions may have changed."""
        self._num_versions += 1
        return [self._num_versions]

    def has_room(self, num_blocks: int, *, reserve: int, others_run: bool) -> bool:
        """Whether `num_blocks` blocks are free. None need be left: running sequences never outgrow their regions."""
        return num_blocks <= self.pool.num_free

    def _reserve(self, request: Request) -> list[tuple[int, int]] | None:
        """A region for each sequence; None, and no change, if there is no room."""
        pieces: list[tuple[int, int]] = []
        for _ in range(request.num_sequences):
            piece = self.pool.buddy.allocate(self.blocks_for(self.slots_for(request)))
            if piece is None:
                for each in pieces:
                    self.pool.buddy.free(*each)
                return None
            pieces.append(piece)
        return pieces

    # Regions

    def allocate_slots(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, int]]:
        request = sequences[0].request
        if request.key not in self._of_request:
            pieces = self._reserve(request)
            assert pieces is not None, "admission found no room for the request"
            self._of_request[request.key] = _Regions(len(pieces), [BlockId(start) for start, _ in reversed(pieces)])
            self._pieces.update((BlockId(start), size) for start, size in pieces)
            self._count(request, len(pieces))
        for sequence in sequences:
            self._place(sequence)
        return [(0, 0)] * len(sequences)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child moves into a separate region, with a copy of all that the parent has computed."""
        self._place(child)
        self.num_copied_blocks += self.blocks_for(parent.num_tokens)

    def free(self, *sequences: Sequence) -> None:
        """The sequences leave their regions, which stay reserved for other sequences of their requests."""
        for sequence in sequences:
            if sequence.block_table:
                self._of_request[sequence.request.key].spare.append(sequence.block_table[0])
                sequence.block_table = []

    def retire(self, sequences: Iterable[Sequence]) -> None:
        """Ends sequences. Each gives back a region: its own, or a spare one if it has none."""
        for sequence in sequences:
            self.free(sequence)
            key = sequence.request.key
            regions = self._of_request.get(key)
            if regions is None:
                continue
            start = regions.spare.pop()
            self.pool.buddy.free(start, self._pieces.pop(start))
            self._count(sequence.request, -1)
            regions.num -= 1
            if not regions.num:
                del self._of_request[key]

    def _place(self, sequence: Sequence) -> None:
        assert not sequence.block_table, "the sequence has a region already"
        start = self._of_request[sequence.request.key].spare.pop()
        end = start + self.blocks_for(self.slots_for(sequence.request))
        sequence.block_table = [BlockId(block) for block in range(start, end)]

    def _count(self, request: Request, num_regions: int) -> None:
        self.num_reserved_slots += num_regions * self.slots_for(request)
        self.num_needed_slots += num_regions * request.max_len

    # Nothing is shared or cached

    def num_cached(self, sequence: Sequence) -> int:
        return 0

    def next_hashes(self, sequence: Sequence, count: int) -> tuple[int, list[PrefixHash]]:
        return 0, []

    def cache_full_blocks(self, sequence: Sequence, first: int, end: int) -> list[tuple[BlockId, BlockHash]]:
        return []

    def make_writable(self, sequence: Sequence, index: int) -> tuple[BlockId, BlockId] | None:
        return None


class OrcaMax(ContiguousBlocks):
    reservation = Reservation.MAX


class OrcaPow2(ContiguousBlocks):
    reservation = Reservation.POW2


class OrcaOracle(ContiguousBlocks):
    reservation = Reservation.ORACLE


class RequestLevelBatches(ContiguousBlocks):
    """FasterTransformer behind a dynamic batching scheduler, as in the paper's section 6.1: a batch takes as many of
    the requests that came first as there is memory for, each with room for the longest sequence of the model, and is
    computed to its end before the next one. The requests of a batch are answered together.

    Admits requests only to a batch that no step has answered yet, and frees regions only when all of it is over.

    `batches` are the keys of the requests of each batch so far, in the order in which the batches ran.
    """

    reservation = Reservation.MAX

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.batches: list[list[RequestKey]] = []
        self._batch: list[Sequence] = []
        self._over: list[Sequence] = []

    def has_room(self, num_blocks: int, *, reserve: int, others_run: bool) -> bool:
        has_run = any(sequence.num_output_tokens for sequence in self._batch)
        return not has_run and super().has_room(num_blocks, reserve=reserve, others_run=others_run)

    def allocate_slots(self, sequences: SequenceOf[Sequence]) -> list[tuple[int, int]]:
        request = sequences[0].request
        if request.num_sequences > 1:
            raise ValueError(f"a request has {request.num_sequences} sequences; batches take requests of one")
        if not self._batch:
            self.batches.append([])
        self._batch += sequences
        self.batches[-1].append(request.key)
        return super().allocate_slots(sequences)

    def retire(self, sequences: Iterable[Sequence]) -> None:
        self._over += [sequence for sequence in sequences if sequence in self._batch]
        if len(self._over) == len(self._batch):
            over, self._over, self._batch = self._over, [], []
            super().retire(over)


def contiguous_memory(scheduler: Scheduler) -> MemoryUse:
    """The use of the regions. `wasted` are requested slots that are never used (internal fragmentation). Free regions,
    and slots that the allocator adds by rounding up (external fragmentation), count as free."""
    blocks, rows = scheduler.batch.blocks, scheduler.batch.rows
    assert isinstance(blocks, ContiguousBlocks)
    tokens = int(rows.num_computed[rows.active].sum())
    return MemoryUse(
        total=blocks.pool.num_blocks * blocks.block_size,
        tokens=tokens,
        reserved=blocks.num_needed_slots - tokens,
        wasted=blocks.num_reserved_slots - blocks.num_needed_slots,
        shared=0,
        cached=0,
    )
