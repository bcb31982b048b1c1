"""From a mask function of transformers to the sliding window that it means."""

from collections.abc import Callable
from typing import Any

import torch

from worker_svc.models.transformers_refusals import UnsupportedModelError


def window_of(mask_function: Callable[..., Any], num_positions: int) -> int | None:
    """How many tokens, itself included, a token sees; None when it is all before it.

    Args:
        mask_function: (batch index, head index, query positions, key positions) -> what is seen, by broadcasting.
        num_positions: that the model knows; a window that is not smaller means nothing.

    Raises:
        UnsupportedModelError: another pattern: both directions, chunks, anything that depends on the tokens.
    """
    keys = torch.arange(num_positions)

    def row(position: int) -> torch.Tensor:
        return torch.as_tensor(mask_function(0, 0, torch.tensor(position), keys)).expand(num_positions)

    # A token sees itself at least: with a mask that hides all, the first row below is not as expected.
    width = max(int(row(num_positions - 1).sum()), 1)
    middle = num_positions // 2
    for position in {0, 1, width - 1, width, width + 1, middle, middle + 1, num_positions - 2, num_positions - 1}:
        if not 0 <= position < num_positions:
            continue
        expected = (keys <= position) & (keys > position - width)
        if not torch.equal(row(position).bool(), expected):
            raise UnsupportedModelError("its attention is neither causal nor a sliding window")
    return None if width == num_positions else width
