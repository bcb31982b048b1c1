"""What the running batch computes next: decodes first, then chunks of prompts (the paper's sections 4.3 and 4.4)."""

import itertools
import sys
from collections import Counter

import numpy as np

from scheduler_svc.core.batch import Batch
from scheduler_svc.core.queues import GroupQueue
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus
from scheduler_svc.core.state import SchedulerState

_NUM_LOOKED_AT = 4
"""Waiting groups that may let a longer prompt be content with its share."""


def blocks_for_decodes(batch: Batch) -> int:
    """Free blocks that the next token of every decoding row takes."""
    rows = batch.rows
    return len(rows.without_slot(rows.decoding())) + _num_copies(batch)


def blocks_to_grow(batch: Batch, num_steps: int) -> int:
    """Free blocks that all sequences in the batch take in so many steps after this one, where they share nothing."""
    rows, block_size = np.flatnonzero(batch.rows.active), batch.blocks.block_size
    # The last token of a sequence is never computed and takes no slot.
    slots = np.minimum(batch.rows.num_tokens[rows] + num_steps, batch.rows.max_len[rows] - 1)
    return int(np.maximum(-(-slots // block_size) - batch.rows.num_slots[rows] // block_size, 0).sum())


def plan_decodes(batch: Batch) -> None:
    """Gives every decoding row the slot of its next token and adds it to the step. The blocks must be free."""
    rows = batch.rows.decoding()
    if not len(rows):
        return
    _append_blocks(batch, batch.rows.without_slot(rows))
    _copy_shared_tails(batch)
    batch.draft.decode(rows, batch.rows.num_computed[rows])


def plan_prefills(state: SchedulerState) -> None:
    """Goes on with the rows that compute what they came with, as far as the token budget goes."""
    rows = state.batch.rows.prefilling().tolist()
    lengths = [_num_uncomputed(state.batch, row) for row in rows]
    shortest_behind = [*itertools.accumulate(reversed(lengths), min, initial=sys.maxsize)][::-1][1:]
    for row, shortest in zip(rows, shortest_behind, strict=True):
        if state.batch.draft.budget == 0:
            return
        plan_chunk_or_share(state, row, shortest)


def plan_chunk_or_share(state: SchedulerState, row: int, shortest_behind: int = sys.maxsize) -> None:
    """The row's next chunk; or, where a prompt with less to compute is behind it or waits, its share of the budget, set
    aside until `plan_shares`, so that those have the rest first. `shortest_behind` is the least that a row behind it
    has to compute."""
    batch = state.batch
    length, key = _num_uncomputed(batch, row), batch.sequence(row).request.key
    share = max(1, int(batch.draft.budget * state.config.max_prefill_share))
    aside = batch.draft.aside
    if aside and batch.sequence(aside[-1][0]).request.key == key:
        # Rows of a group may share blocks: who computes them comes before who reads them.
        batch.draft.set_aside(row, 0)
    elif length > share and (shortest_behind < length or _is_shorter_waiting(state, length)):
        batch.draft.set_aside(row, share)
    else:
        plan_chunk(batch, row, state.running)


def plan_shares(state: SchedulerState) -> None:
    """The chunks of the rows that had a share set aside, with what the others left."""
    draft = state.batch.draft
    for row, share in draft.take_aside():
        draft.budget += share
        if draft.budget:
            plan_chunk(state.batch, row, state.running)


def plan_chunk(batch: Batch, row: int, running: GroupQueue) -> None:
    """As much of the row's uncomputed tokens as the budget has room for. The last chunk samples, for all sequences of
    the group where they start from one prompt."""
    rows = batch.rows
    num_computed = int(rows.num_computed[row])
    remaining = int(rows.num_tokens[row]) - num_computed
    chunk = min(remaining, batch.draft.budget)
    batch.draft.add_chunk(row, chunk, num_computed, samples=chunk == remaining)
    if chunk == remaining:
        _fork_samples(batch, row, running.get(batch.sequence(row).request.key))


def _num_uncomputed(batch: Batch, row: int) -> int:
    return int(batch.rows.num_tokens[row] - batch.rows.num_computed[row])


def _is_shorter_waiting(state: SchedulerState, length: int) -> bool:
    """Whether one of the next that wait has less than this to compute. Those further behind would get next to nothing:
    each that goes before leaves them a share of what it found."""
    few = state.waiting.next_few(_NUM_LOOKED_AT)
    return any(group.num_tokens_to_compute < length or _num_uncached(state, group) < length for group in few)


def _num_uncached(state: SchedulerState, group: SequenceGroup) -> int:
    """What a group that waits has to compute, looked up once a step: many rows ask for it."""
    key = group.request.key
    if key not in state.num_uncached:
        blocks = state.batch.blocks
        num_cached = blocks.num_cached(group.computing[0]) * blocks.block_size
        state.num_uncached[key] = group.num_tokens_to_compute - num_cached
    return state.num_uncached[key]


def _fork_samples(batch: Batch, parent_row: int, group: SequenceGroup) -> None:
    """The prompt is computed: every sequence that waits for it shares its blocks and samples from its logits (the
    paper's figure 8)."""
    parent = batch.sequence(parent_row)
    for child in group.unfinished:
        if child is parent or child.status is not SequenceStatus.WAITING:
            continue
        assert child.row is not None
        batch.fork(parent, child)
        batch.draft.reseed(child.row, child.request.sampling_of(child.index).seed)
        batch.draft.sample_from(parent_row, child.row)


def _append_blocks(batch: Batch, rows: np.ndarray) -> None:
    for row in rows.tolist():
        sequence = batch.sequence(row)
        block = batch.blocks.append(sequence)
        batch.draft.set_block(row, len(sequence.block_table) - 1, block)
    batch.rows.num_slots[rows] += batch.blocks.block_size


def _num_copies(batch: Batch) -> int:
    """Blocks that the decoding rows copy before they write: all writers of a shared block but its last holder."""
    sharing = batch.rows.sharing_tail().tolist()
    if not sharing:
        return 0
    writers = Counter(batch.tail(row)[1] for row in sharing)
    return sum(min(count, batch.blocks.pool.ref_count(block) - 1) for block, count in writers.items())


def _copy_shared_tails(batch: Batch) -> None:
    """Copy-on-write: who is about to write to a shared block gets a copy; the last holder writes in place."""
    for row in batch.rows.sharing_tail().tolist():
        index, _ = batch.tail(row)
        pair = batch.blocks.make_writable(batch.sequence(row), index)
        if pair is not None:
            batch.draft.copies.append(pair)
            batch.draft.set_block(row, index, pair[1])
        batch.rows.shares_tail[row] = False
