"""What the running batch computes next: decodes first, then chunks of prompts (the paper's sections 4.3 and 4.4)."""

from collections import Counter

import numpy as np

from scheduler_svc.core.batch import Batch
from scheduler_svc.core.queues import GroupQueue
from scheduler_svc.core.sequence import SequenceGroup, SequenceStatus


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


def plan_prefills(batch: Batch, running: GroupQueue) -> None:
    """Goes on with the rows that compute what they came with, as far as the token budget goes."""
    for row in batch.rows.prefilling().tolist():
        if batch.draft.budget == 0:
            return
        plan_chunk(batch, row, running)


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
