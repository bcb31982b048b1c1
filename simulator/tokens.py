"""Samples of the modelled device: tokens of the right number and shape that never end a sequence."""

from collections.abc import Callable

import numpy as np

from quire.messages.logprob_columns import LogprobColumns
from scheduler_svc.core.beam_search import Candidates, num_candidates
from scheduler_svc.core.running_batch import RowTable
from scheduler_svc.core.step import SampleLogprobs, StepPlan, StepResult

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
