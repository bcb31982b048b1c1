"""What GetState answers: a snapshot between two operations of the core."""

from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.block_pool import BlockPool
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import Sequence, SequenceStatus
from scheduler_svc.service.step_loop import StepLoop

_STATUSES = {
    SequenceStatus.WAITING: scheduler_pb2.SEQUENCE_STATUS_WAITING,
    SequenceStatus.RUNNING: scheduler_pb2.SEQUENCE_STATUS_RUNNING,
    SequenceStatus.SWAPPED: scheduler_pb2.SEQUENCE_STATUS_SWAPPED,
}


def state_message(
    loop: StepLoop, *, include_sequences: bool, draining: bool, num_gateways: int
) -> scheduler_pb2.GetStateResponse:
    """Counters and, where asked, every live sequence with its block table."""
    message = scheduler_pb2.GetStateResponse(
        scheduler_epoch=loop.epoch,
        draining=draining,
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
    message.gpu_pool.CopyFrom(_pool_message(scheduler.blocks.pool, scheduler.pins.num_pinned))
    message.host_pool.CopyFrom(_pool_message(scheduler.swap_space.pool))
    if include_sequences:
        sequences = (sequence for group in scheduler.groups() for sequence in group.unfinished)
        message.sequences.extend(_sequence_message(scheduler, sequence) for sequence in sequences)
    return message


def blocks_message(loop: StepLoop, request_id: str | None) -> scheduler_pb2.InspectBlocksResponse:
    """Every block that a live sequence holds, of one request or of all, and those that can still be hit."""
    message = scheduler_pb2.InspectBlocksResponse()
    scheduler = loop.scheduler
    if scheduler is None:
        return message
    pool = scheduler.blocks.pool
    message.gpu_pool.CopyFrom(_pool_message(pool, scheduler.pins.num_pinned))
    message.host_pool.CopyFrom(_pool_message(scheduler.swap_space.pool))
    for group in scheduler.groups():
        if request_id is None or group.request.request_id == request_id:
            message.sequences.extend(_sequence_message(scheduler, sequence) for sequence in group.unfinished)
    for block in pool.free_blocks():
        if (content := pool.hash_of(block)) is not None:
            message.cached.add(block_id=block, filled=scheduler.config.block_size, block_hash=content)
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


def _sequence_message(scheduler: Scheduler, sequence: Sequence) -> scheduler_pb2.SequenceState:
    is_swapped = sequence.status is SequenceStatus.SWAPPED
    pool = scheduler.swap_space.pool if is_swapped else scheduler.blocks.pool
    num_computed = scheduler.num_computed_tokens(sequence)
    block_size = scheduler.config.block_size
    message = scheduler_pb2.SequenceState(
        request_id=sequence.request.request_id,
        sequence_index=sequence.index,
        status=_STATUSES[sequence.status],
        num_tokens=sequence.num_tokens,
        num_computed_tokens=num_computed,
    )
    for index, block in enumerate(sequence.block_table):
        filled = min(max(num_computed - index * block_size, 0), block_size)
        state = message.block_table.add(block_id=block, filled=filled, ref_count=pool.ref_count(block))
        if (content := pool.hash_of(block)) is not None:
            state.block_hash = content
    return message
