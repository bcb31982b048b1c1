"""Samples of the modelled device: tokens of the right number and shape that never end a sequence; drafts too."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from quire.messages.logprob_columns import LogprobColumns
from scheduler_svc.core.beam_search import Candidates, num_candidates
from scheduler_svc.core.running_batch import RowTable
from scheduler_svc.core.step import SampleLogprobs, StepPlan, StepResult, StepWork
from simulator.costs import CostModel

TokenSource = Callable[[StepPlan, RowTable], StepResult]
"""Makes the device's answer to a step that was just planned."""

TOKEN_ID = 7
"""The token that every sequence samples, except beams."""
_MAX_GAP = 4.0
"""Maximum difference between the log probabilities of two consecutive candidates of a beam."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def fake_tokens(plan: StepPlan, rows: RowTable, num_tokens: np.ndarray | None = None) -> StepResult:
    """One token for each sample, or `num_tokens` tokens, always the same. If the scheduler chooses, candidates that are
    derived from the request's seed, the step and the row, so that beams fork and are dropped."""
    sampling = plan.samples[:, 0]
    drawing = sampling if num_tokens is None else sampling.repeat(num_tokens)
    return StepResult(
        plan.step_id,
        np.full(len(drawing), TOKEN_ID),
        logprobs=_logprobs(drawing, rows) if rows.wants_logprobs[sampling].any() else None,
        candidates=_candidates(plan.step_id, sampling[rows.dependent[sampling]], rows),
    )


def _candidates(step_id: int, beams: np.ndarray, rows: RowTable) -> dict[int, Candidates]:
    """The candidates of these rows, without stop tokens: requests of a simulation end by their length."""
    if not len(beams):
        return {}
    requests = [sequence.request for row in beams.tolist() if (sequence := rows.sequences[row]) is not None]
    counts = [num_candidates(each.beam.width, len(each.stop_token_ids)) for each in requests if each.beam is not None]
    seeds = np.array([request.sampling.seed for request in requests], np.uint64)
    logprobs = -np.cumsum(_MAX_GAP * uniform(seeds, step_id, beams, max(counts)), axis=1)
    return {
        row: Candidates(range(TOKEN_ID, TOKEN_ID + count), values[:count])
        for row, count, values in zip(beams.tolist(), counts, logprobs.tolist(), strict=True)
    }


def uniform(seeds: np.ndarray, step_id: int, rows: np.ndarray, count: int) -> np.ndarray:
    """float64[rows, count] in [0, 1). Each value is a SplitMix64 hash of only seed, step, row and place: a generator
    for each row would take most of the time of a simulated step."""
    bits = _mixed(seeds) ^ np.uint64(step_id)
    bits = _mixed(_mixed(bits) ^ rows.astype(np.uint64))
    bits = _mixed(bits[:, None] + np.arange(count, dtype=np.uint64) * _GOLDEN)
    return (bits >> np.uint64(11)) * 2.0**-53


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = bits + _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def _logprobs(sampling: np.ndarray, rows: RowTable) -> SampleLogprobs:
    """Equal log probabilities, for requests that select the best of several sequences."""
    samples = np.flatnonzero(rows.wants_logprobs[sampling])
    count = len(samples)
    columns = LogprobColumns.of_lines(
        np.full(count, -1.0, np.float32),
        np.ones(count, np.int32),
        np.zeros((count, 0), np.int32),
        np.zeros((count, 0), np.float32),
    )
    return SampleLogprobs(samples, columns)


_MIN_GAIN = 1.12
"""Minimum gain in tokens a second that drafts must promise, as in a worker."""
_MIN_FIXED_TOKENS, _MAX_FIXED_TOKENS, _FEW_ROWS = 2, 1024, 8


@dataclass(frozen=True, slots=True)
class SyntheticDrafts:
    """Samples of the device with drafts, each right with a given probability: a `TokenSource`.

    The simulated device has no text, so it makes no guesses. It verifies as many drafts of each row as the scheduler
    allows and as pay by the cost model, as a worker does (ADR 59). A draft is right if all before it are, and if a
    number derived from the request's seed, the step and the place is below the acceptance. vLLM's synthetic rejection
    sampler does the same on a real server, whose text then changes.

    Attributes:
        acceptance: The probability that a draft is right if all before it are, in [0, 1].
    """

    costs: CostModel
    acceptance: float

    def __call__(self, plan: StepPlan, rows: RowTable) -> StepResult:
        if plan.max_drafts is None:
            return fake_tokens(plan, rows)
        num_drafts = self._worth_it(plan, plan.max_drafts)
        sampling, most = plan.samples[:, 0], int(num_drafts.max(initial=0))
        sequences = [rows.sequences[row] for row in sampling.tolist()]
        seeds = np.array([0 if each is None else each.request.sampling.seed for each in sequences], np.uint64)
        is_right = uniform(seeds, plan.step_id, sampling, most) < self.acceptance
        is_right &= np.arange(most) < num_drafts[:, None]
        num_tokens = 1 + np.logical_and.accumulate(is_right, axis=1).sum(1, dtype=np.int64)
        return replace(fake_tokens(plan, rows, num_tokens), num_tokens=num_tokens, num_drafts=num_drafts)

    def _worth_it(self, plan: StepPlan, max_drafts: NDArray[np.int64]) -> NDArray[np.int64]:
        """The numbers of drafts that give the most tokens a second, by the time of a step with only the samples."""
        counts = [np.minimum(max_drafts, most) for most in range(int(max_drafts.max(initial=0)) + 1)]
        decodes, read = len(plan.samples), int(_ends(plan).sum())
        right = np.cumsum(self.acceptance ** np.arange(len(counts)))
        plain = StepWork(decodes, decodes, 0, 0, read, read)
        rates = [right[each].sum() / self.costs.seconds(_with(plain, plan, each)).device for each in counts]
        best = int(np.argmax(rates))
        return counts[best] if rates[best] >= _MIN_GAIN * rates[0] else counts[0]


def work_with(plan: StepPlan, num_drafts: NDArray[np.int64] | None) -> StepWork:
    """The work of a step that verifies these drafts of each sample, each as a row of one token over its context."""
    work = StepWork.of(plan)
    return work if num_drafts is None else _with(work, plan, num_drafts)


def _with(work: StepWork, plan: StepPlan, num_drafts: NDArray[np.int64]) -> StepWork:
    count, read = int(num_drafts.sum()), int((num_drafts * _ends(plan) + num_drafts * (num_drafts + 1) // 2).sum())
    return replace(
        work,
        num_tokens=work.num_tokens + count,
        num_samples=work.num_samples + count,
        context_tokens=work.context_tokens + read,
        attended_pairs=work.attended_pairs + read,
    )


def _ends(plan: StepPlan) -> NDArray[np.int64]:
    """The number of tokens of each sample's row that are computed after the step."""
    ends = np.zeros(int(plan.rows.max(initial=0)) + 1, np.int64)
    ends[plan.rows] = plan.num_computed_tokens + plan.num_new_tokens
    return ends[plan.samples[:, 1]]


def fixed_tokens(costs: CostModel) -> int:
    """The fixed time of a decode step, as the number of tokens that take as long. A worker reports the same to its
    scheduler."""
    one, few = (costs.seconds(StepWork(count, count, 0, 0, count, count)).device for count in (1, _FEW_ROWS))
    of_token = (few - one) / (_FEW_ROWS - 1)
    if one >= _MAX_FIXED_TOKENS * of_token:
        return _MAX_FIXED_TOKENS
    return max(int(one / of_token) - 1, _MIN_FIXED_TOKENS)
