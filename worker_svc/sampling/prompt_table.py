"""What is known of every row's prompt, as columns on the host."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from worker_svc.steps import Int32Array


@dataclass(frozen=True, slots=True)
class PromptColumns:
    """Parallel arrays of shape [rows]."""

    num_tokens: NDArray[np.int64]
    wants_logprobs: NDArray[np.bool_]
    num_logprobs: NDArray[np.int64]
    """How many of the most likely tokens are reported beside each prompt token."""

    @classmethod
    def empty(cls, num_rows: int) -> "PromptColumns":
        """Columns of zeros."""
        return cls(np.zeros(num_rows, np.int64), np.zeros(num_rows, np.bool_), np.zeros(num_rows, np.int64))

    def put(self, row: int, num_tokens: int, logprobs: int | None) -> None:
        """Sets what is known of one row."""
        self.num_tokens[row] = num_tokens
        self.wants_logprobs[row] = logprobs is not None
        self.num_logprobs[row] = logprobs or 0

    def copy_rows(self, parents: Int32Array, children: Int32Array) -> None:
        """The children get what the parents have."""
        for column in (self.num_tokens, self.wants_logprobs, self.num_logprobs):
            column[children] = column[parents]
