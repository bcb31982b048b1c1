"""The content of the block pool at a step, and the limit that kept the next request out of it."""

import enum
from dataclasses import dataclass

import numpy as np

from scheduler_svc.core.paging.batch import Array
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Slots of the pool by their use; the rest of `total` is free. A slot is for one token in the layers of one group.

    states    hold states of sequences, and checkpoints of them that a step in flight makes
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
    states: int = 0


def paged_memory(scheduler: Scheduler) -> MemoryUse:
    """The use of a `BlockManager`'s pool: blocks come with their tokens, so only a sequence's newest block has empty
    slots.

    A tail that several sequences share is counted as one of them sees it.
    """
    rows, blocks, size = scheduler.batch.rows, scheduler.batch.blocks, scheduler.config.block_size
    pool, layout, active = blocks.pool, blocks.layout, rows.active
    num_slots, num_computed = rows.num_slots[active], rows.num_computed[active]
    retired = [each.block_table for each in blocks.retired]
    num_retired = sum(len(each) - sum(map(each.count, blocks.blank)) for each in retired)
    of_states = len(
        {block for row in active.nonzero()[0].tolist() for block in scheduler.batch.sequence(row).state_blocks}
    )
    of_checkpoints = sum(len(each.blocks) for made in scheduler.batch.checkpoints.values() for each in made)
    num_retired += sum(len(each.state_blocks) for each in blocks.retired)
    physical = (pool.num_used - num_retired - of_states - of_checkpoints) * size
    # The last token of a sequence is never computed and takes no slot.
    left = np.maximum(rows.max_len[active] - 1 - num_computed, 0)
    held = num_empty = reserved = 0
    for num_groups, before, end in ((layout.num_full, 0, num_slots), (layout.num_windowed, *_windows(scheduler))):
        empty = np.maximum(end - num_computed, 0)
        held += num_groups * int((end - before).sum())
        num_empty += num_groups * int(empty.sum())
        reserved += num_groups * int(np.minimum(left, empty).sum())
    num_empty = min(num_empty, physical)
    reserved = min(reserved, num_empty)
    return MemoryUse(
        total=pool.num_blocks * size,
        tokens=physical - num_empty,
        reserved=reserved,
        wasted=num_empty - reserved,
        shared=max(held - physical, 0),
        cached=pool.num_cached * size,
        states=(of_states + of_checkpoints) * size,
    )


def _windows(scheduler: Scheduler) -> tuple[Array, Array]:
    """The first slot, and the end of the slots, of each active row in each windowed group. int64[n] each."""
    rows, batch, size = scheduler.batch.rows, scheduler.batch, scheduler.config.block_size
    active = rows.active.nonzero()[0]
    if not batch.blocks.blank:
        return np.zeros_like(active), np.zeros_like(active)
    # A table has blank entries before the window, and after the blocks for the next chunk of a prompt.
    known = np.array([batch.sequence(row).windows_end for row in active.tolist()], np.int64)
    ahead = np.maximum(-(-rows.num_entered[active] // size) - known, 0)
    return rows.windows_start[active] * size, rows.num_slots[active] - ahead * size


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
