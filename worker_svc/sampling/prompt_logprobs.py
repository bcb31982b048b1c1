"""Log probabilities of prompt tokens, for the rows that ask for them.

The token at position p is judged by the logits of position p - 1, in the step that computes that position. Logits are
made in pieces, so that a long prompt over a large vocabulary takes no more memory than a short one.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.logprob_columns import LogprobColumns
from worker_svc.models.base import CausalLM
from worker_svc.sampling.logprobs import LogprobValues, logprobs_of
from worker_svc.sampling.prompt_table import PromptColumns
from worker_svc.steps import Batch, Int32Array, PromptLogprobs, Step
from worker_svc.to_device import to_device

PIECE = 256
"""Positions whose logits are made at once."""


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Which prompt tokens of a batch are judged: of each row `counts` consecutive ones."""

    rows: Int32Array
    """[r]"""
    first_positions: NDArray[np.int64]
    """[r], index into the sequence of the first token that is judged."""
    counts: NDArray[np.int64]
    """[r], at least 1 each."""
    first_tokens: NDArray[np.int64]
    """[r], index in the flat batch of the token before it."""

    def spread(self, values: NDArray[np.generic]) -> np.ndarray:
        """[r] -> one entry for each token that is judged."""
        return np.repeat(values, self.counts)

    def count_up(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers from each row's start on, one for each token that is judged."""
        before = np.cumsum(self.counts) - self.counts
        return np.arange(int(self.counts.sum())) + self.spread(starts - before)


@dataclass(frozen=True, slots=True)
class PromptResult:
    """Log probabilities of all tokens of a plan, on the device."""

    plan: PromptPlan
    num_logprobs: NDArray[np.int64]
    """[r], how many of the most likely tokens each row wants."""
    values: LogprobValues


def plan_prompt_logprobs(batch: Batch, prompts: PromptColumns) -> PromptPlan | None:
    """What the batch's rows ask for; None when they ask for nothing."""
    places = np.flatnonzero(prompts.wants_logprobs[batch.rows])
    if not len(places):
        return None
    picked = batch.rows[places]
    starts = batch.num_computed_tokens[places].astype(np.int64)
    new = batch.num_new_tokens[places].astype(np.int64)
    counts = np.minimum(starts + new, prompts.num_tokens[picked] - 1) - starts
    first_tokens = np.cumsum(batch.num_new_tokens, dtype=np.int64)[places] - new
    judged = counts > 0
    if not judged.any():
        return None
    return PromptPlan(picked[judged], starts[judged] + 1, counts[judged], first_tokens[judged])


def compute_prompt_logprobs(
    model: CausalLM, hidden: Tensor, plan: PromptPlan, token_ids: Tensor, num_logprobs: np.ndarray
) -> PromptResult:
    """Log probabilities of the logits as they are: temperature, penalties and bias are for what is drawn.

    Args:
        model: Makes logits of hidden states.
        hidden: [tokens of the batch, hidden].
        plan: Which tokens are judged.
        token_ids: Of all rows, [rows, positions].
        num_logprobs: [rows], how many of the most likely tokens each row asks for.
    """
    tokens, token_rows, positions = to_device(
        np.stack((plan.count_up(plan.first_tokens), plan.spread(plan.rows), plan.count_up(plan.first_positions))),
        hidden.device,
    )
    targets = token_ids[token_rows, positions].long()
    raw = np.zeros(len(targets), np.float32)
    asked = num_logprobs[plan.rows]
    most = int(asked.max())
    pieces = [
        logprobs_of(model.logits(hidden[tokens[part]]), targets[part], raw[part], most)
        for part in (slice(start, start + PIECE) for start in range(0, len(raw), PIECE))
    ]
    values = LogprobValues(*(torch.cat(each) for each in zip(*(piece.tensors() for piece in pieces), strict=True)))
    return PromptResult(plan, asked, values)


def report_prompt_logprobs(result: PromptResult, arrays: list[np.ndarray]) -> tuple[PromptLogprobs, ...]:
    """What the rows asked for, from the values of `LogprobValues.tensors()`."""
    chosen, ranks, token_ids, values = arrays
    plan, reports, start = result.plan, [], 0
    entries = zip(
        plan.rows.tolist(), plan.first_positions.tolist(), plan.counts.tolist(), result.num_logprobs, strict=True
    )
    for row, first_position, count, width in entries:
        places = slice(start, start + count)
        columns = LogprobColumns.of_lines(
            chosen[places],
            ranks[places].astype(np.int32),
            token_ids[places, :width].astype(np.int32),
            values[places, :width],
        )
        reports.append(PromptLogprobs(row, first_position, columns))
        start += count
    return tuple(reports)


def find_failed_rows(result: PromptResult, arrays: list[np.ndarray]) -> tuple[int, ...]:
    """Rows with a token that was judged by logits which are not finite."""
    chosen, *_ = arrays
    # NaN or +infinity in the logits makes all their log probabilities NaN; nothing else makes one of them so.
    return tuple(np.unique(result.plan.spread(result.plan.rows)[np.isnan(chosen)]).tolist())


class FailingRows:
    """Rows that fail when they sample, until another sequence has the row: their prompt was judged by logits that are
    not finite, or their sampling was refused.

    A step reports failures only of rows that sample in it. Until then a prompt's log probabilities are reported as
    they are: none reaches a client before the request ends.
    """

    def __init__(self) -> None:
        self._refusals: dict[int, str | None] = {}

    def take(self, step: Step, failed: Iterable[int]) -> tuple[NDArray[np.bool_], dict[int, str]]:
        """Which samples of a step fail, [s] bool, and the reasons of the rows whose sampling was refused. To be called
        for all steps, in order.

        Args:
            failed: rows whose prompt is found to fail in this step.
        """
        changes, samples = step.row_changes, step.batch.samples
        if self._refusals:
            for row in (*(each.row for each in changes.assign), *changes.fork[:, 1].tolist()):
                self._refusals.pop(row, None)
        for each in changes.assign:
            if each.sampling.refusal is not None:
                self._refusals[each.row] = each.sampling.refusal
        for row in failed:
            self._refusals.setdefault(row, None)
        if not self._refusals:
            return np.zeros(len(samples), np.bool_), {}
        reasons = {row: self._refusals.get(source) for row, source in samples.tolist()}
        refused = {row: reason for row, reason in reasons.items() if reason is not None}
        return np.isin(samples[:, 1], list(self._refusals)), refused
