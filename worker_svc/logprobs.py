"""Log probabilities of the rows that ask for them.

They are those of the distribution after temperature and before truncation; of a greedy row, those of the raw logits.
Only the rows that ask cost anything.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from worker_svc.sampling_table import SamplingColumns
from worker_svc.steps import Int32Array, RowCandidates, TokenLogprobs
from worker_svc.transfer import to_device


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log probabilities of some of the sampling rows, on the device."""

    indices: np.ndarray
    """[m], which of the sampling rows these are."""
    chosen: Tensor
    """[m] float32."""
    ranks: Tensor
    """[m] int64, 1 for the most likely token."""
    top_token_ids: Tensor
    """[m, k] int64, best first; k is the most that any row asks for."""
    top_logprobs: Tensor
    """[m, k] float32."""

    def tensors(self) -> list[Tensor]:
        """What must reach the host."""
        return [self.chosen, self.ranks, self.top_token_ids, self.top_logprobs]


def gather_logprobs(logits: Tensor, token_ids: Tensor, columns: SamplingColumns) -> LogprobTensors | None:
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
    temperature = columns.temperature[indices]
    divisor = to_device(np.where(temperature > 0, temperature, np.float32(1)), logits.device)
    picked = logits[index]
    scores = (picked - picked.amax(dim=1, keepdim=True)).div_(divisor[:, None])
    logprobs = scores.log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids[index][:, None])
    ranks = (logprobs > chosen).sum(dim=1) + 1
    most = int(np.maximum(columns.num_logprobs[indices], columns.num_candidates[indices]).max())
    top = logprobs.topk(min(most, logits.shape[1]), dim=1)
    return LogprobTensors(indices, chosen.squeeze(1), ranks, top.indices, top.values)


def report_logprobs(
    rows: Int32Array, columns: SamplingColumns, indices: np.ndarray, arrays: list[np.ndarray], usable: np.ndarray
) -> tuple[tuple[TokenLogprobs, ...], tuple[RowCandidates, ...]]:
    """What the rows asked for, from the values of `LogprobTensors.tensors()`; rows that are not usable get nothing."""
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
