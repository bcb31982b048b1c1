"""PlainProducts from packed weights in C++: odd sizes, any number of tokens, views, threads, activations."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.functional import gelu, silu

from quire_kernels import ops, reference
from quire_kernels.backends import PlainProducts
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.int8 import quantize
from quire_kernels.packed_weight import ACTIVATIONS, GATES, Quantization
from tests.support.cpu_kernels import ISAS, make_implementation, parametrize_pairwise, torch_threads


def make_kernels(isa: str) -> CpuKernels:
    kernels = make_implementation(isa)
    assert isinstance(kernels, CpuKernels)
    return kernels


def products_of(isa: str, dtype: torch.dtype, quantization: Quantization) -> PlainProducts:
    """The kernels that `ops` uses: the reference if there is no kernel of ours."""
    kernels = make_kernels(isa)
    return kernels if kernels.has_products(dtype, quantization) else reference


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def make_weight(out_features: int, in_features: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(out_features, in_features) * in_features**-0.5).to(dtype)


def as_rounded(lines: torch.Tensor) -> torch.Tensor:
    rounded = quantize(lines)
    return rounded.values.double() * rounded.scales.double()


def exact(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x.double(), weight.double(), None if bias is None else bias.double())


@given(
    num_tokens=st.one_of(st.integers(1, 34), st.integers(1, 130)),
    out_features=st.integers(1, 150),
    in_features=st.one_of(st.integers(1, 130), st.sampled_from([256, 768])),
    gap=st.integers(0, 5),
    gate=st.sampled_from([None, *GATES]),
    has_bias=st.booleans(),
    quantization=st.sampled_from(list(Quantization)),
    dtype=st.sampled_from(DTYPES),
    threads=st.integers(1, 2),
)
def test_any_shape_equals_the_sums_of_float64(
    isa, num_tokens, out_features, in_features, gap, gate, has_bias, quantization, dtype, threads
) -> None:
    kernels = products_of(isa, dtype, quantization)
    out_features *= 2 if gate else 1
    wide = torch.full((num_tokens, in_features + gap), torch.nan, dtype=dtype)
    x = wide[:, gap:].copy_(torch.randn(num_tokens, in_features))
    weight = make_weight(out_features, in_features, dtype)
    bias = torch.randn(out_features).to(dtype) if has_bias else None
    with torch_threads(threads):
        packed = kernels.pack_weight(weight, gate is not None, quantization)
        actual = kernels.product(x, packed, bias, gate or "identity", torch.float32)
        rounded = kernels.product(x, packed, bias, gate or "identity", dtype)
    if quantization is not Quantization.NONE:
        weight = as_rounded(weight)
    if quantization is Quantization.INT8_DYNAMIC:
        x = as_rounded(x)
    expected = exact(x, weight, bias)
    if gate is not None:
        gates, ups = expected.chunk(2, dim=-1)
        if gate == "clamped_swiglu":
            gates = gates.clamp(max=7)
            expected = gates * (1.702 * gates).sigmoid() * (ups.clamp(-7, 7) + 1)
        else:
            approximate = "tanh" if gate == "gelu_tanh" else "none"
            expected = (silu(gates) if gate == "silu" else gelu(gates, approximate=approximate)) * ups
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(rounded, actual.to(dtype)), "it is rounded once"


def test_threads_that_share_the_panels_give_the_same_bits(isa: str) -> None:
    kernels, x = make_kernels(isa), torch.randn(579, 768).bfloat16()
    packed = kernels.pack_weight(make_weight(1100, 768), False, Quantization.NONE)
    with torch_threads(1):
        alone = kernels.product(x, packed, None, "silu", torch.bfloat16)
    with torch_threads(2):
        assert torch.equal(kernels.product(x, packed, None, "silu", torch.bfloat16), alone)


@parametrize_pairwise("isa,quantization,dtype", ISAS, [Quantization.NONE, Quantization.INT8_WEIGHT_ONLY], DTYPES)
def test_tokens_beyond_those_of_a_pass_and_of_a_unit(quantization: Quantization, dtype: torch.dtype, isa: str) -> None:
    kernels, x, weight = (
        products_of(isa, dtype, quantization),
        torch.randn(600, 6144).to(dtype),
        make_weight(70, 6144, dtype),
    )
    actual = kernels.product(x, kernels.pack_weight(weight, False, quantization), None, "identity", torch.float32)
    weight = weight if quantization is Quantization.NONE else as_rounded(weight)
    torch.testing.assert_close(actual.double(), exact(x, weight, None), rtol=1e-4, atol=1e-4)


def test_whole_sums_do_not_overflow_and_are_exact(isa: str) -> None:
    kernels, x, weight = make_kernels(isa), torch.ones(19, 8192).bfloat16(), torch.ones(33, 8192).bfloat16()
    x[:, ::3] = -1
    weight[5:] = -1
    packed = kernels.pack_weight(weight, False, Quantization.INT8_DYNAMIC)
    actual = kernels.product(x, packed, None, "identity", torch.float32)
    torch.testing.assert_close(actual.double(), exact(x, weight, None), rtol=1e-6, atol=0.0)


def test_tokens_that_are_rounded_get_the_same_bits_on_every_instruction_set(isa: str) -> None:
    x, weight = torch.randn(37, 500).bfloat16(), make_weight(70, 500)
    results = []
    for kernels in (make_kernels(isa), reference):
        packed = kernels.pack_weight(weight, False, Quantization.INT8_DYNAMIC)
        results.append(kernels.product(x, packed, None, "identity", torch.float32))
    assert torch.equal(*results)


# Products in float16 are oneDNN's, for which docs/exactness.md promises no bits.
@parametrize_pairwise("isa,dtype,in_features", ISAS, (torch.float32, torch.bfloat16), [33, 384, 1000])
def test_a_token_has_the_same_bits_with_few_and_with_many(isa: str, dtype: torch.dtype, in_features: int) -> None:
    kernels = make_kernels(isa)
    x, bias = torch.randn(600, in_features).to(dtype), torch.randn(70).to(dtype)
    packed = kernels.pack_weight(make_weight(70, in_features, dtype), False, Quantization.NONE)
    whole = kernels.product(x, packed, bias, "gelu", dtype)
    for first, last in ((0, 1), (3, 5), (5, 16), (7, 20), (500, 523), (9, 600)):
        assert torch.equal(kernels.product(x[first:last], packed, bias, "gelu", dtype), whole[first:last])


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_equals_torchs(activation: str, isa: str) -> None:
    kernels, weight, bias = make_kernels(isa), make_weight(45, 64), torch.randn(45).bfloat16()
    x = (8 * torch.randn(9, 64)).bfloat16()
    actual = kernels.product(x, kernels.pack_weight(weight, False, Quantization.NONE), bias, activation, torch.float32)
    plain = reference.pack_weight(weight.double(), False, Quantization.NONE)
    expected = reference.product(x.double(), plain, bias.double(), activation, torch.float64)
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-4)


@parametrize_pairwise(
    "isa,activation,gated,quantization,dtype", ISAS, ACTIVATIONS, [False, True], list(Quantization), DTYPES
)
def test_nan_is_not_hidden_and_stays_with_its_token(
    activation: str, gated: bool, quantization: Quantization, dtype: torch.dtype, isa: str
) -> None:
    kernels, x = products_of(isa, dtype, quantization), torch.randn(20, 40).to(dtype)
    x[3, 7], x[11, 39] = torch.nan, torch.inf
    packed = kernels.pack_weight(make_weight(48, 40, dtype), gated, quantization)
    actual = kernels.product(x, packed, None, "gelu_tanh" if gated else activation, dtype)
    assert actual[3].isnan().all()
    others = [token for token in range(20) if token not in (3, 11)]
    assert actual[others].isfinite().all()


@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24), (24,), (2, 3, 24)])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_any_number_of_dimensions_and_a_weight_that_is_transposed(shape: tuple[int, ...], is_transposed: bool) -> None:
    kernels, x = make_kernels(ISAS[0]), torch.randn(shape).bfloat16()
    weight = make_weight(24, 10).t() if is_transposed else make_weight(10, 24)
    actual = kernels.product(x, kernels.pack_weight(weight, False, Quantization.NONE), None, "identity", torch.float32)
    assert actual.shape == (*shape[:-1], 10)
    torch.testing.assert_close(actual.double(), exact(x, weight, None), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("quantization", Quantization)
def test_a_bias_may_be_a_view(quantization: Quantization) -> None:
    dtype = torch.bfloat16
    kernels, x = products_of(ISAS[0], dtype, quantization), torch.randn(3, 24).to(dtype)
    packed, bias = kernels.pack_weight(make_weight(40, 24, dtype), False, quantization), torch.randn(80).to(dtype)[::2]
    actual = kernels.product(x, packed, bias, "identity", dtype)
    assert torch.equal(actual, kernels.product(x, packed, bias.contiguous(), "identity", dtype))


def test_what_does_not_fit_is_refused_by_name() -> None:
    weight, x = make_weight(6, 8), torch.randn(2, 8).bfloat16()
    packed = ops.pack_weight(weight, gated=True)
    with pytest.raises(ValueError, match="weight has 3 rows; expected an even number"):
        ops.pack_weight(weight[:3], gated=True)
    with pytest.raises(ValueError, match=r"weight has shape \[8\]"):
        ops.pack_weight(weight[0])
    with pytest.raises(ValueError, match=r"x has shape \[2, 4\]; expected \[2, 8\]"):
        ops.product(x[:, :4], packed)
    with pytest.raises(ValueError, match=r"x has dtype torch\.float32"):
        ops.product(x.float(), packed)
    with pytest.raises(ValueError, match=r"bias has shape \[3\]; expected \[6\]"):
        ops.product(x, packed, torch.zeros(3).bfloat16())
    with pytest.raises(ValueError, match="activation is 'relu'"):
        ops.product(x, packed, activation="relu")
    with pytest.raises(ValueError, match=r"output_dtype is torch\.float16"):
        ops.product(x, packed, output_dtype=torch.float16)


def test_other_dtypes_are_multiplied_by_torch() -> None:
    weight, x = torch.randn(6, 8).double(), torch.randn(2, 8).double()
    assert not ops.has_packed_products(x.device, x.dtype)
    plain = reference.pack_weight(weight, False, Quantization.NONE)
    product = reference.product(x, plain, None, "identity", x.dtype)
    assert torch.equal(product, torch.nn.functional.linear(x, weight))


def test_float16_is_left_to_torch_unless_tokens_are_rounded() -> None:
    kernels = make_kernels(ISAS[0])
    for quantization in (Quantization.NONE, Quantization.INT8_WEIGHT_ONLY):
        assert kernels.has_products(torch.float16, quantization) is False
    assert kernels.has_products(torch.float16, Quantization.INT8_DYNAMIC)
    assert not kernels.has_products(torch.float64, Quantization.INT8_DYNAMIC)
