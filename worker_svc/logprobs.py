"""Log probabilities of the rows that ask for them.

They are those of the distribution after penalties and temperature and before truncation; a greedy row has no
temperature.
Only the rows that ask cost anything.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.sampling_table import SamplingColumns
from worker_svc.steps import Int32Array, RowCandidates, TokenLogprobs
from worker_svc.transfer import to_device

_MAX_TIES = 8


@dataclass(frozen=True, slots=True)
class LogprobValues:
    """Log probabilities at m positions, on the device."""

    chosen: Tensor
    """[m] float32."""
    ranks: Tensor
    """[m] int64, 1 for the most likely token."""
    top_token_ids: Tensor
    """[m, k] int64, best first; k is the most that any position wants."""
    top_logprobs: Tensor
    """[m, k] float32."""

    def tensors(self) -> list[Tensor]:
        """What must reach the host."""
        return [self.chosen, self.ranks, self.top_token_ids, self.top_logprobs]


@dataclass(frozen=True, slots=True)
class SampledLogprobs:
    """Log probabilities of some of the sampling rows."""

    indices: np.ndarray
    """[m], which of the sampling rows these are."""
    values: LogprobValues


def gather_logprobs(logits: Tensor, token_ids: Tensor, columns: SamplingColumns) -> SampledLogprobs | None:
    """The log probabilities that rows ask for; None when none does.

    Args:
        logits: [n, vocab] float32.
        token_ids: [n] int64, the tokens that were chosen.
        columns: Parameters of the n rows.
    """
    indices = np.flatnonzero(columns.wants_logprobs | (columns.num_candidates > 0))
    if not len(indices):
        return None
    index = to_device(indices, logits.device)
    most = int(np.maximum(columns.num_logprobs[indices], columns.num_candidates[indices]).max())
    is_final = columns.has_rules[indices] & (columns.num_candidates[indices] > 0)
    values = logprobs_of(logits[index], token_ids[index], columns.temperature[indices], most, is_final)
    return SampledLogprobs(indices, values)


def logprobs_of(
    logits: Tensor,
    token_ids: Tensor,
    temperature: NDArray[np.floating],
    num_top: int,
    is_final: NDArray[np.bool_] | None = None,
) -> LogprobValues:
    """Log probabilities of one token a line, and of the `num_top` most likely ones, fewer where there are not as many.

    Args:
        logits: [m, vocab] float32.
        token_ids: [m] int64.
        temperature: [m]; a line of temperature 0 is taken as it is.
        num_top: At least 0.
        is_final: [m], lines that are log probabilities already.
    """
    divisor = to_device(np.where(temperature > 0, temperature, np.float32(1)), logits.device)
    scores = (logits - logits.amax(dim=1, keepdim=True)).div_(divisor[:, None])
    logprobs = scores.log_softmax(dim=1)
    if is_final is not None and is_final.any():
        logprobs = torch.where(to_device(is_final, logits.device)[:, None], logits, logprobs)
    chosen = logprobs.gather(1, token_ids[:, None])
    # Of equally likely tokens the lower id goes first, as greedy choice has it: half precision makes many equal.
    token_order = torch.arange(logits.shape[1], device=logits.device)
    before = (logprobs > chosen) | ((logprobs == chosen) & (token_order < token_ids[:, None]))
    top_ids, top_values = _best(logprobs, min(num_top, logits.shape[1]))
    return LogprobValues(chosen.squeeze(1), before.sum(dim=1) + 1, top_ids, top_values)


def _best(logprobs: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Ids and values [m, count] of the highest in each line, best first, of equal ones the lower id first.

    Where more than `_MAX_TIES` are equal at the end of the list, any of them may be in it.
    """
    top = logprobs.topk(min(count + _MAX_TIES, logprobs.shape[1]), dim=1)
    by_id = top.indices.sort(dim=1)
    values = top.values.gather(1, by_id.indices)
    order = values.sort(dim=1, descending=True, stable=True)
    return by_id.values.gather(1, order.indices)[:, :count], order.values[:, :count]


def report_logprobs(
    rows: Int32Array, columns: SamplingColumns, indices: np.ndarray, arrays: list[np.ndarray], usable: np.ndarray
) -> tuple[tuple[TokenLogprobs, ...], tuple[RowCandidates, ...]]:
    """What the rows asked for, from the values of `LogprobValues.tensors()`; rows that are not usable get nothing."""
    chosen, ranks, token_ids, values = arrays
    logprobs, candidates = [], []
    for place, index in enumerate(indices):
        if not usable[index]:
            continue
        row, asked = int(rows[index]), int(columns.num_candidates[index])
        if asked:
            candidates.append(RowCandidates(row, token_ids[place, :asked].astype(np.int32), values[place, :asked]))
            continue
        count = int(columns.num_logprobs[index])
        top_ids, top_values = token_ids[place, :count].astype(np.int32), values[place, :count]
        logprobs.append(TokenLogprobs(row, float(chosen[place]), int(ranks[place]), top_ids, top_values))
    return tuple(logprobs), tuple(candidates)
