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


def fake_tokens(plan: StepPlan, rows: RowTable) -> StepResult:
    """One token for each sample, always the same; and where the scheduler chooses, candidates that follow from the
    step, the row and the beam's length, so that beams fork and are dropped."""
    sampling = plan.samples[:, 0]
    candidates: dict[int, Candidates] = {}
    for row in sampling[rows.dependent[sampling]].tolist():
        candidates[row] = _candidates(plan.step_id, row, rows)
    return StepResult(
        plan.step_id,
        np.full(len(sampling), TOKEN_ID),
        logprobs=_logprobs(sampling, rows) if rows.wants_logprobs[sampling].any() else None,
        candidates=candidates,
    )


def _candidates(step_id: int, row: int, rows: RowTable) -> Candidates:
    sequence = rows.sequences[row]
    assert sequence is not None
    assert sequence.request.beam is not None
    count = num_candidates(sequence.request.beam.width, len(sequence.request.stop_token_ids))
    rng = np.random.default_rng((sequence.request.sampling.seed, step_id, row))
    logprobs = -np.cumsum(rng.uniform(0, _MAX_GAP, count))
    # No stop token: requests of a simulation end by their length.
    return Candidates(range(TOKEN_ID, TOKEN_ID + count), logprobs.tolist())


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
