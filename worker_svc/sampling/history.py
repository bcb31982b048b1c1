"""What the rules look at: the sampling rows that have any, and the tokens so far of all of them."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from worker_svc.steps import LogitRules


@dataclass(frozen=True, slots=True)
class History:
    """The tokens that the sampling rows have so far. All but `token_ids` are of shape [n]."""

    token_ids: Tensor
    """[rows of the worker, width] int32 on the device."""
    rows: NDArray[np.integer]
    num_prompt_tokens: NDArray[np.int64]
    num_tokens: NDArray[np.int64]
    """Prompt and output."""


@dataclass(frozen=True, slots=True)
class RuledRow:
    """A sampling row that has rules, and its place among the sampling rows."""

    place: int
    rules: LogitRules
