"""The persistent batch: the state of each row that stays between steps.

A step carries only changes. They are applied three times, because steps overlap:

* `RowLedger`, when a step is accepted: the event loop checks it before the device has run the previous steps.
* `Rows`, when it is launched: the input of the model and the sampler. The tokens stay on the device, so that a row
  continues with its own last sample before the scheduler has seen it.
* `FailingRows`, when its results have arrived.
"""

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.device.kv_pool import zeros
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.step import AssignRow, Int32Array, RowChanges, SetTokens, Step
from worker_svc.streams import to_device


class Rows:
    """The rows as of the last launched step: tokens, block tables and sampling parameters.

    `token_ids` is [rows, max_model_len + 1] int32: the last column is for a token that is sampled after the last
    position and never computed. `block_tables` is [rows, blocks of max_model_len * groups of layers] int32, and
    `by_group` the same as [rows, blocks, groups]. Entries beyond a row's length are undefined. On the CPU they take
    memory when they are first written.
    """

    def __init__(
        self,
        num_rows: int,
        max_model_len: int,
        max_blocks: int,
        device: torch.device,
        num_groups: int = 1,
        state_blocks: int = 0,
    ) -> None:
        self.token_ids = zeros((num_rows, max_model_len + 1), torch.int32, device)
        self.block_tables = zeros((num_rows, max_blocks * num_groups), torch.int32, device)
        self.by_group = self.block_tables.view(num_rows, max_blocks, num_groups)
        self.sampling = SamplingColumns.empty(num_rows)
        self.adapter_slots = np.zeros(num_rows, np.int64)
        """The slot of each row's adapter from 1 on, on the host; 0 for none."""
        self.state_blocks, self.state_tables = state_blocks, np.zeros((num_rows, state_blocks), np.int32)
        """[rows, state_blocks], the blocks of each row's state, on the host."""

    def hold_padding(self, row: int, block: int) -> None:
        """Makes a row that no step names hold a single token 0 in this block."""
        self.token_ids[row] = 0
        self.block_tables[row] = block

    def apply_row_changes(self, changes: RowChanges, max_forked: tuple[int, int] | None = None) -> None:
        """Applies the changes of one step, which a `RowLedger` has checked.

        Args:
            max_forked: as in `AdmittedStep`; None copies the whole rows.
        """
        if changes.are_none:
            return
        self.sampling.clear(changes.release)
        self._assign(changes.assign)
        self._fork(changes.fork, max_forked)
        for reseed in changes.reseed:
            self.sampling.seed[reseed.row] = reseed.seed
        self._set_tokens(changes.set_tokens)
        if len(changes.block_table_deltas):
            rows, indices, block_ids = changes.block_table_deltas.T
            self._scatter(self.block_tables, rows, indices, block_ids)
        if len(changes.state_tables):
            self.state_tables[changes.state_tables[:, 0]] = changes.state_tables[:, 1:]

    def append(self, rows: Int32Array, positions: NDArray[np.int64], token_ids: Tensor) -> None:
        """Writes sampled tokens, [n] int64 on the device, each at a position of its row."""
        if token_ids.is_cpu:
            self.token_ids.numpy()[rows, positions] = token_ids.numpy()
        else:
            of_rows, at = to_device(np.stack((rows, positions)), token_ids.device)
            self.token_ids[of_rows, at] = token_ids.to(torch.int32)

    def _assign(self, assigned: tuple[AssignRow, ...]) -> None:
        if not assigned:
            return
        for each in assigned:
            self.sampling.put(each.row, each.sampling, each.num_prompt_tokens)
            self.adapter_slots[each.row] = 0 if each.adapter_slot is None else each.adapter_slot + 1
            self.state_tables[each.row] = each.state_blocks
        zeros = [0] * len(assigned)
        rows = [each.row for each in assigned]
        self._write_runs(self.token_ids, rows, zeros, [each.token_ids for each in assigned])
        self._write_runs(self.block_tables, rows, zeros, [each.block_table for each in assigned])

    def _fork(self, pairs: Int32Array, max_forked: tuple[int, int] | None) -> None:
        if not len(pairs):
            return
        num_tokens, num_blocks = (None, None) if max_forked is None else max_forked
        self.sampling.copy_rows(pairs[:, 0], pairs[:, 1])
        for of_row in (self.adapter_slots, self.state_tables):
            of_row[pairs[:, 1]] = of_row[pairs[:, 0]]
        held = (self.token_ids[:, :num_tokens], self.block_tables[:, :num_blocks])
        if self.token_ids.is_cpu:
            for array in map(Tensor.numpy, held):
                array[pairs[:, 1]] = array[pairs[:, 0]]
            return
        parents, children = to_device(pairs.T.astype(np.int64), self.token_ids.device)
        for tensor in held:
            tensor.index_copy_(0, children, tensor.index_select(0, parents))

    def _set_tokens(self, changes: tuple[SetTokens, ...]) -> None:
        if changes:
            rows, starts = [each.row for each in changes], [each.position for each in changes]
            self._write_runs(self.token_ids, rows, starts, [each.token_ids for each in changes])

    def _write_runs(self, target: Tensor, rows: list[int], starts: list[int], runs: list[Int32Array]) -> None:
        """Writes each run of values to its row from its start on; on a GPU in one scatter."""
        if target.is_cpu:
            array = target.numpy()
            for row, start, run in zip(rows, starts, runs, strict=True):
                array[row, start : start + len(run)] = run
            return
        lengths = np.array([len(run) for run in runs])
        ends = np.cumsum(lengths)
        columns = np.arange(ends[-1]) + np.repeat(np.array(starts) - (ends - lengths), lengths)
        self._scatter(target, np.repeat(np.array(rows), lengths), columns, np.concatenate(runs))

    def _scatter(self, target: Tensor, rows: np.ndarray, columns: np.ndarray, values: np.ndarray) -> None:
        packed = to_device(np.stack((rows, columns, values)).astype(np.int64, copy=False), target.device)
        target[packed[0], packed[1]] = packed[2].to(torch.int32)


class FailingRows:
    """The rows as of the last finished step that fail when they sample next, until they get another sequence: rows
    whose prompt was scored by logits that are not finite, and, if layers keep states, rows that drew nothing in a later
    pass of a step.

    A step reports only failures of rows that sample in it. Until then the log probabilities of a prompt are reported as
    they are: none reaches a client before the request ends. A later pass has drawn nothing for a row whose logits were
    not finite. The tokens before are reported first, and the row's newest token is computed again, which may go well.
    It then counts twice in a state, so what is drawn after it means nothing.
    """

    def __init__(self, *, has_states: bool) -> None:
        self._has_states = has_states
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

    def add(self, rows: Int32Array) -> None:
        """These rows drew nothing in the last pass of the step that `failing_samples` was called for."""
        if self._has_states:
            self._rows.update(rows.tolist())
