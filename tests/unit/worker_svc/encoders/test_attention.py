"""Attention of encoders is the softmax over each text, and its bits do not depend on the other texts."""

import pytest
import torch

from worker_svc.encoders.attention import attend

LENGTHS = (1, 7, 3, 3, 300, 2)


def plain(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int | None, bias: torch.Tensor | None
) -> torch.Tensor:
    """The definition, of one text, in float64."""
    count, repeats = len(q), q.shape[1] // k.shape[1]
    k, v = (each.double().repeat_interleave(repeats, 1) for each in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * 0.3
    distances = torch.arange(count) - torch.arange(count)[:, None]
    if bias is not None:
        scores = scores + bias.double()[:, distances + bias.shape[1] // 2]
    if window is not None:
        scores = scores.masked_fill(distances.abs() > window, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 2, 6, 150, 299])
@pytest.mark.parametrize("kv_heads", [4, 1])
@pytest.mark.parametrize("has_bias", [False, True])
def test_texts_attend_within_themselves(dtype: torch.dtype, window: int | None, kv_heads: int, has_bias: bool) -> None:
    torch.manual_seed(1)
    total = sum(LENGTHS)
    q = torch.randn(total, 3, 4, 16).to(dtype)[:, 1]
    k, v = torch.randn(total, 2, kv_heads, 16).to(dtype).unbind(1)
    bias = torch.randn(4, 2 * 301 - 1) if has_bias else None
    found = attend(q, k, v, LENGTHS, scale=0.3, window=window, bias=bias)
    assert found.is_contiguous()
    first = 0
    for length in LENGTHS:
        text = slice(first, first + length)
        expected = plain(q[text], k[text], v[text], window, bias)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(found[text].double(), expected, rtol=tolerance, atol=tolerance)
        by_itself = attend(q[text], k[text], v[text], [length], scale=0.3, window=window, bias=bias)
        assert torch.equal(by_itself, found[text])
        first += length
