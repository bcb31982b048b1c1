"""What GetState and InspectBlocks answer: a snapshot between two operations of the core.

Lists of blocks are copied at once, and made messages of some at a time: a pool of 30,000 blocks would hold up the event
loop, and with it the steps, for tens of milliseconds.
"""

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.block_pool import BlockHash, BlockId, BlockPool
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.service.step_loop import StepLoop

_STATUSES = {
    SequenceStatus.WAITING: scheduler_pb2.SEQUENCE_STATUS_WAITING,
    SequenceStatus.RUNNING: scheduler_pb2.SEQUENCE_STATUS_RUNNING,
    SequenceStatus.SWAPPED: scheduler_pb2.SEQUENCE_STATUS_SWAPPED,
}


_BLOCKS_AT_ONCE = 1024
"""Blocks that are made messages of before the loop goes on: about a millisecond."""


async def state_message(
    loop: StepLoop, *, include_sequences: bool, num_gateways: int
) -> scheduler_pb2.GetStateResponse:
    """Counters and, where asked, every live sequence with its block table."""
    message = scheduler_pb2.GetStateResponse(
        scheduler_epoch=loop.epoch,
        draining=loop.is_draining,
        connected_gateways=num_gateways,
        workers=_worker_messages(loop),
    )
    scheduler = loop.scheduler
    if scheduler is None:
        return message
    message.last_step_id = scheduler.last_step_id
    message.steps = scheduler.num_steps
    message.preemptions = scheduler.num_preemptions
    message.waiting_requests = len(scheduler.waiting)
    message.running_requests = len(scheduler.running)
    message.swapped_requests = len(scheduler.swapped)
    message.waiting_tokens = scheduler.waiting.num_tokens
    message.gpu_pool.CopyFrom(_pool_message(scheduler.batch.blocks.pool, scheduler.pins.num_pinned))
    message.host_pool.CopyFrom(_pool_message(scheduler.swap_space.pool))
    if include_sequences:
        sequences = (sequence for group in scheduler.groups() for sequence in group.unfinished)
        await _add_sequences(message, [_Snapshot.of(scheduler, sequence) for sequence in sequences])
    return message


async def blocks_message(loop: StepLoop, request_id: str | None) -> scheduler_pb2.InspectBlocksResponse:
    """Every block that a live sequence holds, of one request or of all, and those that can still be hit."""
    message = scheduler_pb2.InspectBlocksResponse()
    scheduler = loop.scheduler
    if scheduler is None:
        return message
    pool = scheduler.batch.blocks.pool
    message.gpu_pool.CopyFrom(_pool_message(pool, scheduler.pins.num_pinned))
    message.host_pool.CopyFrom(_pool_message(scheduler.swap_space.pool))
    groups = [each for each in scheduler.groups() if request_id is None or each.request.request_id == request_id]
    snapshots = [_Snapshot.of(scheduler, sequence) for group in groups for sequence in group.unfinished]
    free = pool.free_blocks()
    cached = [
        (block, content) for block, content in zip(free, pool.hashes_of(free), strict=True) if content is not None
    ]
    block_size = scheduler.config.block_size
    await _add_sequences(message, snapshots)
    for start in range(0, len(cached), _BLOCKS_AT_ONCE):
        for block, content in cached[start : start + _BLOCKS_AT_ONCE]:
            message.cached.add(block_id=block, filled=block_size, block_hash=content)
        await asyncio.sleep(0)
    return message


def _worker_messages(loop: StepLoop) -> list[scheduler_pb2.WorkerState]:
    """In order of rank. They are attached together or not at all, and have one generation."""
    generation = 0 if loop.replica is None else loop.replica.worker_generation
    return [
        scheduler_pb2.WorkerState(address=address, attached=loop.is_attached, worker_generation=generation)
        for address in loop.worker_addresses
    ]


def _pool_message(pool: BlockPool, num_pinned: int = 0) -> scheduler_pb2.PoolState:
    return scheduler_pb2.PoolState(
        total_blocks=pool.num_blocks,
        free_blocks=pool.num_free - pool.num_cached,
        cached_blocks=pool.num_cached,
        used_blocks=pool.num_used,
        pinned_blocks=num_pinned,
    )


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A sequence, and of each block of its table how many hold it and its hash."""

    state: scheduler_pb2.SequenceState
    num_computed: int
    block_size: int
    blocks: tuple[BlockId, ...]
    ref_counts: list[int]
    hashes: list[BlockHash | None]

    @classmethod
    def of(cls, scheduler: Scheduler, sequence: Sequence) -> "_Snapshot":
        is_swapped = sequence.status is SequenceStatus.SWAPPED
        pool = scheduler.swap_space.pool if is_swapped else scheduler.batch.blocks.pool
        num_computed = scheduler.num_computed_tokens(sequence)
        state = scheduler_pb2.SequenceState(
            request_id=sequence.request.request_id,
            sequence_index=sequence.index,
            status=_STATUSES[sequence.status],
            num_tokens=sequence.num_tokens,
            num_computed_tokens=num_computed,
        )
        table = tuple(sequence.block_table)
        return cls(
            state, num_computed, scheduler.config.block_size, table, pool.ref_counts_of(table), pool.hashes_of(table)
        )

    def block_states(self, first: int, end: int) -> list[scheduler_pb2.BlockState]:
        """Of the blocks with these logical indices."""
        return [
            scheduler_pb2.BlockState(
                block_id=self.blocks[index],
                filled=min(max(self.num_computed - index * self.block_size, 0), self.block_size),
                ref_count=self.ref_counts[index],
                block_hash=self.hashes[index],
            )
            for index in range(first, min(end, len(self.blocks)))
        ]


async def _add_sequences(
    message: scheduler_pb2.GetStateResponse | scheduler_pb2.InspectBlocksResponse, snapshots: Iterable[_Snapshot]
) -> None:
    num_blocks = 0
    for snapshot in snapshots:
        sequence = message.sequences.add()
        sequence.CopyFrom(snapshot.state)
        for first in range(0, len(snapshot.blocks), _BLOCKS_AT_ONCE):
            states = snapshot.block_states(first, first + _BLOCKS_AT_ONCE)
            sequence.block_table.extend(states)
            num_blocks += len(states)
            if num_blocks >= _BLOCKS_AT_ONCE:
                await asyncio.sleep(0)
                num_blocks = 0
