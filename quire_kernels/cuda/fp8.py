"""Products in FP8 by torch's own kernel, for formats that round the inputs of a layer too.

Tokens are rounded with one scale each; weights have one for each output, or one for all outputs of a part. The static
input scales of some formats are not used: rounding with a token's own scale is closer.

Only the choice, the arguments and the rounding of tokens were tested: torch has these products only on GPUs.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from quire_kernels.cuda.launch import launch
from quire_kernels.cuda.pointwise import silu_and_mul
from quire_kernels.packed_weight import CodedWeight, Coding, PackedWeight, Quantization
from quire_kernels.reference import activated

_COMPUTE_CAPABILITY = (8, 9)
_MULTIPLE = 16
"""Inputs and outputs must be multiples of this for torch's kernel."""
_INPUTS = 1024
_LARGEST = tl.constexpr(448.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fp8Weight(PackedWeight):
    """`data` is the weight, [out, in] in E4M3."""

    factors: torch.Tensor
    """[1, out] float32, the factor of each output."""


def has_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch multiplies in FP8 on such a device, with tokens of this dtype.

    With a scale for each token, not all releases of torch have products of another dtype than bfloat16.
    """
    if device.type != "cuda" or dtype != torch.bfloat16 or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= _COMPUTE_CAPABILITY


def takes(weight: CodedWeight) -> bool:
    """Whether its format rounds inputs to FP8, and torch's kernel has its shape."""
    scales = weight.scales
    if scales is None or weight.coding is not Coding.FP8 or not weight.rounds_inputs or scales.values.shape[1] > 1:
        return False
    return all(size and size % _MULTIPLE == 0 for size in weight.rows.shape)


def pack(weight: CodedWeight, gated: bool) -> Fp8Weight:
    """`quire_kernels.ops.pack_coded` for a weight that `takes` takes."""
    assert weight.scales is not None
    out_features, in_features = weight.rows.shape
    return Fp8Weight(
        data=weight.rows.contiguous().view(torch.float8_e4m3fn),
        scales=None,
        dtype=torch.bfloat16,
        out_features=out_features,
        in_features=in_features,
        padded_in=in_features,
        gated=gated,
        quantization=Quantization.NONE,
        coding=weight.coding,
        factors=weight.scales.values.float().t().contiguous(),
    )


def product(
    x: torch.Tensor, weight: Fp8Weight, bias: torch.Tensor | None, activation: str, output_dtype: torch.dtype
) -> torch.Tensor:
    """`quire_kernels.ops.product`, whose sums are rounded to bfloat16 before the activation."""
    lines = x.reshape(-1, x.shape[-1])
    sums = torch.empty((len(lines), weight.out_features), dtype=torch.bfloat16, device=x.device)
    if sums.numel():
        codes, scales = rounded(lines)
        sums = torch._scaled_mm(
            codes, weight.data.t(), scale_a=scales, scale_b=weight.factors, bias=bias, out_dtype=torch.bfloat16
        )
    sums = sums.view(*x.shape[:-1], weight.out_features)
    if weight.gated and activation == "silu":
        return silu_and_mul(sums).to(output_dtype)
    return activated(sums, weight.gated, activation, output_dtype)


def rounded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [T, in] in E4M3 and their scales, [T, 1] float32, NaN for a token that is not finite."""
    x = x if x.stride(1) == 1 else x.contiguous()
    codes = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    launch(_round_kernel, (len(x),), x, codes, scales, x.stride(0), x.shape[1], INPUTS=_INPUTS)
    return codes, scales


@triton.jit
def _round_kernel(x, codes, scales, x_stride, num_inputs, INPUTS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    largest, poison = tl.zeros((INPUTS,), tl.float32), tl.zeros((INPUTS,), tl.float32)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        values = tl.load(x + token * x_stride + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(values))
        # NaN where a number is not finite, which a maximum may not tell.
        poison += values * 0.0
    scale = tl.maximum(tl.max(largest) / _LARGEST, 1e-12) + tl.sum(poison)
    for start in range(0, num_inputs, INPUTS):
        inputs = start + tl.arange(0, INPUTS)
        values = tl.load(x + token * x_stride + inputs, mask=inputs < num_inputs, other=0.0).to(tl.float32)
        tl.store(codes + token * num_inputs + inputs, (values / scale).to(tl.float8e4nv), mask=inputs < num_inputs)
    tl.store(scales + token, scale)
