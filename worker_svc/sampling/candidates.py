"""Candidates of the rows that search instead of drawing: their best next tokens, by log probability.

A candidate's log probability is that of the model alone, without temperature or truncation; rules that the row asks for
have changed it after it was normalised, as transformers does in beam search. A banned token has -infinity.
"""

from dataclasses import dataclass

import numpy as np
from torch import Tensor

from worker_svc.sampling.ranking import best_tokens
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.steps import Int32Array, RowCandidates
from worker_svc.to_device import to_device


@dataclass(frozen=True, slots=True)
class Candidates:
    """The best tokens of m of the sampling rows, on the device."""

    indices: np.ndarray
    """[m], which of the sampling rows these are."""
    token_ids: Tensor
    """[m, k] int64, best first, of equals the lower id first; k is the most that any of the rows wants."""
    logprobs: Tensor
    """[m, k] float32."""

    def tensors(self) -> list[Tensor]:
        """What must reach the host."""
        return [self.token_ids, self.logprobs]


def gather_candidates(logits: Tensor, columns: SamplingColumns) -> Candidates | None:
    """The candidates that rows ask for, at most as many as there are tokens; None when none does.

    Args:
        logits: [n, vocab] float32. Rows with rules hold log probabilities already (`apply_logit_rules`).
        columns: Parameters of the n rows.
    """
    indices = np.flatnonzero(columns.num_candidates > 0)
    if not len(indices):
        return None
    if len(indices) < len(logits):
        logits = logits[to_device(indices, logits.device)]
    logprobs = _normalised(logits, np.flatnonzero(~columns.has_rules[indices]))
    count = min(int(columns.num_candidates[indices].max()), logits.shape[1])
    token_ids = best_tokens(logprobs, count)
    return Candidates(indices, token_ids, logprobs.gather(1, token_ids))


def _normalised(logits: Tensor, lines: np.ndarray) -> Tensor:
    """The logits with these lines made log probabilities."""
    if len(lines) == len(logits):
        return logits.log_softmax(dim=1)
    if not len(lines):
        return logits
    index = to_device(lines, logits.device)
    return logits.index_copy(0, index, logits[index].log_softmax(dim=1))


def report_candidates(
    rows: Int32Array, columns: SamplingColumns, indices: np.ndarray, arrays: list[np.ndarray], usable: np.ndarray
) -> tuple[RowCandidates, ...]:
    """What the rows asked for, from the values of `Candidates.tensors()`; rows that are not usable get nothing."""
    token_ids, logprobs = arrays
    token_ids, counts = token_ids.astype(np.int32), columns.num_candidates
    return tuple(
        RowCandidates(int(rows[index]), token_ids[place, : counts[index]], logprobs[place, : counts[index]])
        for place, index in enumerate(indices)
        if usable[index]
    )
