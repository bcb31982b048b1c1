"""Log probabilities of the rows that draw a token and ask for them.

They are those of the distribution after penalties and temperature and before truncation; a greedy row has no
temperature.
Only the rows that ask cost anything.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.logprob_columns import LogprobColumns
from worker_svc.sampling.ranking import best_tokens
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.steps import TokenLogprobs
from worker_svc.to_device import to_device


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
    indices = np.flatnonzero(columns.wants_logprobs & (columns.num_candidates == 0))
    if not len(indices):
        return None
    index = to_device(indices, logits.device)
    most = int(columns.num_logprobs[indices].max())
    values = logprobs_of(logits[index], token_ids[index], columns.temperature[indices], most)
    return SampledLogprobs(indices, values)


def logprobs_of(logits: Tensor, token_ids: Tensor, temperature: NDArray[np.floating], num_top: int) -> LogprobValues:
    """Log probabilities of one token a line, and of the `num_top` most likely ones, fewer where there are not as many.

    Args:
        logits: [m, vocab] float32.
        token_ids: [m] int64.
        temperature: [m]; a line of temperature 0 is taken as it is.
        num_top: At least 0.
    """
    divisor = to_device(np.where(temperature > 0, temperature, np.float32(1)), logits.device)
    scores = (logits - logits.amax(dim=1, keepdim=True)).div_(divisor[:, None])
    logprobs = scores.log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids[:, None])
    # Of equally likely tokens the lower id goes first, as greedy choice has it: half precision makes many equal.
    token_order = torch.arange(logits.shape[1], device=logits.device)
    before = (logprobs > chosen) | ((logprobs == chosen) & (token_order < token_ids[:, None]))
    top_ids = best_tokens(logprobs, min(num_top, logits.shape[1]))
    return LogprobValues(chosen.squeeze(1), before.sum(dim=1) + 1, top_ids, logprobs.gather(1, top_ids))


def report_logprobs(
    columns: SamplingColumns, indices: np.ndarray, arrays: list[np.ndarray], usable: np.ndarray
) -> TokenLogprobs | None:
    """What the rows asked for, from the values of `LogprobValues.tensors()`; rows that are not usable get nothing."""
    places = np.flatnonzero(usable[indices])
    if not len(places):
        return None
    chosen, ranks, token_ids, values = (array[places] for array in arrays)
    samples = indices[places]
    reported = LogprobColumns.of_lines(
        chosen, ranks.astype(np.int32), token_ids.astype(np.int32), values, columns.num_logprobs[samples]
    )
    return TokenLogprobs(samples.astype(np.int32), reported)
