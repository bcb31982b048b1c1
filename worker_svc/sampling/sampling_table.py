"""Sampling parameters of every row, as columns on the host."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_svc.steps import Int32Array, RowSampling

_LEAST_TEMPERATURE = float(np.finfo(np.float32).tiny)


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters of several rows: parallel arrays of shape [n]. `RowSampling` says what each means."""

    temperature: NDArray[np.float32]
    top_k: NDArray[np.int64]
    top_p: NDArray[np.float32]
    min_p: NDArray[np.float32]
    seed: NDArray[np.uint64]
    wants_logprobs: NDArray[np.bool_]
    num_logprobs: NDArray[np.int64]
    num_candidates: NDArray[np.int64]
    """0 where the row draws a token."""
    has_rules: NDArray[np.bool_]
    rules: NDArray[np.object_]
    """`LogitRules`, or None where nothing is done to the logits."""

    @classmethod
    def empty(cls, num_rows: int) -> "SamplingColumns":
        """Columns of zeros."""
        return cls(
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int64),
            top_p=np.zeros(num_rows, np.float32),
            min_p=np.zeros(num_rows, np.float32),
            seed=np.zeros(num_rows, np.uint64),
            wants_logprobs=np.zeros(num_rows, np.bool_),
            num_logprobs=np.zeros(num_rows, np.int64),
            num_candidates=np.zeros(num_rows, np.int64),
            has_rules=np.zeros(num_rows, np.bool_),
            rules=np.full(num_rows, None, np.object_),
        )

    def take(self, indices: NDArray[np.integer]) -> "SamplingColumns":
        """The columns of some rows, copied."""
        return SamplingColumns(
            self.temperature[indices],
            self.top_k[indices],
            self.top_p[indices],
            self.min_p[indices],
            self.seed[indices],
            self.wants_logprobs[indices],
            self.num_logprobs[indices],
            self.num_candidates[indices],
            self.has_rules[indices],
            self.rules[indices],
        )

    def put(self, row: int, sampling: RowSampling) -> None:
        """Sets the parameters of one row."""
        # Devices may flush what is smaller to zero, and zero is greedy.
        self.temperature[row] = max(sampling.temperature, _LEAST_TEMPERATURE) if sampling.temperature > 0 else 0
        self.top_k[row] = sampling.top_k
        self.top_p[row] = sampling.top_p
        self.min_p[row] = sampling.min_p
        self.seed[row] = sampling.seed
        self.wants_logprobs[row] = sampling.logprobs is not None
        self.num_logprobs[row] = sampling.logprobs or 0
        self.num_candidates[row] = sampling.num_candidates or 0
        self.has_rules[row] = sampling.rules is not None
        self.rules[row] = sampling.rules

    def copy_rows(self, parents: Int32Array, children: Int32Array) -> None:
        """The children get the parents' parameters."""
        for column in (
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            self.seed,
            self.wants_logprobs,
            self.num_logprobs,
            self.num_candidates,
            self.has_rules,
            self.rules,
        ):
            column[children] = column[parents]
