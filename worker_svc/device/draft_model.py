"""Speculative decoding: a small draft model of the same vocabulary guesses the next tokens of the served model.

Its layers are further layers of the pool, under the same block ids, so that its keys and values go where the model's
go: copies of blocks, swaps, seals, files and moves need no extra code. It computes prompts after the model, in the same
pass. It computes output tokens when it guesses for their row, and before the end of a step that filled a block, so that
a full block in the prefix cache has the keys and values of both models.

It samples as the row does, with the same random numbers. Therefore it is mostly right where its distribution is near
the model's, at any temperature. It ignores penalties, constraints and adapters.

Its guesses change how many tokens a step gives, but never the tokens. Keys and values that are missing, in blocks that
were filled while it did not pay, therefore only make its guesses worse.
"""

import logging

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.runtime import clock
from worker_svc.device.flat_batch import build_model_input, count_up
from worker_svc.device.kv_pool import KvPool
from worker_svc.device.pass_times import PassCosts
from worker_svc.device.replay import make_decodes, make_forward
from worker_svc.device.rows import Rows
from worker_svc.models.base import CausalLM, ModelInput
from worker_svc.sampling.sampler import draw
from worker_svc.step import Batch, RowChanges, WorkerLimits

_NOT_BEGUN = -1
_MAX_BESIDE = 2
"""Maximum missing tokens that a row computes in the pass of its first guess."""
_MEASURED_ROWS, _NUM_MEASURED = 8, 20
_logger = logging.getLogger(__name__)


class DraftModel:
    """Tracks how many tokens of each row it has computed, and guesses the next ones. For models on the CPU."""

    def __init__(
        self, model: CausalLM, pool: KvPool, rows: Rows, vocab_size: int, max_model_len: int, limits: WorkerLimits
    ) -> None:
        """`vocab_size` is the size of the target model's vocabulary."""
        self._model, self._rows, self._vocab_size = model, rows, vocab_size
        self._token_ids = rows.token_ids.numpy()
        pool = pool.of_draft_model()
        self._caches, self._block_size = pool.layers_of(model), pool.geometry.block_size
        self._forward = make_forward(model, pool, max_model_len, limits)
        self._decodes = make_decodes(model, pool, max_model_len, limits)
        self._max_new, self._max_decodes = limits.max_num_batched_tokens, limits.max_num_rows + limits.max_verified
        # The number of tokens of each row in the pool, and whether its guesses for the row do not pay.
        self._num_known = np.full(len(self._token_ids), _NOT_BEGUN, np.int64)
        self._is_declined = np.zeros(len(self._token_ids), np.bool_)

    def apply_row_changes(self, changes: RowChanges) -> None:
        """The changes of a step, which `Rows` has."""
        if changes.are_none:
            return
        assigned = [each.row for each in changes.assign]
        self._num_known[assigned], self._is_declined[assigned] = _NOT_BEGUN, False
        for of_rows in (self._num_known, self._is_declined):
            of_rows[changes.fork[:, 1]] = of_rows[changes.fork[:, 0]]
        for each in changes.set_tokens:
            self._num_known[each.row] = min(self._num_known[each.row], each.position)

    def follow(self, batch: Batch) -> None:
        """Computes the prompt tokens of a batch, which the model has computed."""
        self._enter_new_rows(batch.rows, batch.num_computed_tokens)
        num_prompt = self._rows.sampling.num_prompt_tokens[batch.rows]
        of_prompts = (batch.num_new_tokens > 1) | (batch.num_computed_tokens < num_prompt)
        if of_prompts.any():
            self._catch_up(batch.rows[of_prompts].astype(np.int64), batch.ends[of_prompts])

    def num_missing(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> int:
        """Number of tokens of these rows that it has to compute before it guesses."""
        return int((lengths - np.maximum(self._num_known[rows], 0)).sum())

    def guess(self, rows: NDArray[np.int64], lengths: NDArray[np.int64], counts: NDArray[np.int64]) -> None:
        """Writes `counts` guesses after the tokens of each of these rows. Rows with a count of 0 do not pay for now."""
        self._is_declined[rows] = counts == 0
        rows, lengths, counts = (each[counts > 0] for each in (rows, lengths, counts))
        if not len(rows):
            return
        self._enter_new_rows(rows, lengths - 1)
        new = lengths - self._num_known[rows]
        if new.max() > _MAX_BESIDE or new.sum() > self._max_decodes:
            self._catch_up(rows, lengths - 1)
            new = np.ones(len(rows), np.int64)
        lasts = np.cumsum(new) - 1
        logits = self._logits(rows.repeat(new), self._num_known[rows].repeat(new) + count_up(new))
        if len(lasts) < len(logits):
            logits = logits[torch.from_numpy(lasts)]
        for place in range(int(counts.max())):
            if place:
                rows, lengths, counts = (each[counts > place] for each in (rows, lengths, counts))
                logits = self._logits(rows, lengths + place - 1)
            self._draw(rows, logits, lengths + place)
            self._num_known[rows] = lengths + place

    def record_lengths(self, rows: NDArray[np.integer], lengths: NDArray[np.int64]) -> None:
        """Records the lengths of these rows after a pass. The last token of each was drawn, not guessed."""
        self._num_known[rows] = np.minimum(self._num_known[rows], lengths - 1)

    def end_step(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Completes the full blocks of rows that may pay."""
        self._enter_new_rows(rows, lengths - 1)
        is_behind = self._num_known[rows] < (lengths - 1) // self._block_size * self._block_size
        chosen = is_behind & ~self._is_declined[rows]
        if chosen.any():
            self._catch_up(rows[chosen], lengths[chosen] - 1)

    def measured_costs(self, context_s: float) -> PassCosts:
        """Measures its passes; `context_s` as in `PassCosts`. To be called when the first row has a token."""
        seconds: list[float] = []
        counts = (1, min(_MEASURED_ROWS, self._max_decodes))
        for count in counts:
            times: list[float] = []
            for _ in range(_NUM_MEASURED):
                started = clock.monotonic()
                self._draw(
                    np.zeros(count, np.int64), self._logits(*np.zeros((2, count), np.int64)), np.ones(count, np.int64)
                )
                times.append(clock.monotonic() - started)
            seconds.append(min(times))
        _logger.info("the draft model takes %.2f ms for a row, %.2f for %d", *(1e3 * np.array(seconds)), counts[1])
        return PassCosts(counts, (seconds[0], max(seconds)), context_s)

    def _enter_new_rows(self, rows: NDArray[np.integer], num_computed: NDArray[np.integer]) -> None:
        """Rows that are new: full blocks that they found have all, of the last one nothing may be there."""
        is_new = self._num_known[rows] == _NOT_BEGUN
        if is_new.any():
            self._num_known[rows[is_new]] = num_computed[is_new] // self._block_size * self._block_size

    def _catch_up(self, rows: NDArray[np.int64], ends: NDArray[np.int64]) -> None:
        """Computes the tokens of these rows that it has not computed yet, up to `ends`."""
        while True:
            missing = np.maximum(ends - self._num_known[rows], 0)
            new = np.clip(self._max_new - (np.cumsum(missing) - missing), 0, missing)
            if not new.any():
                return
            part, new = rows[new > 0], new[new > 0]
            self._forward(self._input(part, new, self._num_known[part]))
            self._num_known[part] += new

    def _logits(self, rows: NDArray[np.int64], positions: NDArray[np.int64]) -> Tensor:
        """Computes a token of each row, [n, vocab] as wide as the model's at most."""
        inputs = self._input(rows, np.ones(len(rows), np.int64), positions)
        logits = self._model.logits(self._forward(inputs)) if self._decodes is None else self._decodes(inputs)
        return logits if logits.shape[1] <= self._vocab_size else logits[:, : self._vocab_size].contiguous()

    def _draw(self, rows: NDArray[np.int64], logits: Tensor, positions: NDArray[np.int64]) -> None:
        """Writes the token of each row at its position."""
        drawn = draw(logits, self._rows.sampling.take(rows), positions)
        self._token_ids[rows, positions] = drawn.token_ids.numpy()

    def _input(
        self, rows: NDArray[np.int64], num_new: NDArray[np.int64], num_computed: NDArray[np.int64]
    ) -> ModelInput:
        new, computed = num_new.astype(np.int32), num_computed.astype(np.int32)
        batch = Batch(rows.astype(np.int32), new, computed, np.zeros((0, 2), np.int32))
        inputs = build_model_input(batch, self._rows, self._caches, self._block_size)
        # A padded vocabulary may be narrower than the model's.
        token_ids = inputs.token_ids.clamp_(max=self._model.vocab_size - 1)
        return self._caches.inputs(token_ids, inputs.positions, inputs.groups)
