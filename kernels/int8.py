"""Numbers as int8: symmetric, one scale for each line; code = round(x / scale), -127 to 127."""

from dataclasses import dataclass

import torch

MOST = 127
"""The greatest code. -128 is not used, so that codes are symmetric."""


@dataclass(frozen=True, slots=True)
class QuantizedLines:
    """`codes * scales` stands for the numbers."""

    codes: torch.Tensor
    """[..., n] int8."""
    scales: torch.Tensor
    """[..., 1]; 0 for lines of zeros, not finite for lines that hold such numbers."""


def quantize(x: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> QuantizedLines:
    """Rounds each line of x [..., n] to int8.

    The scale is rounded to its dtype before the codes are made, so that this costs nearly no precision: each number is
    at most half a scale off, and one near its line's largest a little more where the dtype is short.
    """
    values = x.float()
    scales = (values.abs().amax(dim=-1, keepdim=True) / MOST).to(scale_dtype)
    # A scale so small that it became 0 gives codes of 0.
    divisors = scales.float().masked_fill(scales == 0, torch.inf)
    codes = (values / divisors).nan_to_num_(0.0).round_().clamp_(-MOST, MOST).to(torch.int8)
    return QuantizedLines(codes, scales)
