"""bfloat16 weights in three quarters of their bytes: every number is restored bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.packed_weight import PackedWeight, Quantization
from tests.support.cpu_kernels import ISA_PARAMS, ISAS, torch_threads
from tests.unit.kernels.cpu.test_product import make_kernels

WITH_BF12 = tuple(isa for isa in ISAS if isa != "avx2")


@pytest.fixture(scope="module", params=[each for each in ISA_PARAMS if each.values[0] in WITH_BF12])
def isa(request: pytest.FixtureRequest) -> str:
    return request.param


def make_weight(out_features: int, in_features: int) -> torch.Tensor:
    return (torch.randn(out_features, in_features) * 0.02).bfloat16()


def pack(kernels: CpuKernels, weight: torch.Tensor, *, gated: bool = False) -> PackedWeight:
    return kernels.pack_weight(weight, gated, Quantization.NONE)


def numbers_of(kernels: CpuKernels, packed: PackedWeight, num_tokens: int) -> torch.Tensor:
    """The weight [out, in], by products of unit vectors, `num_tokens` at a time."""
    tokens = torch.eye(packed.in_features, dtype=torch.bfloat16)
    parts = [kernels.product(some, packed, None, "identity", torch.bfloat16) for some in tokens.split(num_tokens)]
    return torch.cat(parts).t()


@given(
    num_tokens=st.sampled_from([1, 5, 16, 17, 32, 33, 64, 65, 97, 130, 161, 300]),
    out_features=st.integers(1, 150),
    in_features=st.one_of(st.integers(1, 130), st.sampled_from([256, 480, 768])),
    odd=st.sampled_from([0, 1, 30, 200]),
    threads=st.integers(1, 2),
)
def test_every_number_comes_back(isa, num_tokens, out_features, in_features, odd, threads) -> None:
    kernels = make_kernels(isa)
    weight = make_weight(out_features, in_features)
    # Numbers with rare upper bytes: large ones, tiny ones, and subnormal ones.
    places = torch.randint(weight.numel(), (min(odd, weight.numel() // 256),))
    exponents = torch.randint(-133, 100, places.shape)
    weight.view(-1)[places] = (1.375 * 2.0 ** exponents.double()).bfloat16()
    with torch_threads(threads):
        packed = pack(kernels, weight)
        actual = numbers_of(kernels, packed, num_tokens)
    # The processor's products take subnormal numbers for zero.
    normal = weight.float().abs() >= torch.finfo(torch.bfloat16).tiny
    assert torch.equal(actual[normal], weight[normal])
    assert not actual[~normal].any() or torch.equal(actual[~normal], weight[~normal])


def test_numbers_of_every_upper_byte_among_zeros(isa: str) -> None:
    kernels = make_kernels(isa)
    weight = torch.zeros(64, 1024, dtype=torch.bfloat16)
    bits = torch.arange(1 << 15, dtype=torch.int32)[256:0x7F80:131]
    weight.view(-1)[: bits.numel()] = bits.to(torch.int16).view(torch.bfloat16)
    packed = pack(kernels, weight)
    assert packed.is_bf12
    assert torch.equal(numbers_of(kernels, packed, 32), weight)


def test_it_takes_three_quarters_of_the_bytes(isa: str) -> None:
    kernels = make_kernels(isa)
    packed = pack(kernels, make_weight(768, 3072))
    assert packed.is_bf12
    assert packed.data.numel() * packed.data.element_size() < 0.79 * 768 * 3072 * 2


@pytest.mark.parametrize("reader", ISA_PARAMS)
@pytest.mark.parametrize("num_tokens", [1, 7, 60])
def test_every_instruction_set_reads_what_one_has_packed(isa: str, num_tokens: int, reader: str) -> None:
    weight = make_weight(70, 400)
    weight[5, 17], weight[69, 399] = 2.0**90, -(2.0**-90)
    packed = pack(make_kernels(isa), weight)
    assert packed.is_bf12
    assert torch.equal(numbers_of(make_kernels(reader), packed, num_tokens), weight)


def test_weights_of_many_exponents_stay_as_they_are(isa: str) -> None:
    kernels = make_kernels(isa)
    exponents = torch.randint(-60, 60, (96, 256))
    weight = (2.0**exponents).bfloat16()
    packed = pack(kernels, weight)
    assert not packed.is_bf12
    assert torch.equal(numbers_of(kernels, packed, 16), weight)


def test_a_number_that_is_not_finite_is_seen(isa: str) -> None:
    kernels = make_kernels(isa)
    weight = make_weight(64, 768)
    weight[3, 700], weight[40, 1] = torch.nan, torch.inf
    packed = pack(kernels, weight)
    assert packed.is_bf12
    for num_tokens in (1, 40, 100):
        product = kernels.product(torch.ones(num_tokens, 768).bfloat16(), packed, None, "identity", torch.float32)
        assert product[:, 3].isnan().all()
        assert product[:, 40].isinf().all()
        assert product.isfinite().sum() == num_tokens * 62


def test_a_token_gets_the_same_bits_in_any_company(isa: str) -> None:
    """With matrix units, numbers that are decoded for each product give the same sums as numbers decoded once."""
    kernels = make_kernels(isa)
    packed = pack(kernels, make_weight(200, 768))
    x = torch.randn(200, 768).bfloat16()
    together = kernels.product(x, packed, None, "identity", torch.float32)
    for begin, end in ((0, 1), (0, 16), (3, 20), (0, 64), (100, 165), (10, 200)):
        alone = kernels.product(x[begin:end], packed, None, "identity", torch.float32)
        assert torch.equal(alone, together[begin:end]), (begin, end)
