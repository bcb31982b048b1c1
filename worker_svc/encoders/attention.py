"""Attention in both directions, over texts that lie one after the other."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from quire_kernels.backends import text_kernels_for

_QUERIES = 128
"""Queries that are computed at once if there is a window."""


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int] | NDArray[np.int32],
    *,
    scale: float,
    window: int | None = None,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token attends to the tokens of its text.

    Args:
        q: [T, heads, head size]; any strides, as k and v.
        k, v: [T, KV heads, head size]; the number of heads is a multiple of the number of KV heads.
        lengths: number of tokens of each text, at least 1; their sum is T.
        scale: of the products of queries and keys.
        window: maximum distance of a key from its query; None: no limit.
        bias: [heads, 2 * n - 1] float32, n at least the longest text: added to scores, at the place
            (key - query) + n - 1.

    Returns:
        [T, heads, head size], contiguous. The bits of a text's tokens do not depend on the other texts.
    """
    if (kernels := text_kernels_for(q.device, q.dtype)) is not None:
        return kernels.attention(q, k, v, lengths, scale=scale, window=window, bias=bias)
    output = q.new_empty(q.shape)
    for first, count, length in _runs_of(lengths):
        query, key, value, out = (
            each[first : first + count * length].unflatten(0, (count, length)).transpose(1, 2)
            for each in (q, k, v, output)
        )
        for queries, keys in _blocks(length, window):
            mask = _mask(queries, keys, window, bias, q.dtype)
            attended = functional.scaled_dot_product_attention(
                *(query[:, :, queries], key[:, :, keys], value[:, :, keys]),
                attn_mask=mask,
                scale=scale,
                enable_gqa=q.shape[1] != k.shape[1],
            )
            out[:, :, queries].copy_(attended)
    return output


def _blocks(length: int, window: int | None) -> Iterator[tuple[slice, slice]]:
    """Queries, and the keys that one of them may attend to. With a window, so few that no mask is large."""
    if window is None:
        yield slice(0, length), slice(0, length)
        return
    for start in range(0, length, _QUERIES):
        end = min(start + _QUERIES, length)
        yield slice(start, end), slice(max(start - window, 0), min(end + window, length))


def _mask(
    queries: slice, keys: slice, window: int | None, bias: torch.Tensor | None, dtype: torch.dtype
) -> torch.Tensor | None:
    """The addends of scores, [1 or heads, queries, keys]; None if there are none."""
    if bias is None and window is None:
        return None
    distances = torch.arange(keys.start, keys.stop) - torch.arange(queries.start, queries.stop)[:, None]
    mask = torch.zeros(1, *distances.shape) if bias is None else bias[:, distances + bias.shape[1] // 2]
    if window is not None:
        mask = mask.masked_fill(distances.abs() > window, float("-inf"))
    return mask.to(dtype)


def _runs_of(lengths: Iterable[int]) -> list[tuple[int, int, int]]:
    """Neighbouring texts of one length, as (first token, number of texts, length)."""
    runs: list[tuple[int, int, int]] = []
    first = 0
    for length in lengths:
        if runs and runs[-1][2] == length:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1, length)
        else:
            runs.append((first, 1, length))
        first += length
    return runs
