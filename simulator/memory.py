"""What the pool of blocks holds at a step, and what kept the next request out of it."""

import enum
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Slots of the pool by what they are for; what is left of `total` is free.

    tokens    hold the keys and values of a token that is computed, or will be by a step in flight
    reserved  belong to a sequence and will hold one of its tokens
    wasted    belong to a sequence and never will
    shared    slots that sharing saves: of every block that several sequences hold, all but one of these holds
    cached    free blocks that can still be hit
    """

    total: int
    tokens: int
    reserved: int
    wasted: int
    shared: int
    cached: int


def paged_memory(scheduler: Scheduler) -> MemoryUse:
    """Of `BlockManager`: blocks come with their tokens, so only the newest block of a sequence has empty slots.

    A tail that several sequences share is counted as one of them sees it.
    """
    rows, pool, size = scheduler.batch.rows, scheduler.batch.blocks.pool, scheduler.config.block_size
    active = rows.active
    num_slots, num_computed = rows.num_slots[active], rows.num_computed[active]
    held = int(num_slots.sum())
    physical = (pool.num_used - sum(map(len, scheduler.batch.blocks.retired_tables))) * size
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
    """No request waits: the device itself is what the others wait for, if any does."""
    BLOCKS = "blocks"
    ROWS = "rows"
    TOKENS = "tokens"
    """The budget of the step's tokens is spent."""
    PREFIX = "prefix"
    """All that wait are held until the blocks that they share are computed."""


def limit_of(scheduler: Scheduler, plan: StepPlan) -> Limit:
    """What limited the step that was just planned."""
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
