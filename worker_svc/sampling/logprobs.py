"""Log probabilities: of drawn tokens, of prompt tokens, and of the candidates of rows that search.

Log probabilities of a drawn token come from the distribution after penalties and temperature and before truncation; a
greedy row has no temperature. A candidate has the log probability of the model, without temperature or truncation; the
rules of its row change it after normalisation, as in transformers' beam search, and a banned token has -infinity. The
prompt token at position p is scored by the unchanged logits of position p - 1, in the step that computes position p -
1.

Only rows that ask for them cost anything.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.messages.logprob_columns import LogprobColumns
from worker_svc.models.base import CausalLM
from worker_svc.sampling.sampling_table import SamplingColumns
from worker_svc.sampling.truncation import best_tokens
from worker_svc.step import Batch, Int32Array, PromptLogprobs, RowCandidates, TokenLogprobs
from worker_svc.streams import to_device

PIECE = 256
"""Prompt positions whose logits are computed at once: a long prompt takes no more memory than a short one."""

A = TypeVar("A")
B = TypeVar("B")


@dataclass(frozen=True, slots=True)
class LogprobValues(Generic[A]):
    """Log probabilities at m positions: tensors on the device, arrays on the host."""

    chosen: A
    """[m] float32."""
    ranks: A
    """[m] int64, 1 for the most likely token."""
    top_token_ids: A
    """[m, k] int64, best first; k is the largest number that any position asks for."""
    top_logprobs: A
    """[m, k] float32."""

    def map(self, function: Callable[[A], B]) -> "LogprobValues[B]":
        return LogprobValues(
            function(self.chosen), function(self.ranks), function(self.top_token_ids), function(self.top_logprobs)
        )


def logprobs_of(
    logits: Tensor,
    token_ids: Tensor,
    temperature: NDArray[np.floating],
    num_top: int,
    named: Mapping[int, Int32Array] | None = None,
) -> LogprobValues[Tensor]:
    """Log probabilities of one token a line, and of the `num_top` most likely tokens, or of all if there are fewer.

    Args:
        logits: [m, vocab] float32.
        token_ids: [m] int64.
        temperature: [m]; 0 leaves a line as it is.
        num_top: at least 0.
        named: lines that report these tokens, at most `num_top`, instead of the most likely ones.
    """
    divisor = to_device(np.where(temperature > 0, temperature, np.float32(1)), logits.device)
    scores = (logits - logits.amax(dim=1, keepdim=True)).div_(divisor[:, None])
    logprobs = scores.log_softmax(dim=1)
    chosen = logprobs.gather(1, token_ids[:, None])
    # If tokens are equally likely, the lower id comes first, as in greedy choice; half precision makes many equal.
    token_order = torch.arange(logits.shape[1], device=logits.device)
    before = (logprobs > chosen) | ((logprobs == chosen) & (token_order < token_ids[:, None]))
    top_ids = best_tokens(logprobs, min(num_top, logits.shape[1]))
    for line, tokens in (named or {}).items():
        top_ids[line, : len(tokens)] = to_device(tokens.astype(np.int64), logits.device)
    return LogprobValues(chosen.squeeze(1), before.sum(dim=1) + 1, top_ids, logprobs.gather(1, top_ids))


def _logprob_rows(columns: SamplingColumns) -> NDArray[np.int64]:
    """Indices of the sampling rows that report log probabilities."""
    return np.flatnonzero(columns.wants_logprobs & (columns.num_candidates == 0))


def gather_logprobs(logits: Tensor, token_ids: Tensor, columns: SamplingColumns) -> LogprobValues[Tensor] | None:
    """The log probabilities that sampling rows request; None if no row does.

    Args:
        logits: [n, vocab] float32.
        token_ids: [n] int64, the drawn tokens.
        columns: Parameters of the n rows.
    """
    rows = _logprob_rows(columns)
    if not len(rows):
        return None
    index = to_device(rows, logits.device)
    num_top = int(columns.num_logprobs[rows].max())
    named = {line: each for line, each in enumerate(columns.logprob_token_ids[rows]) if each is not None}
    return logprobs_of(logits[index], token_ids[index], columns.temperature[rows], num_top, named)


def report_logprobs(
    columns: SamplingColumns, values: LogprobValues[np.ndarray], usable: NDArray[np.bool_]
) -> TokenLogprobs | None:
    """The requested log probabilities of the rows; rows that are not usable have none."""
    rows = _logprob_rows(columns)
    places = np.flatnonzero(usable[rows])
    if not len(places):
        return None
    samples, values = rows[places], values.map(lambda array: array[places])
    reported = LogprobColumns.of_lines(
        values.chosen,
        values.ranks.astype(np.int32),
        values.top_token_ids.astype(np.int32),
        values.top_logprobs,
        columns.num_logprobs[samples],
    )
    return TokenLogprobs(samples.astype(np.int32), reported)


@dataclass(frozen=True, slots=True)
class CandidateValues(Generic[A]):
    """The best tokens of m of the sampling rows: tensors on the device, arrays on the host."""

    token_ids: A
    """[m, k] int64, best first, of equals the lower id first; k is the largest number that any row asks for."""
    logprobs: A
    """[m, k] float32."""

    def map(self, function: Callable[[A], B]) -> "CandidateValues[B]":
        return CandidateValues(function(self.token_ids), function(self.logprobs))


def gather_candidates(logits: Tensor, columns: SamplingColumns) -> CandidateValues[Tensor] | None:
    """The candidates that rows request, at most one per token of the vocabulary; None if no row does.

    Args:
        logits: [n, vocab] float32. Rows with rules or a constraint have log probabilities already
            (`apply_logit_rules`).
        columns: Parameters of the n rows.
    """
    rows = np.flatnonzero(columns.num_candidates > 0)
    if not len(rows):
        return None
    if len(rows) < len(logits):
        logits = logits[to_device(rows, logits.device)]
    unnormalised = np.flatnonzero(~columns.changes_logits[rows])
    if len(unnormalised) == len(rows):
        logits = logits.log_softmax(dim=1)
    elif len(unnormalised):
        index = to_device(unnormalised, logits.device)
        logits = logits.index_copy(0, index, logits[index].log_softmax(dim=1))
    token_ids = best_tokens(logits, min(int(columns.num_candidates[rows].max()), logits.shape[1]))
    return CandidateValues(token_ids, logits.gather(1, token_ids))


def report_candidates(
    rows: Int32Array, columns: SamplingColumns, values: CandidateValues[np.ndarray], usable: NDArray[np.bool_]
) -> tuple[RowCandidates, ...]:
    """The requested log probabilities of the sampling `rows`; rows that are not usable have none."""
    token_ids, counts = values.token_ids.astype(np.int32), columns.num_candidates
    return tuple(
        RowCandidates(int(rows[index]), token_ids[place, : counts[index]], values.logprobs[place, : counts[index]])
        for place, index in enumerate(np.flatnonzero(counts > 0))
        if usable[index]
    )


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """The prompt tokens of a batch that are scored: `counts` consecutive ones of each of r rows."""

    rows: Int32Array
    """[r]"""
    first_positions: NDArray[np.int64]
    """[r], index into the sequence of the first token that is scored."""
    counts: NDArray[np.int64]
    """[r], at least 1 each."""
    first_tokens: NDArray[np.int64]
    """[r], index in the flat batch of the token before it."""
    num_logprobs: NDArray[np.int64]
    """[r], number of the most likely tokens that each row requests."""

    def spread(self, values: NDArray[np.generic]) -> np.ndarray:
        """[r] -> one entry for each token that is scored."""
        return np.repeat(values, self.counts)

    def count_up(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Consecutive numbers from each row's start on, one for each token that is scored."""
        before = np.cumsum(self.counts) - self.counts
        return np.arange(int(self.counts.sum())) + self.spread(starts - before)


def plan_prompt_logprobs(batch: Batch, columns: SamplingColumns) -> PromptPlan | None:
    """The log probabilities that the batch's rows request; None if no row does. `columns` cover all rows."""
    places = np.flatnonzero(columns.wants_prompt_logprobs[batch.rows])
    if not len(places):
        return None
    rows = batch.rows[places]
    starts = batch.num_computed_tokens[places].astype(np.int64)
    new = batch.num_new_tokens[places].astype(np.int64)
    counts = np.minimum(starts + new, columns.num_prompt_tokens[rows] - 1) - starts
    first_tokens = np.cumsum(batch.num_new_tokens, dtype=np.int64)[places] - new
    scored = counts > 0
    if not scored.any():
        return None
    rows = rows[scored]
    return PromptPlan(rows, starts[scored] + 1, counts[scored], first_tokens[scored], columns.num_prompt_logprobs[rows])


def compute_prompt_logprobs(
    model: CausalLM, hidden: Tensor, plan: PromptPlan, token_ids: Tensor
) -> LogprobValues[Tensor]:
    """Log probabilities of all tokens of a plan, of the logits as they are.

    Args:
        model: Computes logits of hidden states.
        hidden: [tokens of the batch, hidden].
        token_ids: [rows, positions], of all rows.
    """
    tokens, token_rows, positions = to_device(
        np.stack((plan.count_up(plan.first_tokens), plan.spread(plan.rows), plan.count_up(plan.first_positions))),
        hidden.device,
    )
    targets = token_ids[token_rows, positions].long()
    unchanged, num_top = np.zeros(len(targets), np.float32), int(plan.num_logprobs.max())
    pieces = [
        logprobs_of(model.logits(hidden[tokens[part]]), targets[part], unchanged[part], num_top)
        for part in (slice(start, start + PIECE) for start in range(0, len(unchanged), PIECE))
    ]
    return LogprobValues(
        torch.cat([piece.chosen for piece in pieces]),
        torch.cat([piece.ranks for piece in pieces]),
        torch.cat([piece.top_token_ids for piece in pieces]),
        torch.cat([piece.top_logprobs for piece in pieces]),
    )


def report_prompt_logprobs(plan: PromptPlan, values: LogprobValues[np.ndarray]) -> tuple[PromptLogprobs, ...]:
    """The requested log probabilities of the rows."""
    reports, start = [], 0
    rows = zip(plan.rows.tolist(), plan.first_positions.tolist(), plan.counts.tolist(), plan.num_logprobs, strict=True)
    for row, first_position, count, width in rows:
        places = slice(start, start + count)
        columns = LogprobColumns.of_lines(
            values.chosen[places],
            values.ranks[places].astype(np.int32),
            values.top_token_ids[places, :width].astype(np.int32),
            values.top_logprobs[places, :width],
        )
        reports.append(PromptLogprobs(row, first_position, columns))
        start += count
    return tuple(reports)


def find_failed_prompts(plan: PromptPlan, values: LogprobValues[np.ndarray]) -> tuple[int, ...]:
    """Rows with a token that was scored by logits which are not finite."""
    # NaN or +infinity in the logits makes all their log probabilities NaN; nothing else makes one NaN.
    return tuple(np.unique(plan.spread(plan.rows)[np.isnan(values.chosen)]).tolist())
