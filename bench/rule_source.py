"""Drives the scheduler's core without a worker: a rule answers its steps, only with arrays, which is fast enough for
millions of requests."""

from typing import Any

import numpy as np

from quire.messages.logprob_columns import LogprobColumns
from scheduler_svc.core.beam_search import Candidates
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.step import SampleLogprobs, StepPlan, StepResult

CLIENT = ClientId(0)
VOCAB_SIZE = 53
"""A prime, so that candidates that lie a fixed distance apart are distinct."""


class RuleSource:
    """Token ids follow from the step and the row, and run through the vocabulary evenly.

    Rows that report candidates or log probabilities are remembered from their assignment on, and through forks, as a
    worker does. In every `fail_every`-th step one row fails; 0 lets none fail.
    """

    def __init__(self, max_num_rows: int, fail_every: int = 0) -> None:
        self._num_candidates = np.zeros(max_num_rows, dtype=np.int64)
        self._wants_logprobs = np.zeros(max_num_rows, dtype=bool)
        self._fail_every = fail_every

    def __call__(self, plan: StepPlan) -> StepResult:
        for assigned in plan.assign:
            self._num_candidates[assigned.row] = assigned.sampling.num_candidates or 0
            self._wants_logprobs[assigned.row] = assigned.sampling.logprobs is not None
        if len(plan.fork):
            for remembered in (self._num_candidates, self._wants_logprobs):
                remembered[plan.fork[:, 1]] = remembered[plan.fork[:, 0]]
        rows = plan.samples[:, 0]
        token_ids = (plan.step_id * 31 + rows * 17) % VOCAB_SIZE
        reporting = np.flatnonzero(self._num_candidates[rows])
        candidates = {
            int(rows[index]): _candidates(int(token_ids[index]), int(self._num_candidates[rows[index]]))
            for index in reporting.tolist()
        }
        failures = self._failures(plan.step_id, rows)
        samples = np.flatnonzero(self._wants_logprobs[rows] & ~np.isin(rows, list(failures)))
        return StepResult(
            plan.step_id,
            token_ids,
            SampleLogprobs(samples, _logprobs(token_ids[samples])) if len(samples) else None,
            failures,
            candidates,
        )

    def _failures(self, step_id: int, rows: np.ndarray) -> dict[int, str]:
        if not self._fail_every or step_id % self._fail_every or not len(rows):
            return {}
        return {int(rows[step_id % len(rows)]): "fails by rule"}


def key_of(index: int) -> RequestKey:
    """The key of the request with this number."""
    return RequestKey(CLIENT, Handle(index))


def make_request(
    index: int, prompt: list[int], max_tokens: int, *, logprobs: int | None = None, **changes: Any
) -> Request:
    """A request with this number that ends after `max_tokens` tokens, unless token 2 is sampled."""
    sampling = RowSampling(index, logprobs=logprobs)
    return Request(key_of(index), str(index), prompt, sampling, max_tokens, frozenset([2]), **changes)


def constant_tokens(plan: StepPlan, token_id: int = 7) -> StepResult:
    """A result with the same token in each row. Token 2 ends the requests of `make_request`."""
    return StepResult(plan.step_id, np.full(len(plan.samples), token_id))


def _logprobs(token_ids: np.ndarray) -> LogprobColumns:
    """Log probabilities that depend only on the tokens."""
    ones, none = np.ones(len(token_ids), np.int32), np.zeros(0, np.int32)
    return LogprobColumns(-0.01 * token_ids.astype(np.float32), ones, 0 * ones, none, none.astype(np.float32))


def _candidates(first: int, count: int) -> Candidates:
    """The best `count` of the vocabulary, beginning with `first`; log probabilities fall."""
    count = min(count, VOCAB_SIZE)
    token_ids = [(first + 7 * place) % VOCAB_SIZE for place in range(count)]
    return Candidates(token_ids, [-0.5 * (place + 1) - 0.001 * first for place in range(count)])
