"""Norms, rotary embeddings and activations against their formulas in float64."""

import pytest
import torch

from kernels.cuda.pointwise import TILE, add_layer_norm, add_rms_norm, layer_norm, rms_norm, rotary, silu_and_mul
from tests.support.pairwise import pairwise
from tests.support.triton_devices import KernelDevice

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# The interpreter cuts bfloat16 off where a GPU rounds.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
SHAPES = [(1, 1), (1, 8), (7, 80), (3, 5, 33), (2, 4100), (0, 16)]


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    assert actual.dtype == dtype
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def naive_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt() * weight.double()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rms_norm(device: KernelDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, residual, weight = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype), torch.rand(shape[-1]).to(dtype)
    assert_close(device.run(rms_norm, x, weight, 1e-3).result, naive_rms_norm(x, weight), dtype)
    normed, stream = device.run(add_rms_norm, x, residual.clone(), weight, 1e-3).result
    assert_close(stream, x.double() + residual.double(), dtype)
    assert_close(normed, naive_rms_norm(stream, weight), dtype)


def test_sum_is_written_into_the_residual_stream(device: KernelDevice) -> None:
    x, residual = torch.randn(2, 3, 8)
    outcome = device.run(add_rms_norm, x, residual.clone(), torch.ones(8), 1e-3)
    assert torch.equal(outcome.arguments[1], x + residual)


def test_norms_of_strided_lines(device: KernelDevice) -> None:
    wide, weight = torch.randn(5, 20), torch.rand(8)
    for x in (wide[:, 4:12], wide[:, ::2][:, :8], torch.randn(8, 5).T):
        assert_close(device.run(rms_norm, x, weight, 1e-3).result, naive_rms_norm(x, weight), x.dtype)
        residual = torch.randn(8, 5).T
        normed, stream = device.run(add_rms_norm, x, residual, weight, 1e-3).result
        assert torch.equal(stream, x + residual)
        assert_close(normed, naive_rms_norm(x + residual, weight), x.dtype)


@pytest.mark.parametrize(("shape", "affine", "dtype"), pairwise(SHAPES, [True, False], DTYPES))
def test_layer_norm(device: KernelDevice, shape: tuple[int, ...], affine: bool, dtype: torch.dtype) -> None:
    x = (torch.randn(shape) + 1).to(dtype)
    weight, bias = torch.rand(2, shape[-1]).to(dtype) if affine else (None, None)
    centred = x.double() - x.double().mean(-1, keepdim=True)
    expected = centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    if weight is not None and bias is not None:
        expected = expected * weight.double() + bias.double()
    assert_close(device.run(layer_norm, x, weight, bias, 1e-5).result, expected, dtype)
    part = torch.randn(shape).to(dtype)
    normed, stream = device.run(add_layer_norm, part, x - part, weight, bias, 1e-5).result
    assert_close(stream, (x - part).double() + part.double(), dtype)
    assert_close(normed, device.run(layer_norm, stream, weight, bias, 1e-5).result.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 32, 80])
def test_rotary_turns_pairs_of_halves(device: KernelDevice, head_dim: int, dtype: torch.dtype) -> None:
    angles = torch.rand(50, head_dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=-1)
    positions = torch.tensor([0, 49, 7, 7])
    query, key = torch.randn(4, 8, head_dim).to(dtype).split((6, 2), dim=1)

    def expected(x: torch.Tensor) -> torch.Tensor:
        turn = torch.polar(torch.ones_like(angles).double(), angles.double())[positions][:, None]
        turned = torch.complex(*x.double().chunk(2, dim=-1)) * turn
        return torch.cat((turned.real, turned.imag), dim=-1)

    turned_query, turned_key = device.run(rotary, query, key, positions, table).result
    assert_close(turned_query, expected(query), dtype)
    assert_close(turned_key, expected(key), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 14), (1, 2, 2), (2, 2 * TILE + 6), (0, 8)], ids=str)
def test_silu_and_mul(device: KernelDevice, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    assert_close(device.run(silu_and_mul, x).result, gate * torch.sigmoid(gate) * up, dtype)
