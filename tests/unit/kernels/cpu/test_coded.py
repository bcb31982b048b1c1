"""Weights as files store them: products equal products of the dequantized weight, bit for bit."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels.int8 import quantize
from quire_kernels.packed_weight import CodedWeight, Coding, GroupScales, Quantization
from quire_kernels.reference import silu_and_mul
from tests.support.coded_weights import FLOATS, FP4, SCALED, dequantized, make_coded, make_fp4, make_scaled
from tests.support.cpu_kernels import ISAS, torch_threads
from tests.unit.kernels.cpu.test_product import make_kernels


@given(
    coding=st.sampled_from(Coding),
    num_tokens=st.sampled_from([1, 3, 16, 17, 33, 100, 300]),
    out_features=st.integers(1, 70),
    num_groups=st.integers(1, 3),
    gated=st.booleans(),
    threads=st.integers(1, 2),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_are_those_of_the_dequantized_weight(
    isa, coding, num_tokens, out_features, num_groups, gated, threads, seed
) -> None:
    kernels = make_kernels(isa)
    weight = make_coded(coding, 2 * out_features if gated else out_features, num_groups, seed)
    x, activation = torch.randn(num_tokens, weight.in_features).bfloat16(), "gelu_tanh" if gated else "identity"
    with torch_threads(threads):
        coded = kernels.pack_coded(weight, gated, Quantization.NONE)
        plain = kernels.pack_weight(dequantized(weight).bfloat16(), gated, Quantization.NONE)
        actual, expected = (kernels.product(x, each, None, activation, torch.float32) for each in (coded, plain))
    assert torch.equal(actual, expected)


@pytest.mark.parametrize("coding", Coding)
def test_a_number_keeps_its_sign_where_it_is_zero(isa: str, coding: Coding) -> None:
    """Compares the numbers themselves, by products with a single nonzero token."""
    kernels, weight = make_kernels(isa), make_coded(coding, 40, 1)
    inputs = torch.eye(weight.in_features).bfloat16()
    actual = kernels.product(
        inputs, kernels.pack_coded(weight, False, Quantization.NONE), None, "identity", torch.bfloat16
    ).t()
    assert torch.equal(actual, dequantized(weight).bfloat16())


def test_weights_of_several_codings_side_by_side(isa: str) -> None:
    kernels = make_kernels(isa)
    weights = [make_coded(Coding.Q4_K, 48, 2), make_coded(Coding.Q6_K, 24, 2)]
    x, bias = torch.randn(5, 512).bfloat16(), torch.randn(72).bfloat16()
    joined = kernels.products(
        x, [kernels.pack_coded(weight, False, Quantization.NONE) for weight in weights], bias, torch.bfloat16
    )
    plain = kernels.pack_weight(torch.cat([dequantized(each) for each in weights]).bfloat16(), False, Quantization.NONE)
    assert torch.equal(joined, kernels.product(x, plain, bias, "identity", torch.bfloat16))


@pytest.mark.parametrize("coding", Coding)
def test_a_packed_weight_is_hardly_larger_than_in_the_file(coding: Coding) -> None:
    if coding in SCALED:
        weights = [
            make_scaled(coding, 64, 2048, inputs, torch.float16, has_zeros=has_zeros)
            for inputs, has_zeros in ((32, True), (32, False), (128, True), (2048, False))
        ]
    elif coding in FP4:
        weights = [make_fp4(coding, 64, 2048)]
    else:
        weights = [make_coded(coding, 64, 2048 // coding.group[0])]
    assert ISAS
    for weight in weights:
        in_file = weight.rows.nbytes
        if (scales := weight.scales) is not None:
            # Zeros have as many bits as codes.
            in_file += (scales.values if scales.parts is None else scales.parts).nbytes + (
                0 if scales.zeros is None else scales.zeros.nbytes // coding.group[0]
            )
        assert make_kernels(ISAS[0]).pack_coded(weight, False, Quantization.NONE).data.nbytes <= 1.05 * in_file


@given(
    coding=st.sampled_from([coding for coding in Coding if coding not in FLOATS]),
    num_tokens=st.sampled_from([1, 3, 4, 9, 70]),
    out_features=st.integers(1, 70),
    num_groups=st.integers(1, 3),
    gated=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_tokens_of_int8_are_multiplied_with_the_numbers_of_the_file(
    isa, coding, num_tokens, out_features, num_groups, gated, seed
) -> None:
    kernels = make_kernels(isa)
    weight = make_coded(coding, 2 * out_features if gated else out_features, num_groups, seed)
    x, bias = torch.randn(num_tokens, weight.in_features).bfloat16(), torch.randn(weight.rows.shape[0]).bfloat16()
    packed = kernels.pack_coded(weight, gated, Quantization.INT8_DYNAMIC)
    actual = kernels.product(x, packed, bias, "silu" if gated else "identity", torch.float32)
    tokens = quantize(x)
    sums = (tokens.values.double() * tokens.scales.double()) @ dequantized(weight).double().t() + bias.double()
    expected = silu_and_mul(sums) if gated else sums
    torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)
    # Other tokens in the batch do not change a token's results.
    alone = [kernels.product(each, packed, bias, "silu" if gated else "identity", torch.float32) for each in x.split(1)]
    assert torch.equal(torch.cat(alone), actual)


@pytest.mark.parametrize(
    ("coding", "codes", "byte"),
    [
        (Coding.Q4_K, slice(16, 144), 255),
        (Coding.Q5_K, slice(16, 176), 255),
        (Coding.Q6_K, slice(192), 255),
        (Coding.Q8_0, slice(2, 34), 128),
    ],
)
def test_the_largest_codes_times_the_largest_tokens(isa: str, coding: Coding, codes: slice, byte: int) -> None:
    """With sums of products in 16 bits."""
    kernels, weight = make_kernels(isa), make_coded(coding, 40, 1)
    weight.rows[:, codes] = byte
    x = torch.full((9, weight.in_features), -127.0).bfloat16()
    packed = kernels.pack_coded(weight, False, Quantization.INT8_DYNAMIC)
    actual = kernels.product(x, packed, None, "identity", torch.float32)
    expected = x.double() @ dequantized(weight).double().t()
    torch.testing.assert_close(actual.double(), expected, rtol=1e-4, atol=1e-3)


def test_a_token_that_is_not_finite_has_products_that_are_not(isa: str) -> None:
    kernels = make_kernels(isa)
    packed = kernels.pack_coded(make_coded(Coding.Q4_K, 40, 1), False, Quantization.INT8_DYNAMIC)
    x = torch.randn(2, 256).bfloat16()
    x[0, 7] = torch.nan
    assert kernels.product(x, packed, None, "identity", torch.float32).isfinite().all(1).tolist() == [False, True]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("inputs", [32, 64, 128, 1024])
@pytest.mark.parametrize("coding", SCALED)
def test_groups_of_any_size_and_scales_of_any_dtype(isa: str, coding: Coding, inputs: int, dtype: torch.dtype) -> None:
    kernels = make_kernels(isa)
    for has_zeros in (False, True):
        weight = make_scaled(coding, 40, 1024, inputs, dtype, has_zeros=has_zeros)
        assert torch.equal(weight.dequantized(), dequantized(weight))
        packed = kernels.pack_coded(weight, False, Quantization.NONE)
        actual = kernels.product(torch.eye(1024).bfloat16(), packed, None, "identity", torch.bfloat16).t()
        assert torch.equal(actual, dequantized(weight).bfloat16())


def test_every_code_of_fp8(isa: str) -> None:
    """All codes except NaN."""
    kernels, codes = make_kernels(isa), torch.arange(256, dtype=torch.uint8).view(8, 32)
    codes[codes & 127 == 127] = 126
    weight = CodedWeight(Coding.FP8, codes, GroupScales(torch.ones(8, 1), None, 32))
    actual = kernels.product(
        torch.eye(32).bfloat16(), kernels.pack_coded(weight, False, Quantization.NONE), None, "identity", torch.float32
    ).t()
    assert torch.equal(actual, codes.view(torch.float8_e4m3fn).float())


def test_every_scale_of_fp4(isa: str) -> None:
    """All bytes except NaN, with numbers that stay normal in bfloat16."""
    kernels = make_kernels(isa)
    for coding, count in ((Coding.MXFP4, 253), (Coding.NVFP4, 127)):
        rows = torch.full((count, 16), 0x67, dtype=torch.uint8)
        parts = torch.arange(count, dtype=torch.uint8)[:, None].expand(-1, 32 // FP4[coding])
        weight = CodedWeight.of_fp4(coding, rows, parts.contiguous())
        packed = kernels.pack_coded(weight, False, Quantization.NONE)
        actual = kernels.product(torch.eye(32).bfloat16(), packed, None, "identity", torch.float32).t()
        assert torch.equal(actual, dequantized(weight))
        assert torch.equal(weight.dequantized(), dequantized(weight))


@pytest.mark.parametrize("coding", FP4)
def test_parts_of_fp4_are_those_of_the_dequantized_weight(coding: Coding) -> None:
    weight, other = make_fp4(coding, 40, 160), make_fp4(coding, 24, 160, seed=1)
    part = weight.part(slice(8, 20), slice(32, 96))
    assert part is not None
    assert torch.equal(part.dequantized(), weight.dequantized()[8:20, 32:96])
    assert weight.part(slice(8, 20), slice(8, 96)) is None
    both = torch.cat([weight.dequantized(), other.dequantized()])
    assert torch.equal(CodedWeight.joined([weight, other]).dequantized(), both)


@pytest.mark.parametrize("coding", SCALED)
def test_parts_and_joined_parts_are_those_of_the_dequantized_weight(coding: Coding) -> None:
    weight = make_scaled(coding, 40, 320, 64, torch.bfloat16, has_zeros=True)
    whole = weight.dequantized()
    for inputs in (slice(0, 64), slice(64, 192), slice(192, 320)):
        part = weight.part(slice(8, 20), inputs)
        assert part is not None
        assert torch.equal(part.dequantized(), whole[8:20, inputs])
    assert weight.part(slice(0, 40), slice(32, 64)) is None
    single = make_scaled(coding, 40, 320, 320, torch.bfloat16, has_zeros=False)
    part = single.part(slice(0, 40), slice(6, 100))
    assert part is not None
    assert torch.equal(part.dequantized(), single.dequantized()[:, 6:100])
    other = make_scaled(coding, 24, 320, 64, torch.bfloat16, has_zeros=True, seed=1)
    if coding is Coding.TABLE4 and weight.scales is not None and other.scales is not None:
        assert weight.kind != other.kind
        other = replace(other, scales=replace(other.scales, table=weight.scales.table))
    assert torch.equal(CodedWeight.joined([weight, other]).dequantized(), torch.cat([whole, other.dequantized()]))
    assert weight.kind != single.kind
    assert weight.kind != make_scaled(coding, 40, 320, 64, torch.float16, has_zeros=True).kind


@pytest.mark.parametrize("coding", [coding for coding in Coding if coding not in (*SCALED, *FP4)])
def test_rows_are_looked_up(isa: str, coding: Coding) -> None:
    kernels, weight = make_kernels(isa), make_coded(coding, 40, 2)
    ids = torch.tensor([0, 39, 7, 7, *range(20)])
    assert torch.equal(kernels.look_up(weight, ids), dequantized(weight).bfloat16()[ids])
    for wrong in (-1, 40):
        with pytest.raises(IndexError, match="ids names a row that is not in the weight"):
            kernels.look_up(weight, torch.tensor([3, wrong]))


@pytest.mark.parametrize("inputs", [96, 128])
def test_int8_with_a_scale_for_each_output_is_summed_in_whole_numbers(isa: str, inputs: int) -> None:
    """Also together with a weight of another coding and the same tokens; inputs that would need padding are not."""
    kernels = make_kernels(isa)
    weight = make_scaled(Coding.INT8, 40, inputs, inputs, torch.bfloat16, has_zeros=False)
    other = make_scaled(Coding.INT4, 24, inputs, 32, torch.float16, has_zeros=True)
    x = torch.randn(9, inputs).bfloat16()
    whole, coded = (kernels.pack_coded(each, False, Quantization.INT8_DYNAMIC) for each in (weight, other))
    alone = kernels.product(x, whole, None, "identity", torch.float32)
    assert weight.scales is not None
    tokens, scales = quantize(x), weight.scales.values.flatten().float()
    sums = tokens.values.int() @ (weight.rows.int() - 128).t()
    if inputs == 128:
        assert torch.equal(alone, sums.float() * tokens.scales * scales)
    torch.testing.assert_close(alone, sums.float() * tokens.scales * scales)
    side_by_side = kernels.products(x, [coded, whole], None, torch.float32)
    assert torch.equal(side_by_side, torch.cat([kernels.product(x, coded, None, "identity", torch.float32), alone], 1))
