"""The content of the block pool at a step, and the limit that kept the next request out of it."""

import enum
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Slots of the pool by their use; the rest of `total` is free.

    tokens    hold the keys and values of a token that is computed, or will be by a step in flight
    reserved  belong to a sequence and will hold one of its tokens
    wasted    belong to a sequence and never will
    shared    slots that sharing saves: a block that n sequences hold saves n - 1 blocks
    cached    free blocks that can still be hit
    """

    total: int
    tokens: int
    reserved: int
    wasted: int
    shared: int
    cached: int


def paged_memory(scheduler: Scheduler) -> MemoryUse:
    """The use of a `BlockManager`'s pool: blocks come with their tokens, so only a sequence's newest block has empty
    slots.

    A tail that several sequences share is counted as one of them sees it.
    """
    rows, pool, size = scheduler.batch.rows, scheduler.batch.blocks.pool, scheduler.config.block_size
    active = rows.active
    num_slots, num_computed = rows.num_slots[active], rows.num_computed[active]
    held = int(num_slots.sum())
    physical = (pool.num_used - sum(len(each.block_table) for each in scheduler.batch.blocks.retired)) * size
    empty = num_slots - num_computed
    # The last token of a sequence is never computed and takes no slot.
    reserved = int(np.minimum(np.maximum(rows.max_len[active] - 1 - num_computed, 0), empty).sum())
    num_empty = min(int(empty.sum()), physical)
    reserved = min(reserved, num_empty)
    return MemoryUse(
        total=pool.num_blocks * size,
        tokens=physical - num_empty,
        reserved=reserved,
        wasted=num_empty - reserved,
        shared=max(held - physical, 0),
        cached=pool.num_cached * size,
    )


class Limit(enum.Enum):
    """Why a step has no more requests in it."""

    DEMAND = "demand"
    """No request waits. The only limit is the device itself."""
    BLOCKS = "blocks"
    ROWS = "rows"
    TOKENS = "tokens"
    """The step's token budget is spent."""
    PREFIX = "prefix"
    """All waiting requests are held until the blocks that they share are computed."""


def limit_of(scheduler: Scheduler, plan: StepPlan) -> Limit:
    """The limit of the step that was just planned."""
    queues = [queue for queue in (scheduler.swapped, scheduler.waiting) if len(queue)]
    if not queues:
        return Limit.DEMAND
    if plan.num_tokens >= scheduler.config.max_num_batched_tokens:
        return Limit.TOKENS
    following = [queue.first() for queue in queues if queue.has_next]
    if not following:
        return Limit.PREFIX
    if len(following[0].unfinished) > scheduler.batch.rows.num_free:
        return Limit.ROWS
    return Limit.BLOCKS
