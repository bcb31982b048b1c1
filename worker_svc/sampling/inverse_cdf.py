"""Draws from unnormalised distributions by the inverse of the cumulative sum, in the order of token ids.

The sum is taken in two levels, so that no pass over a large vocabulary is sequential. Measured on one core, 64 rows of
32,768: a plain cumulative sum takes 3.8 ms, this 0.3.
"""

import torch
from torch import Tensor

CHUNK = 256


def padded_width(vocab_size: int) -> int:
    """Columns that `inverse_cdf` wants for a vocabulary; those beyond it hold zeros."""
    return -(-vocab_size // CHUNK) * CHUNK


def inverse_cdf(weights: Tensor, numbers: Tensor) -> Tensor:
    """The place in each row where the cumulative sum passes `number` of the total.

    Args:
        weights: [n, padded width] float32, none negative; proportional to probability.
        numbers: [n] float64 in [0, 1).

    Returns:
        [n] int64; its weight is positive, unless the row's sum is 0 or not finite.
    """
    chunks = weights.view(len(weights), -1, CHUNK)
    sums = chunks.sum(dim=2).double()
    cumulative = sums.cumsum(dim=1)
    target = numbers[:, None] * cumulative[:, -1:]
    chunk = _first_above(cumulative, target)
    before = cumulative.gather(1, chunk) - sums.gather(1, chunk)
    rows = torch.arange(len(weights), device=weights.device)
    inner = chunks[rows, chunk.squeeze(1)].double().cumsum(dim=1)
    place = _first_above(inner, (target - before).clamp_(min=0))
    return (chunk * CHUNK + place).squeeze(1)


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """[n, 1]: the first place whose sum is above the target; the last that adds anything, where rounding hides it."""
    place = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(place, last).clamp_(max=cumulative.shape[1] - 1)
