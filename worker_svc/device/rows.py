"""The persistent batch: the state of each row that stays between steps.

A step carries only changes. They are applied three times, because steps overlap:

* `RowLedger`, when a step is accepted: the event loop checks it before the device has run the previous steps.
* `Rows`, when it is launched: what the model and the sampler read. The tokens stay on the device, so that a row
  continues with its own last sample before the scheduler has seen it.
* `FailedPrompts`, when its results have arrived.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.rpc.errors import invalid_field
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import (
    AssignRow,
    Batch,
    Int32Array,
    ModelGeometry,
    PoolGeometry,
    RowChanges,
    SetTokens,
    Step,
    WorkerLimits,
    check_distinct,
    first_true,
)
from worker_svc.streams import to_device


class RowLedger:
    """The rows as of the last accepted step: what a step must agree with, so that no later check is needed.

    Lengths are enough for the checks; block tables tell which blocks a step writes.
    """

    def __init__(self, pool: PoolGeometry, model: ModelGeometry, limits: WorkerLimits) -> None:
        self._block_size = pool.block_size
        self._max_model_len = model.max_model_len
        rows, blocks = limits.max_num_rows, pool.blocks_for(model.max_model_len)
        self._held = np.zeros(rows, dtype=bool)
        self._draws = np.zeros(rows, dtype=bool)
        self._num_tokens = np.zeros(rows, dtype=np.int64)
        self._num_blocks = np.zeros(rows, dtype=np.int64)
        self._tables = np.zeros((rows, blocks), dtype=np.int32)

    def reset(self) -> None:
        """Releases all rows."""
        self._held[:] = False

    def admit(self, step: Step) -> Int32Array:
        """Applies a step to the rows.

        Returns:
            The blocks that its batch writes, in no particular order.

        Raises:
            InvalidArgument: the step contradicts what the rows hold. Nothing was changed.
        """
        if step.row_changes.are_none:
            written = self._check_batch(step.batch)
        else:
            with self._unchanged_on_error(step.row_changes):
                self._change_rows(step.row_changes)
                written = self._check_batch(step.batch)
        samplers = step.batch.samples[:, 0]
        self._num_tokens[samplers[self._draws[samplers]]] += 1
        return written

    @contextmanager
    def _unchanged_on_error(self, changes: RowChanges) -> Iterator[None]:
        lengths = (self._held, self._draws, self._num_tokens, self._num_blocks)
        saved = [each.copy() for each in lengths]
        assigned = np.array([each.row for each in changes.assign], dtype=np.int32)
        touched = np.unique(np.concatenate((assigned, changes.fork[:, 1], changes.block_table_deltas[:, 0])))
        saved_tables = self._tables[touched]
        try:
            yield
        except BaseException:
            for each, old in zip(lengths, saved, strict=True):
                each[:] = old
            self._tables[touched] = saved_tables
            raise

    def _change_rows(self, changes: RowChanges) -> None:
        self._held[changes.release] = False
        for assign in changes.assign:
            self._assign(assign)
        self._fork(changes.fork)
        for reseed in changes.reseed:
            self._require_held(np.array([reseed.row]), "reseed.row")
        for change in changes.set_tokens:
            self._set_tokens(change)
        self._extend_tables(changes.block_table_deltas)

    def _assign(self, assign: AssignRow) -> None:
        row = assign.row
        if self._held[row]:
            raise invalid_field("assign.row", f"is {row}, which holds a sequence; release it first")
        self._held[row] = True
        self._draws[row] = assign.sampling.num_candidates is None
        self._num_tokens[row] = len(assign.token_ids)
        self._num_blocks[row] = len(assign.block_table)
        self._tables[row, : len(assign.block_table)] = assign.block_table

    def _fork(self, pairs: Int32Array) -> None:
        parents, children = pairs[:, 0], pairs[:, 1]
        self._require_held(parents, "fork")
        for each in (self._held, self._draws, self._num_tokens, self._num_blocks, self._tables):
            each[children] = each[parents]

    def _set_tokens(self, change: SetTokens) -> None:
        self._require_held(np.array([change.row]), "set_tokens.row")
        if change.position > self._num_tokens[change.row]:
            raise invalid_field(
                "set_tokens.position",
                f"is {change.position}; row {change.row} has {self._num_tokens[change.row]} tokens",
            )
        self._num_tokens[change.row] = change.position + len(change.token_ids)

    def _extend_tables(self, deltas: Int32Array) -> None:
        """Replaces entries, and adds entries without a gap."""
        if not len(deltas):
            return
        rows, indices, block_ids = deltas.T
        self._require_held(rows, "block_table_deltas")
        self._tables[rows, indices] = block_ids
        added = np.unique(deltas[indices >= self._num_blocks[rows], :2], axis=0)
        if not len(added):
            return
        lengths = self._num_blocks + np.bincount(added[:, 0], minlength=len(self._num_blocks))
        if (worst := first_true(added[:, 1] >= lengths[added[:, 0]])) is not None:
            row, index = added[worst]
            raise invalid_field(
                "block_table_deltas", f"sets block {index} of row {row}, which has only {self._num_blocks[row]}"
            )
        self._num_blocks[:] = lengths

    def _check_batch(self, batch: Batch) -> Int32Array:
        """Checks that rows hold the tokens to compute and the blocks to write; returns these blocks."""
        rows = batch.rows
        self._require_held(rows, "batch.rows")
        ends = batch.ends
        if (worst := first_true(ends > self._num_tokens[rows])) is not None:
            raise invalid_field(
                "batch.num_new_tokens",
                f"takes row {rows[worst]} to {ends[worst]} tokens; it has {self._num_tokens[rows[worst]]}",
            )
        if (worst := first_true(ends > self._num_blocks[rows] * self._block_size)) is not None:
            raise invalid_field(
                "batch.num_new_tokens",
                f"takes row {rows[worst]} to {ends[worst]} tokens; its block table of "
                f"{self._num_blocks[rows[worst]]} blocks holds {self._num_blocks[rows[worst]] * self._block_size}",
            )
        written = self._written_blocks(rows, batch.num_computed_tokens, ends)
        check_distinct(written, "batch", "block", "among those that its rows write")
        self._check_samples(batch, ends)
        return written

    def _written_blocks(self, rows: Int32Array, starts: Int32Array, ends: NDArray[np.int64]) -> Int32Array:
        first, last = starts // self._block_size, (ends - 1) // self._block_size
        if np.array_equal(first, last):
            return self._tables[rows, first]
        counts = last - first + 1
        offsets = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        return self._tables[np.repeat(rows, counts), np.repeat(first, counts) + offsets]

    def _check_samples(self, batch: Batch, ends: NDArray[np.int64]) -> None:
        """Checks that a sampled token follows the last token of its logits, in the row that samples too."""
        samplers, sources = batch.samples.T
        self._require_held(samplers, "batch.samples")
        end_of_row = np.zeros_like(self._num_tokens)
        end_of_row[batch.rows] = ends
        if (worst := first_true(end_of_row[sources] != self._num_tokens[samplers])) is not None:
            raise invalid_field(
                "batch.samples",
                f"lets row {samplers[worst]} of {self._num_tokens[samplers[worst]]} tokens sample after token "
                f"{end_of_row[sources[worst]]} of row {sources[worst]}",
            )

    def _require_held(self, rows: NDArray[np.integer], field: str) -> None:
        if (worst := first_true(~self._held[rows])) is not None:
            raise invalid_field(field, f"names row {rows[worst]}, which holds no sequence")


class Rows:
    """The rows as of the last launched step: tokens, block tables and sampling parameters.

    `token_ids` is [rows, max_model_len + 1] int32: the last column is for a token that is sampled after the last
    position and never computed. `block_tables` is [rows, blocks of max_model_len] int32. Entries beyond a row's length
    are undefined.
    """

    def __init__(self, num_rows: int, max_model_len: int, max_blocks: int, device: torch.device) -> None:
        self.token_ids = torch.zeros((num_rows, max_model_len + 1), dtype=torch.int32, device=device)
        self.block_tables = torch.zeros((num_rows, max_blocks), dtype=torch.int32, device=device)
        self.sampling = SamplingColumns.empty(num_rows)

    def hold_padding(self, row: int, block: int) -> None:
        """Makes a row that no step names hold a single token 0 in this block."""
        self.token_ids[row] = 0
        self.block_tables[row] = block

    def apply(self, changes: RowChanges) -> None:
        """Applies the changes of one step, which a `RowLedger` has checked."""
        if changes.are_none:
            return
        self.sampling.clear(changes.release)
        self._assign(changes.assign)
        self._fork(changes.fork)
        for reseed in changes.reseed:
            self.sampling.seed[reseed.row] = reseed.seed
        self._set_tokens(changes.set_tokens)
        if len(changes.block_table_deltas):
            rows, indices, block_ids = changes.block_table_deltas.T
            self._scatter(self.block_tables, rows, indices, block_ids)

    def append(self, rows: Tensor, positions: Tensor, token_ids: Tensor) -> None:
        """Writes sampled tokens, each at a position of its row. All are [n] int64 on the device."""
        self.token_ids[rows, positions] = token_ids.to(torch.int32)

    def _assign(self, assigned: tuple[AssignRow, ...]) -> None:
        if not assigned:
            return
        for each in assigned:
            self.sampling.put(each.row, each.sampling, each.num_prompt_tokens)
        zeros = [0] * len(assigned)
        rows = [each.row for each in assigned]
        self._write_runs(self.token_ids, rows, zeros, [each.token_ids for each in assigned])
        self._write_runs(self.block_tables, rows, zeros, [each.block_table for each in assigned])

    def _fork(self, pairs: Int32Array) -> None:
        if not len(pairs):
            return
        self.sampling.copy_rows(pairs[:, 0], pairs[:, 1])
        parents, children = to_device(pairs.T.astype(np.int64), self.token_ids.device)
        for tensor in (self.token_ids, self.block_tables):
            tensor.index_copy_(0, children, tensor.index_select(0, parents))

    def _set_tokens(self, changes: tuple[SetTokens, ...]) -> None:
        if changes:
            rows, starts = [each.row for each in changes], [each.position for each in changes]
            self._write_runs(self.token_ids, rows, starts, [each.token_ids for each in changes])

    def _write_runs(self, target: Tensor, rows: list[int], starts: list[int], runs: list[Int32Array]) -> None:
        """Writes each run of values to its row from its start on, in one scatter."""
        lengths = np.array([len(run) for run in runs])
        ends = np.cumsum(lengths)
        columns = np.arange(ends[-1]) + np.repeat(np.array(starts) - (ends - lengths), lengths)
        self._scatter(target, np.repeat(np.array(rows), lengths), columns, np.concatenate(runs))

    def _scatter(self, target: Tensor, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        packed = to_device(np.stack((rows, columns, values)).astype(np.int64, copy=False), target.device)
        target[packed[0], packed[1]] = packed[2].to(torch.int32)


class FailedPrompts:
    """The rows as of the last finished step whose prompt was scored by logits that are not finite. They fail when they
    sample, until the row gets another sequence.

    A step reports only failures of rows that sample in it. Until then the log probabilities of a prompt are reported as
    they are: none reaches a client before the request ends.
    """

    def __init__(self) -> None:
        self._rows: set[int] = set()

    def failing_samples(self, step: Step, failed_prompts: Iterable[int]) -> NDArray[np.bool_]:
        """Which samples of a step fail, [s]. To be called for all steps, in order.

        Args:
            failed_prompts: rows whose prompt was found to fail in this step.
        """
        changes, samples = step.row_changes, step.batch.samples
        if self._rows:
            self._rows.difference_update((each.row for each in changes.assign), changes.fork[:, 1].tolist())
        self._rows.update(failed_prompts)
        return np.isin(samples[:, 1], list(self._rows)) if self._rows else np.zeros(len(samples), np.bool_)
