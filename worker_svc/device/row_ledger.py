"""The ledger of the persistent batch: the content of each row after the last accepted step, to check the next step.

It does not import torch: a worker listens, and refuses an address in use, before it imports that.
"""

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from quire.rpc.errors import invalid_field
from worker_svc.step import (
    AdmittedStep,
    AssignRow,
    Batch,
    Int32Array,
    ModelGeometry,
    PoolGeometry,
    RowChanges,
    SetTokens,
    Step,
    StepOutput,
    WorkerLimits,
    check_distinct,
    first_true,
)


@dataclass(frozen=True, slots=True)
class _Drafted:
    """The samples of a step in flight that have drafts: the sequences that they extend, and the maximum tokens each."""

    step_id: int
    rows: Int32Array
    sequences: NDArray[np.int64]
    max_drafts: Int32Array


class RowLedger:
    """The rows as of the last accepted step. A step is checked against them, so that no later check is needed.

    Lengths are enough for the checks; block tables give the blocks that a step writes. While steps in flight have
    drafts of a row, its length is an interval: `_num_tokens` is the maximum, and `_num_unsure` fewer is the minimum.
    The scheduler may not know yet how many drafts of earlier steps were right, `_num_drafts` of them at most.
    """

    def __init__(self, pool: PoolGeometry, model: ModelGeometry, limits: WorkerLimits) -> None:
        self._block_size, self._num_groups = pool.block_size, pool.groups.num_groups
        self._max_model_len = model.max_model_len
        rows, blocks = limits.max_num_rows, pool.table_len(model.max_model_len)
        self._held = np.zeros(rows, dtype=bool)
        self._draws = np.zeros(rows, dtype=bool)
        self._num_tokens = np.zeros(rows, dtype=np.int64)
        self._num_blocks = np.zeros(rows, dtype=np.int64)
        self._num_unsure = np.zeros(rows, dtype=np.int64)
        self._num_drafts = np.zeros(rows, dtype=np.int64)
        # The number of prompt tokens, and the blocks of the state, if layers keep states.
        self._num_prompt_tokens = np.zeros(rows, dtype=np.int64)
        self._state_tables = np.zeros((rows, pool.state_blocks), dtype=np.int32)
        # Another number for each sequence that a row holds.
        self._sequences = np.zeros(rows, dtype=np.int64)
        self._num_sequences = 0
        self._drafted: deque[_Drafted] = deque()
        self._tables = np.zeros((rows, blocks), dtype=np.int32)
        self._by_group = self._tables.reshape(rows, -1, self._num_groups)
        # The load of each row's adapter, and the last one of each slot. Loads count from 1 on.
        self._adapter_loads = np.zeros(rows, dtype=np.int64)
        self._slot_loads = np.zeros(limits.max_adapters, dtype=np.int64)
        self._is_loaded = np.zeros(limits.max_adapters, dtype=bool)
        self._num_loads = 0

    def reset(self) -> None:
        """Releases all rows, and empties all slots of adapters."""
        self._held[:] = False
        self._drafted.clear()
        self._adapter_loads[:] = 0
        self._slot_loads[:] = 0
        self._is_loaded[:] = False

    def begin_load(self, slot: int) -> None:
        """An adapter is loaded into a slot: rows of the previous one are not computed any more."""
        self._num_loads += 1
        self._slot_loads[slot], self._is_loaded[slot] = self._num_loads, False

    def end_load(self, slot: int, is_loaded: bool) -> None:
        """The adapter is in the slot, or the slot is empty."""
        self._is_loaded[slot] = is_loaded
        if not is_loaded:
            self._slot_loads[slot] = 0

    def admit(self, step: Step) -> AdmittedStep:
        """Applies a step to the rows. `batch_blocks` are in no particular order.

        Raises:
            InvalidArgument: the step contradicts the content of the rows. Nothing was changed.
        """
        max_forked = None
        if step.row_changes.are_none:
            written = self._check_batch(step.batch, step.checkpoints)
        else:
            with self._unchanged_on_error(step.row_changes):
                max_forked = self._change_rows(step.row_changes)
                written = self._check_batch(step.batch, step.checkpoints)
        samplers = step.batch.samples[:, 0]
        self._num_tokens[samplers[self._draws[samplers]]] += 1
        if len(step.batch.max_drafts):
            self._begin_drafts(step)
        return AdmittedStep(step, written, max_forked)

    def _begin_drafts(self, step: Step) -> None:
        has_drafts = step.batch.max_drafts > 0
        rows, max_drafts = step.batch.samples[has_drafts, 0], step.batch.max_drafts[has_drafts]
        for column in (self._num_tokens, self._num_unsure, self._num_drafts):
            column[rows] += max_drafts
        self._drafted.append(_Drafted(step.step_id, rows, self._sequences[rows], max_drafts))

    def record_output(self, output: StepOutput) -> None:
        """The lengths of rows are known better. To be called for each step, in order."""
        if not self._drafted or self._drafted[0].step_id != output.step_id:
            return
        drafted = self._drafted.popleft()
        counts = np.ones_like(self._num_tokens)
        if len(output.num_tokens):
            counts[output.rows] = output.num_tokens
        is_same = self._held[drafted.rows] & (self._sequences[drafted.rows] == drafted.sequences)
        rows, max_drafts = drafted.rows[is_same], drafted.max_drafts[is_same]
        self._num_unsure[rows] -= max_drafts
        self._num_tokens[rows] -= 1 + max_drafts - counts[rows]

    @contextmanager
    def _unchanged_on_error(self, changes: RowChanges) -> Iterator[None]:
        lengths = (*self._columns, self._sequences)
        saved = [each.copy() for each in lengths]
        assigned = np.array([each.row for each in changes.assign], dtype=np.int32)
        # A row may be named several times: its entries are then saved several times.
        touched = np.concatenate((assigned, changes.fork[:, 1], changes.block_table_deltas[:, 0]))
        # Tables have room for the longest sequence; most rows use little of it.
        assigned_blocks = max((len(each.block_table) for each in changes.assign), default=0)
        last_set = changes.block_table_deltas[:, 1].max(initial=-1)
        end = max(int(self._num_blocks.max(initial=0)), assigned_blocks, int(last_set) + 1)
        saved_tables = self._tables[touched, :end]
        try:
            yield
        except BaseException:
            for each, old in zip(lengths, saved, strict=True):
                each[:] = old
            self._tables[touched, :end] = saved_tables
            raise

    def _change_rows(self, changes: RowChanges) -> tuple[int, int]:
        """Returns `AdmittedStep.max_forked`."""
        self._held[changes.release] = False
        for assign in changes.assign:
            self._assign(assign)
        max_forked = self._fork(changes.fork)
        for reseed in changes.reseed:
            self._require_held(np.array([reseed.row]), "reseed.row")
        for change in changes.set_tokens:
            self._set_tokens(change)
        self._extend_tables(changes.block_table_deltas)
        if len(changes.state_tables):
            rows = changes.state_tables[:, 0]
            self._require_held(rows, "state_tables")
            self._state_tables[rows] = changes.state_tables[:, 1:]
        return max_forked

    def _assign(self, assign: AssignRow) -> None:
        row, slot = assign.row, assign.adapter_slot
        if self._held[row]:
            raise invalid_field("assign.row", f"is {row}, which holds a sequence; release it first")
        if slot is not None and not self._is_loaded[slot]:
            raise invalid_field("assign.adapter_slot", f"is {slot}, in which no adapter is loaded")
        self._adapter_loads[row] = 0 if slot is None else self._slot_loads[slot]
        self._held[row] = True
        self._draws[row] = assign.sampling.num_candidates is None
        self._num_tokens[row] = len(assign.token_ids)
        self._num_unsure[row] = self._num_drafts[row] = 0
        self._num_sequences += 1
        self._sequences[row] = self._num_sequences
        self._num_blocks[row] = len(assign.block_table)
        self._num_prompt_tokens[row] = assign.num_prompt_tokens
        self._state_tables[row] = assign.state_blocks
        self._tables[row, : len(assign.block_table)] = assign.block_table

    def _fork(self, pairs: Int32Array) -> tuple[int, int]:
        if not len(pairs):
            return 0, 0
        parents, children = pairs[:, 0], pairs[:, 1]
        self._require_held(parents, "fork")
        self._require_sure(parents, "fork")
        num_tokens, num_blocks = (int(each[parents].max(initial=0)) for each in (self._num_tokens, self._num_blocks))
        for each in (*self._columns, self._tables[:, :num_blocks]):
            each[children] = each[parents]
        self._sequences[children] = self._num_sequences + 1 + np.arange(len(children))
        self._num_sequences += len(children)
        return num_tokens, num_blocks

    def _set_tokens(self, change: SetTokens) -> None:
        self._require_held(np.array([change.row]), "set_tokens.row")
        self._require_sure(np.array([change.row]), "set_tokens.row")
        if change.position > self._num_tokens[change.row]:
            raise invalid_field(
                "set_tokens.position",
                f"is {change.position}; row {change.row} has {self._num_tokens[change.row]} tokens",
            )
        self._num_tokens[change.row] = change.position + len(change.token_ids)

    def _extend_tables(self, deltas: Int32Array) -> None:
        """Replaces entries, and adds entries without a gap. Each entry is named once."""
        if not len(deltas):
            return
        rows, indices, block_ids = deltas.T
        self._require_held(rows, "block_table_deltas")
        self._tables[rows, indices] = block_ids
        added = deltas[indices >= self._num_blocks[rows], :2]
        if not len(added):
            return
        lengths = self._num_blocks + np.bincount(added[:, 0], minlength=len(self._num_blocks))
        if (worst := first_true(added[:, 1] >= lengths[added[:, 0]])) is not None:
            row, index = added[worst]
            raise invalid_field(
                "block_table_deltas", f"sets block {index} of row {row}, which has only {self._num_blocks[row]}"
            )
        self._num_blocks[:] = lengths

    def _check_batch(self, batch: Batch, checkpoints: Int32Array) -> Int32Array:
        """Checks that rows hold the tokens to compute and the blocks to write; returns these blocks."""
        rows = batch.rows
        self._require_held(rows, "batch.rows")
        self._require_adapters(rows)
        ends = batch.ends
        if (worst := first_true(ends > self._num_tokens[rows])) is not None:
            raise invalid_field(
                "batch.num_new_tokens",
                f"takes row {rows[worst]} to {ends[worst]} tokens; it has {self._num_tokens[rows[worst]]}",
            )
        self._check_samples(batch, ends)
        reach = self._reach(batch, ends)
        room = self._num_blocks[rows] // self._num_groups * self._block_size
        if (worst := first_true(reach > room)) is not None:
            raise invalid_field(
                "batch.num_new_tokens",
                f"takes row {rows[worst]} to {reach[worst]} tokens; its block table of "
                f"{self._num_blocks[rows[worst]]} blocks holds {room[worst]}",
            )
        written = self._written_blocks(rows, batch.num_computed_tokens, reach)
        if self._state_tables.shape[1]:
            self._check_states(batch, checkpoints, reach)
            written = np.concatenate((written, self._state_tables[rows].ravel(), checkpoints[:, 2:].ravel()))
        check_distinct(written, "batch", "block", "among the blocks that its rows write")
        return written

    def _check_states(self, batch: Batch, checkpoints: Int32Array, reach: NDArray[np.int64]) -> None:
        """Checks that no token would be computed together with the token before it, which would count twice in the
        state, and that the batch computes the last token of each checkpoint, or might have, if more drafts of earlier
        steps had been right."""
        rows, computed = batch.rows, batch.num_computed_tokens
        is_lone = (batch.num_new_tokens == 1) & (computed > 0) & (computed < self._num_prompt_tokens[rows])
        if (worst := first_true(is_lone)) is not None:
            raise invalid_field(
                "batch.num_new_tokens",
                f"takes one prompt token of row {rows[worst]}, after {computed[worst]}; the layers of this model keep "
                "states, which need it with another one",
            )
        if not len(checkpoints):
            return
        of_rows, lengths = checkpoints[:, 0], checkpoints[:, 1]
        firsts, lasts = np.zeros_like(self._num_tokens), np.zeros_like(self._num_tokens)
        firsts[rows], lasts[rows] = computed, reach
        # The scheduler may not know yet that the row has fewer tokens: then the batch does not reach the checkpoint.
        latest = lasts[of_rows] + self._num_drafts[of_rows]
        if (worst := first_true((lengths <= firsts[of_rows]) | (lengths > latest))) is not None:
            raise invalid_field(
                "checkpoints",
                f"names {lengths[worst]} tokens of row {of_rows[worst]}; the batch computes tokens "
                f"{firsts[of_rows[worst]]} to {lasts[of_rows[worst]]} of it",
            )
        places = np.sort((of_rows.astype(np.int64) << 32) + lengths)
        if (worst := first_true(places[1:] == places[:-1])) is not None:
            row, length = divmod(int(places[worst]), 1 << 32)
            raise invalid_field("checkpoints", f"names {length} tokens of row {row} twice")

    def _reach(self, batch: Batch, ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Maximum length of each row after the step, with its drafts and with unverified earlier ones."""
        if not self._num_drafts[batch.rows].any() and not len(batch.max_drafts):
            return ends
        samplers, sources = batch.samples.T
        reach_of_row = np.zeros_like(self._num_tokens)
        reach_of_row[batch.rows] = ends
        reach_of_row[sources] = self._num_tokens[samplers]
        if len(batch.max_drafts):
            reach_of_row[samplers] += batch.max_drafts
        reach = reach_of_row[batch.rows]
        if (worst := first_true(reach > self._max_model_len)) is not None:
            raise invalid_field(
                "batch.max_drafts",
                f"takes row {batch.rows[worst]} to {reach[worst]} tokens; a sequence has at most {self._max_model_len}",
            )
        return reach

    def _written_blocks(self, rows: Int32Array, starts: Int32Array, ends: NDArray[np.int64]) -> Int32Array:
        first, last = starts // self._block_size, (ends - 1) // self._block_size
        if np.array_equal(first, last):
            return self._by_group[rows, first].ravel()
        counts = last - first + 1
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._by_group[np.repeat(rows, counts), np.repeat(first, counts) + offsets].ravel()

    def _check_samples(self, batch: Batch, ends: NDArray[np.int64]) -> None:
        """Checks that a sampled token follows the last token of its logits, in the row that samples too."""
        samplers, sources = batch.samples.T
        self._require_held(samplers, "batch.samples")
        end_of_row = np.zeros_like(self._num_tokens)
        end_of_row[batch.rows] = ends
        after, lengths = end_of_row[sources], (self._num_tokens - self._num_unsure)[samplers]
        if (worst := first_true((after > lengths) | (after < lengths - self._num_drafts[samplers]))) is not None:
            raise invalid_field(
                "batch.samples",
                f"lets row {samplers[worst]} of {lengths[worst]} tokens sample after token "
                f"{end_of_row[sources[worst]]} of row {sources[worst]}",
            )

    def _require_adapters(self, rows: Int32Array) -> None:
        loads = self._adapter_loads[rows]
        if loads.any() and (worst := first_true((loads > 0) & ~np.isin(loads, self._slot_loads))) is not None:
            raise invalid_field("batch.rows", f"names row {rows[worst]}, whose adapter is in its slot no more")

    @property
    def _columns(self) -> tuple[NDArray[np.generic], ...]:
        """All of a row that its fork has, too, but its block table."""
        return (
            self._held,
            self._draws,
            self._num_tokens,
            self._num_unsure,
            self._num_drafts,
            self._num_blocks,
            self._adapter_loads,
            self._num_prompt_tokens,
            self._state_tables,
        )

    def _require_sure(self, rows: NDArray[np.integer], field: str) -> None:
        if (worst := first_true(self._num_unsure[rows] > 0)) is not None:
            raise invalid_field(field, f"names row {rows[worst]}, which has drafts in steps in flight")

    def _require_held(self, rows: NDArray[np.integer], field: str) -> None:
        if (worst := first_true(~self._held[rows])) is not None:
            raise invalid_field(field, f"names row {rows[worst]}, which holds no sequence")
