"""Norms, rotary embeddings and activations compared with their formulas in float64."""

import pytest
import torch

from quire_kernels import ops
from tests.support.cpu_kernels import IMPLEMENTATIONS, parametrize_pairwise

pytestmark = pytest.mark.usefixtures("implementation")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def naive_rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float = 1e-3) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


def naive_layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> torch.Tensor:
    centred = x.double() - x.double().mean(-1, keepdim=True)
    normed = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return normed if weight is None or bias is None else normed * weight.double() + bias.double()


def naive_rotary(x: torch.Tensor, positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    cos, sin = table.double()[positions][:, None].chunk(2, dim=-1)
    first, second = x.double().chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def naive_silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.double().chunk(2, dim=-1)
    return gate * torch.sigmoid(gate) * up


@parametrize_pairwise("implementation,shape,dtype", IMPLEMENTATIONS, [(2, 8), (7, 80), (3, 5, 33)], DTYPES)
def test_rms_norm_and_that_the_sum_of_weight_and_offset_is_not_rounded(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    # The sum of 1 and so small a number is 1 in bfloat16.
    little = torch.full(shape[-1:], 2**-8).to(dtype)
    assert not torch.equal(ops.rms_norm(x, little, 1e-3, 1.0), ops.rms_norm(x, torch.ones_like(little), 1e-3))
    total = x + residual
    for each, offset in ((weight, 0.0), (little, 1.0)):
        assert_close(ops.rms_norm(x, each, 1e-3, offset), naive_rms_norm(x, each.double() + offset), dtype)
        normed, stream = ops.add_rms_norm(x, residual.clone(), each, 1e-3, offset)
        assert torch.equal(stream, total)
        assert torch.equal(normed, ops.rms_norm(total, each, 1e-3, offset))


@parametrize_pairwise("implementation,affine,dtype", IMPLEMENTATIONS, [True, False], DTYPES)
def test_layer_norm(affine: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(5, 48) + 1).to(dtype)
    weight, bias = torch.rand(2, 48).to(dtype) if affine else (None, None)
    assert_close(ops.layer_norm(x, weight, bias, 1e-5), naive_layer_norm(x, weight, bias), dtype)
    part = torch.randn(5, 48).to(dtype)
    residual = x - part
    total = residual + part
    normed, stream = ops.add_layer_norm(part, residual.clone(), weight, bias, 1e-5)
    assert torch.equal(stream, total)
    assert_close(normed, ops.layer_norm(total, weight, bias, 1e-5).double(), dtype)


@parametrize_pairwise("implementation,head_dim,dtype", IMPLEMENTATIONS, [2, 32, 80], DTYPES)
def test_rotary_turns_pairs_of_halves(head_dim: int, dtype: torch.dtype) -> None:
    angles = torch.rand(50, head_dim // 2) * 6
    table, positions = torch.cat((angles.cos(), angles.sin()), dim=-1), torch.tensor([0, 49, 7, 7])
    query, key = torch.randn(4, 6, head_dim).to(dtype), torch.randn(4, 2, head_dim).to(dtype)
    for rotated, x in zip(ops.rotary(query, key, positions, table), (query, key), strict=True):
        assert_close(rotated, naive_rotary(x, positions, table), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_and_mul(dtype: torch.dtype) -> None:
    x = torch.randn(3, 14).to(dtype)
    assert_close(ops.silu_and_mul(x), naive_silu_and_mul(x), dtype)


def test_misfits_are_refused() -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match=r"weight has shape \[7\]; expected \[8\]"):
        ops.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match="residual has shape"):
        ops.add_rms_norm(x, x[:2], torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match="residual has shape"):
        ops.add_layer_norm(x, x[:2], None, None, 1e-5)
    with pytest.raises(ValueError, match="bias has shape"):
        ops.layer_norm(x, torch.ones(8), torch.ones(1), 1e-5)
    with pytest.raises(ValueError, match="expected an even one"):
        ops.silu_and_mul(x[:, :7])
    heads = torch.randn(3, 2, 8)
    with pytest.raises(ValueError, match="cos_sin_cache has shape"):
        ops.rotary(heads, heads, torch.zeros(3, dtype=torch.int64), torch.zeros(4, 6))
    with pytest.raises(ValueError, match="positions has dtype"):
        ops.rotary(heads, heads, torch.zeros(3, dtype=torch.int32), torch.zeros(4, 8))
