"""Weights of a product in the order in which an implementation reads them."""

from dataclasses import dataclass
from enum import Enum

import torch

ACTIVATIONS = ("identity", "relu", "silu", "gelu_tanh")
"""Operations that a product can apply to its sums before they are rounded."""


class Rounding(Enum):
    """The parts of a product that are rounded to int8, as in `kernels.int8`."""

    NONE = "none"
    WEIGHT = "weight"
    """With one scale for each output."""
    WEIGHT_AND_INPUT = "weight and input"
    """The input too, with one scale for each token: sums are exact."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] packed by `ops.pack_weight`. Only the implementation that packed it reads `data`."""

    data: torch.Tensor
    scales: torch.Tensor | None
    """[out] float32, if `data` is int8 and stands for `data * scales`."""
    dtype: torch.dtype
    """The dtype of the weight before it was packed, and of the tokens that it is multiplied with."""
    out_features: int
    """The output features of the weight. If it is gated, the product has half as many."""
    in_features: int
    padded_in: int
    """Inputs that the product multiplies: tokens are padded with zeros."""
    gated: bool
    """The first half of the outputs are gates: the product is `silu(gate) * up`."""
    rounding: Rounding
    is_bf12: bool = False
    """Whether `data` holds the bfloat16 numbers in 12 bits each, bit for bit."""

    @property
    def width(self) -> int:
        """Columns of the product."""
        return self.out_features // 2 if self.gated else self.out_features
