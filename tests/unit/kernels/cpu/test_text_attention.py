"""Attention within texts in C++ compared with dense attention in float64, over shapes that fit no vector or tile."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels.cpu.bindings import CpuKernels
from tests.support.cpu_kernels import ISAS, make_implementation, parametrize_pairwise, torch_threads
from tests.unit.kernels.test_paged_attention import TOLERANCE

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_heads(tokens: int, heads: tuple[int, int], head_dim: int, dtype: torch.dtype) -> Heads:
    """Query, key and value as views of one tensor, whose other numbers are NaN."""
    (num_heads, num_kv_heads), gap = heads, 3
    merged = torch.full((tokens, num_heads + 2 * num_kv_heads, head_dim + gap), torch.nan, dtype=dtype)
    merged[..., :head_dim] = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim)
    query, key, value = merged[..., :head_dim].split([num_heads, num_kv_heads, num_kv_heads], 1)
    return query, key, value


def attend(isa: str, heads: Heads, lengths: list[int], window: int | None, bias: torch.Tensor | None) -> torch.Tensor:
    kernels = make_implementation(isa)
    assert isinstance(kernels, CpuKernels)
    return kernels.texts.attention(*heads, lengths, scale=heads[0].shape[-1] ** -0.5, window=window, bias=bias)


def exact(heads: Heads, lengths: list[int], window: int | None, bias: torch.Tensor | None) -> torch.Tensor:
    found = []
    for query, key, value in zip(*(each.double().split(lengths) for each in heads), strict=True):
        group, length = query.shape[1] // key.shape[1], len(query)
        key, value = (each.repeat_interleave(group, 1) for each in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query, key) * query.shape[-1] ** -0.5
        distances = torch.arange(length) - torch.arange(length)[:, None]
        if bias is not None:
            scores = scores + bias.double()[:, distances + bias.shape[1] // 2]
        if window is not None:
            scores = scores.masked_fill(distances.abs() > window, float("-inf"))
        found.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1), value))
    return torch.cat(found)


@given(
    lengths=st.lists(st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 128, 129, 300]), min_size=1, max_size=5),
    num_kv_heads=st.integers(1, 3),
    group=st.sampled_from([1, 2, 5]),
    head_dim=st.sampled_from([1, 6, 16, 32, 33, 64, 80, 96]),
    dtype=st.sampled_from(DTYPES),
    window=st.none() | st.integers(0, 70) | st.integers(250, 400),
    has_bias=st.booleans(),
    threads=st.integers(1, 2),
)
def test_any_texts_match_dense_attention(
    isa, lengths, num_kv_heads, group, head_dim, dtype, window, has_bias, threads
) -> None:
    heads = make_heads(sum(lengths), (num_kv_heads * group, num_kv_heads), head_dim, dtype)
    bias = torch.randn(num_kv_heads * group, 2 * max(lengths) + 3) if has_bias else None
    with torch_threads(threads):
        actual = attend(isa, heads, lengths, window, bias)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(actual.double(), exact(heads, lengths, window, bias), rtol=tolerance, atol=tolerance)


@parametrize_pairwise("isa,dtype,threads,window", ISAS, DTYPES, [1, 2, 3], [None, 20])
def test_bits_of_a_text_depend_on_neither_neighbours_nor_threads(
    isa: str, dtype: torch.dtype, threads: int, window: int | None
) -> None:
    lengths = [20, 1, 300, 129, 20, 64]
    heads = make_heads(sum(lengths), (4, 2), 32, dtype)
    bias = torch.randn(4, 2 * 300 - 1)
    with torch_threads(1):
        texts = zip(*(each.split(lengths) for each in heads), strict=True)
        alone = [attend(isa, text, [len(text[0])], window, bias) for text in texts]
    with torch_threads(threads):
        assert torch.equal(attend(isa, heads, lengths, window, bias), torch.cat(alone))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_poisoned_key_poisons_its_text_and_head_only(bad: float, isa: str) -> None:
    lengths, heads = [30, 70, 5], make_heads(105, (3, 3), 32, torch.float32)
    expected = attend(isa, heads, lengths, None, None)
    heads[1][40, 1] = bad
    actual = attend(isa, heads, lengths, None, None)
    poisoned = torch.zeros(105, 3, dtype=torch.bool)
    poisoned[30:100, 1] = True
    assert actual[poisoned].isnan().any(-1).all()
    assert torch.equal(actual[~poisoned], expected[~poisoned])


@pytest.mark.parametrize("lengths", [[3, 4], [9], [3, 0, 5], [-1, 9], []])
def test_lengths_that_do_not_fit_are_refused(lengths: list[int], isa: str) -> None:
    with pytest.raises(IndexError, match="lengths"):
        attend(isa, make_heads(8, (2, 2), 16, torch.float32), lengths, None, None)
