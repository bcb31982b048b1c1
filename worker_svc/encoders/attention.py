"""Attention in both directions, over texts that lie one after the other."""

from collections.abc import Sequence

import torch
from torch.nn import functional


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: Sequence[int],
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
    output = q.new_empty(q.shape)
    for first, count, length in _runs_of(lengths):
        query, key, value = (
            each[first : first + count * length].unflatten(0, (count, length)).transpose(1, 2) for each in (q, k, v)
        )
        attended = functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=_mask(length, window, bias, q.dtype),
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        output[first : first + count * length].unflatten(0, (count, length)).copy_(attended.transpose(1, 2))
    return output


def _mask(length: int, window: int | None, bias: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """The addends of the scores of a text, [1 or heads, length, length]; None if there are none."""
    if bias is None and (window is None or length <= window + 1):
        return None
    places = torch.arange(length)
    distances = places - places[:, None]
    mask = torch.zeros(1, length, length) if bias is None else bias[:, distances + bias.shape[1] // 2]
    if window is not None:
        mask = mask.masked_fill(distances.abs() > window, float("-inf"))
    return mask.to(dtype)


def _runs_of(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
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
