"""The rules by which each row of logits draws its token: temperature, top-k, top-p and min-p."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class DrawRules:
    """Contiguous arrays of shape [n], one element a row."""

    temperature: NDArray[np.float32]
    """0 takes the most likely token."""
    top_k: NDArray[np.int64]
    """0 for none."""
    top_p: NDArray[np.float64]
    min_score: NDArray[np.float32]
    """The lowest score that is kept, the logarithm of min-p; -infinity for none. A score is the difference to the
    highest logit, over temperature."""

    def check(self, num_rows: int) -> None:
        """Raises ValueError unless all arrays have one element a row."""
        for name in _NAMES:
            array = getattr(self, name)
            if array.shape != (num_rows,) or not array.flags.c_contiguous:
                raise ValueError(f"{name} has shape {array.shape}; expected ({num_rows},), contiguous")


_NAMES = tuple(field.name for field in fields(DrawRules))
