"""Products in FP8: the choice, the arguments and the rounding of tokens. torch has such products only on GPUs."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from quire_kernels import backends, ops, reference
from quire_kernels.cuda import coded, fp8
from quire_kernels.packed_weight import CodedWeight, Coding, GroupScales, Quantization
from tests.support.coded_weights import dequantized, make_scaled
from tests.support.triton_devices import KernelDevice

pytestmark = pytest.mark.extended
CUDA = torch.device("cuda")


def make_weight(out_features: int = 48, in_features: int = 64, group: int = 64, seed: int = 0) -> CodedWeight:
    weight = make_scaled(Coding.FP8, out_features, in_features, group, torch.bfloat16, has_zeros=False, seed=seed)
    return replace(weight, rounds_inputs=True)


def rounded_by_torch(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scales = (x.float().abs().amax(1, keepdim=True) / 448).clamp(min=1e-12)
    return (x.float() / scales).to(torch.float8_e4m3fn), scales


def multiplied(
    a: torch.Tensor,
    b: torch.Tensor,
    *,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    sums = a.float() @ b.float() * scale_a * scale_b
    return (sums if bias is None else sums + bias.float()).to(out_dtype)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(backends, "implementation_for", lambda device: coded)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (12, 0)])
def test_the_device_and_the_dtype_choose(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]) -> None:
    on_gpu(monkeypatch, capability)
    assert ops.has_fp8_products(CUDA, torch.bfloat16) == (capability >= (8, 9))
    assert not ops.has_fp8_products(CUDA, torch.float16)
    assert not ops.has_fp8_products(torch.device("cpu"), torch.bfloat16)
    # Products of codes work on all of them.
    assert ops.has_coded_products(CUDA, torch.float16)
    assert not ops.has_coded_products(CUDA, torch.float32)


@pytest.mark.parametrize(
    "weight",
    [
        replace(make_weight(), rounds_inputs=False),
        make_weight(in_features=128),
        make_weight(out_features=40),
        make_weight(in_features=56),
        replace(make_scaled(Coding.INT8, 48, 64, 64, torch.bfloat16, has_zeros=False), rounds_inputs=True),
    ],
    ids=["inputs that are not rounded", "blocks", "outputs", "inputs", "int8"],
)
def test_other_weights_become_numbers_in_the_tile(weight: CodedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "has_products", lambda device, dtype: dtype == torch.bfloat16)
    assert isinstance(coded.pack_coded(make_weight(), False, Quantization.NONE), fp8.Fp8Weight)
    for each, dtype in ((weight, torch.bfloat16), (make_weight(), torch.float16)):
        packed = coded.pack_coded(each, False, Quantization.NONE, dtype)
        assert isinstance(packed, coded.GroupedWeight)
        assert packed.dtype == dtype


@pytest.mark.parametrize("in_features", [16, 1500])
def test_tokens_are_rounded_with_a_scale_each(device: KernelDevice, in_features: int) -> None:
    """Only numbers of E4M3: the interpreter rounds others wrongly if a fraction carries into the exponent."""
    numbers = torch.randint(-127, 127, (6, in_features), dtype=torch.int8).view(torch.float8_e4m3fn).float()
    numbers = numbers.nan_to_num()
    numbers[:, 1] = 448
    factors = torch.tensor([1, 2.0**-20, 2.0**60, 0, 1, 1]).unsqueeze(1)
    x = (numbers * factors).bfloat16()
    x[4, 3], x[5, 0] = torch.nan, torch.inf
    codes, scales = device.run(fp8.rounded, x).result
    assert torch.equal(scales[:3], factors[:3])
    assert torch.equal(codes[:3].float(), numbers[:3])
    assert not codes[3].float().any()
    # A token that is not finite spoils only its own sums.
    assert scales[:, 0].isfinite().tolist() == [True] * 4 + [False] * 2
    random = torch.randn(3, in_features).bfloat16()
    torch.testing.assert_close(device.run(fp8.rounded, random).result[1], rounded_by_torch(random)[1])


@pytest.mark.parametrize("activation", ["identity", "silu", "relu"])
def test_products_are_those_of_rounded_tokens(activation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fp8, "has_products", lambda device, dtype: True)
    monkeypatch.setattr(fp8, "rounded", rounded_by_torch)
    monkeypatch.setattr(fp8, "silu_and_mul", reference.silu_and_mul)
    monkeypatch.setattr(torch, "_scaled_mm", multiplied)
    # A rank's part: some outputs of two weights, some inputs of both.
    parts = [make_weight(64, 96, 96, seed).part(slice(16, 48), slice(32, 96)) for seed in (1, 2)]
    weight = CodedWeight.joined([part for part in parts if part is not None])
    assert weight.rounds_inputs
    x, bias = torch.randn(2, 3, 64).bfloat16(), torch.randn(64).bfloat16()
    packed = coded.pack_coded(weight, activation == "silu", Quantization.NONE)
    actual = coded.product(x, packed, bias, activation, torch.bfloat16)
    codes, scales = rounded_by_torch(x.view(6, 64))
    sums = codes.float() * scales @ dequantized(weight).t() + bias.float()
    expected = reference.activated(sums, packed.gated, activation, torch.bfloat16).view(2, 3, -1)
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
    assert coded.product(x[:0], packed, bias, activation, torch.bfloat16).shape == (0, 3, expected.shape[-1])


@pytest.mark.parametrize("num_tokens", [1, 17])
def test_torch_accepts_the_arguments(num_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses torch's own checks of sizes, strides and dtypes, on tensors without values."""

    def launched(*arguments: Any, **constants: int) -> None:
        pass

    on_gpu(monkeypatch, (9, 0))
    monkeypatch.setattr(fp8, "launch", launched)
    with FakeTensorMode(allow_non_fake_inputs=True):
        rows, factors = (
            torch.empty(48, size, dtype=dtype, device=CUDA) for size, dtype in ((64, torch.uint8), (1, torch.float32))
        )
        weight = CodedWeight(Coding.FP8, rows, GroupScales(factors, None, 64), rounds_inputs=True)
        packed = coded.pack_coded(weight, False, Quantization.NONE)
        assert isinstance(packed, fp8.Fp8Weight)
        x, bias = (torch.empty(*shape, dtype=torch.bfloat16, device=CUDA) for shape in ((num_tokens, 64), (48,)))
        for each in (None, bias):
            actual = coded.product(x, packed, each, "identity", torch.float32)
            assert (actual.shape, actual.dtype, actual.device.type) == ((num_tokens, 48), torch.float32, "cuda")
