"""Norms, activation, rotation and cache writes in C++: views, odd sizes, threads, values at the edges."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels.cpu.bindings import CpuKernels
from tests.support.cpu_kernels import ISAS, make_implementation, torch_threads
from tests.unit.kernels.test_pointwise import naive_layer_norm, naive_rms_norm, naive_silu_and_mul

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def assert_close(actual: torch.Tensor, expected: torch.Tensor, scale: float = 1.0) -> None:
    """`scale` multiplies the tolerance for values of about one."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * max(scale, 1.0))


@given(
    lines=st.one_of(st.integers(1, 5), st.integers(1, 200)),
    hidden=st.integers(1, 900),
    gap=st.integers(0, 9),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_norms_and_activation_of_views(isa, lines, hidden, gap, dtype, threads, seed) -> None:
    kernels = make_implementation(isa)
    torch.manual_seed(seed)
    wide = torch.randn(lines, 2 * hidden + gap).to(dtype)
    x, both = wide[:, gap : gap + hidden], wide[:, gap:]
    wide_residual = torch.randn(lines, hidden + gap).to(dtype)
    weight, bias, residual = (torch.randn(size).to(dtype) for size in ((hidden,), (hidden,), (lines, hidden)))
    total, before = residual + x, wide.clone()
    wide_total = wide_residual[:, :hidden] + x
    with torch_threads(threads):
        assert_close(kernels.rms_norm(x, weight, 1e-5), naive_rms_norm(x, weight, 1e-5))
        normed = kernels.rms_norm(x, weight, 1e-5, residual=residual)
        gated = kernels.silu_and_mul(both)
        assert isinstance(kernels, CpuKernels)
        for y in (both[:, hidden:], weight):
            assert_close(kernels.multiply(x, y), x.double() * y.double())
        kernels.rms_norm(x, weight, 1e-5, residual=wide_residual[:, :hidden])
        layer_normed = kernels.layer_norm(x, weight, bias, 1e-5)
    assert torch.equal(residual, total)
    assert torch.equal(wide_residual[:, :hidden], wide_total)
    assert_close(normed, naive_rms_norm(total, weight, 1e-5))
    assert_close(gated, naive_silu_and_mul(both))
    assert_close(layer_normed, naive_layer_norm(x, weight, bias), float(weight.abs().max()))
    assert torch.equal(wide, before)


@given(
    num_tokens=st.one_of(st.integers(1, 4), st.integers(1, 150)),
    heads=st.sampled_from([(1, 1), (6, 2), (7, 7), (5, 1)]),
    half=st.integers(1, 130),
    block_size=st.sampled_from([1, 3, 16]),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 2),
)
def test_rotation_and_write_are_the_same_as_one_after_the_other(
    isa, num_tokens, heads, half, block_size, dtype, threads
) -> None:
    kernels, reference = make_implementation(isa), make_implementation("reference")
    num_heads, num_kv_heads = heads
    num_blocks = -(-num_tokens // block_size) + 2
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, 2 * half).to(dtype)
    query, key, value = qkv.split_with_sizes([num_heads, num_kv_heads, num_kv_heads], 1)
    angles = torch.rand(40, half) * 6
    table, positions = torch.cat((angles.cos(), angles.sin()), -1), torch.randint(40, (num_tokens,))
    slots = torch.randperm(num_blocks * block_size)[:num_tokens]
    cache = torch.randn(2, num_blocks, num_kv_heads, block_size, 2 * half).to(dtype)
    expected_cache, before = cache.clone(), qkv.clone()
    expected_query, expected_key = reference.rotary(query, key, positions, table)
    reference.reshape_and_cache(expected_key, value, expected_cache, slots)
    with torch_threads(threads):
        apart = kernels.rotary(query, key, positions, table)
        assert torch.equal(qkv, before)
        rotated = kernels.rotary_and_cache(query, key, value, positions, table, cache, slots)
    for actual, expected in ((apart[0], expected_query), (apart[1], expected_key), (rotated, expected_query)):
        assert_close(actual, expected.double())
    assert_close(cache, expected_cache.double())
    assert torch.equal(cache[1], expected_cache[1])
    assert rotated.data_ptr() == query.data_ptr(), "the query is rotated where it is"
    assert torch.equal(qkv[:, num_heads:], before[:, num_heads:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_values_at_the_edges(dtype: torch.dtype, isa: str) -> None:
    kernels = make_implementation(isa)
    gate = torch.tensor([-1e4, -100.0, -88.5, -1e-6, 0.0, 1e-6, 60.0, 1e4, float("nan"), float("inf")]).to(dtype)
    actual = kernels.silu_and_mul(torch.cat((gate, torch.ones_like(gate))))
    expected = torch.nn.functional.silu(gate.double())
    torch.testing.assert_close(actual.double(), expected, rtol=TOLERANCE[dtype], atol=1e-6, equal_nan=True)
    ones = torch.ones(10, dtype=dtype)
    assert kernels.rms_norm(gate, ones, 1e-5).isnan().all()
    assert kernels.layer_norm(gate, ones, ones, 1e-5).isnan().all()
    assert torch.equal(kernels.rms_norm(torch.zeros_like(gate), ones, 1e-5), torch.zeros_like(gate))


def test_large_means_do_not_spoil_the_variance(isa: str) -> None:
    x, weight = torch.randn(3, 100) + 3000, torch.ones(100)
    actual = make_implementation(isa).layer_norm(x, weight, None, 1e-5)
    expected = torch.nn.functional.layer_norm(x.double(), (100,), None, None, 1e-5)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 8), (8,), (2, 3, 8), (0,)])
def test_any_number_of_dimensions(shape: tuple[int, ...]) -> None:
    kernels, reference = make_implementation(ISAS[0]), make_implementation("reference")
    x, weight = torch.randn(shape), torch.randn(shape[-1])
    torch.testing.assert_close(kernels.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    torch.testing.assert_close(kernels.silu_and_mul(x), reference.silu_and_mul(x))
    torch.testing.assert_close(kernels.layer_norm(x, None, None, 1e-5), reference.layer_norm(x, None, None, 1e-5))


def test_what_has_no_code_goes_to_the_reference() -> None:
    kernels, reference = make_implementation(ISAS[0]), make_implementation("reference")
    x, mixed, weight = torch.randn(3, 8).double(), torch.randn(3, 8).bfloat16(), torch.randn(8)
    query = torch.randn(3, 2, 8).double()
    assert torch.equal(kernels.silu_and_mul(x), reference.silu_and_mul(x))
    assert torch.equal(kernels.layer_norm(x, None, None, 1e-5), reference.layer_norm(x, None, None, 1e-5))
    assert torch.equal(
        kernels.layer_norm(mixed, weight, weight, 1e-5), reference.layer_norm(mixed, weight, weight, 1e-5)
    )
    turn = query, query, torch.tensor([0, 1, 1]), torch.randn(2, 8)
    assert torch.equal(kernels.rotary(*turn)[0], reference.rotary(*turn)[0])


@pytest.mark.parametrize(
    ("positions", "slots", "message"),
    [
        ([0, 9], [0, 1], "positions"),
        ([-1, 0], [0, 1], "positions"),
        ([0, 1], [0, 8], "slot"),
        ([0, 1], [-1, 0], "slot"),
    ],
)
def test_indexes_out_of_range_are_refused_before_anything_is_written(
    positions: list[int], slots: list[int], message: str
) -> None:
    kernels = make_implementation(ISAS[0])
    query, key, value = torch.ones(3, 2, 2, 8).unbind()
    cache = torch.zeros(2, 2, 2, 4, 8)
    with pytest.raises(IndexError, match=message):
        kernels.rotary_and_cache(
            query, key, value, torch.tensor(positions), torch.full((9, 8), 0.5), cache, torch.tensor(slots)
        )
    assert torch.equal(query, torch.ones(2, 2, 8))
    assert not cache.any()
