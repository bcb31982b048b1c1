"""Weights of a product in the order in which an implementation reads them."""

from dataclasses import dataclass

import torch

ACTIVATIONS = ("identity", "relu", "silu", "gelu_tanh")
"""What a product can do to its sums before they are rounded."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """What `ops.pack_weight` made of a weight [out, in]. Only the implementation that packed it reads `data`."""

    data: torch.Tensor
    scales: torch.Tensor | None
    """[out] float32, where `data` are codes of int8 that stand for `codes * scales`."""
    dtype: torch.dtype
    """Of the weight as it was, and of what it is multiplied with."""
    out_features: int
    """Of the weight. Where it is gated, the product has half as many."""
    in_features: int
    gated: bool
    """The first half of the outputs are gates: the product is `silu(gate) * up`."""

    @property
    def width(self) -> int:
        """Columns of the product."""
        return self.out_features // 2 if self.gated else self.out_features
