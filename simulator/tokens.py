"""What the modelled device samples: tokens of the right number and shape that end nothing."""

from collections.abc import Callable

import numpy as np

from quire.logprob_columns import LogprobColumns
from scheduler_svc.core.batch import RowTable
from scheduler_svc.core.beam_search import Candidates, num_candidates
from scheduler_svc.core.step import SampleLogprobs, StepPlan, StepResult

TokenSource = Callable[[StepPlan, RowTable], StepResult]
"""What the device answers to a step that was just planned."""

TOKEN_ID = 7
"""What every sequence samples, beams apart."""
_MAX_GAP = 4.0
"""Between the log probabilities of two candidates of a beam that follow each other."""
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def fake_tokens(plan: StepPlan, rows: RowTable, num_tokens: np.ndarray | None = None) -> StepResult:
    """One token for each sample, or as many as `num_tokens` says, always the same; and where the scheduler chooses,
    candidates that follow from the request's seed, the step and the row, so that beams fork and are dropped."""
    sampling = plan.samples[:, 0]
    drawing = sampling if num_tokens is None else sampling.repeat(num_tokens)
    return StepResult(
        plan.step_id,
        np.full(len(drawing), TOKEN_ID),
        logprobs=_logprobs(drawing, rows) if rows.wants_logprobs[sampling].any() else None,
        candidates=_candidates(plan.step_id, sampling[rows.dependent[sampling]], rows),
    )


def _candidates(step_id: int, beams: np.ndarray, rows: RowTable) -> dict[int, Candidates]:
    """Of each of these rows. No stop token: requests of a simulation end by their length."""
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
    """float64[rows, count] in [0, 1). Each follows from seed, step, row and place alone, as the hash SplitMix64 of
    them: a generator for each row takes most of the time of a simulated step."""
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
    """Where the best of several sequences are selected; all are equally good."""
    samples = np.flatnonzero(rows.wants_logprobs[sampling])
    count = len(samples)
    columns = LogprobColumns.of_lines(
        np.full(count, -1.0, np.float32),
        np.ones(count, np.int32),
        np.zeros((count, 0), np.int32),
        np.zeros((count, 0), np.float32),
    )
    return SampleLogprobs(samples, columns)
