"""Weights of a product in the order in which an implementation reads them."""

from collections.abc import Sequence
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


class Coding(Enum):
    """How a file stores the rows of a weight: groups of inputs, whose numbers have codes of a few bits and scales.

    Values are the names of GGUF, by which ggml documents them.
    """

    Q4_K = "Q4_K"
    Q5_K = "Q5_K"
    Q6_K = "Q6_K"
    Q8_0 = "Q8_0"
    Q4_0 = "Q4_0"
    Q4_1 = "Q4_1"
    Q5_0 = "Q5_0"
    Q5_1 = "Q5_1"
    IQ4_XS = "IQ4_XS"
    IQ4_NL = "IQ4_NL"

    @property
    def group(self) -> tuple[int, int]:
        """Inputs of a group, and its bytes."""
        return _GROUPS[self]


_GROUPS = {
    Coding.Q4_K: (256, 144),
    Coding.Q5_K: (256, 176),
    Coding.Q6_K: (256, 210),
    Coding.Q8_0: (32, 34),
    Coding.Q4_0: (32, 18),
    Coding.Q4_1: (32, 20),
    Coding.Q5_0: (32, 22),
    Coding.Q5_1: (32, 24),
    Coding.IQ4_XS: (256, 136),
    Coding.IQ4_NL: (32, 18),
}


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in] as a file stores it."""

    coding: Coding
    rows: torch.Tensor
    """[out, bytes of a row] uint8, which may be a view of the file."""

    @property
    def in_features(self) -> int:
        inputs, num_bytes = self.coding.group
        return self.rows.shape[1] // num_bytes * inputs

    def part(self, outputs: slice, inputs: slice) -> "CodedWeight | None":
        """Some outputs and inputs; None if the inputs begin or end within a group."""
        in_group, num_bytes = self.coding.group
        if inputs.start % in_group or inputs.stop % in_group:
            return None
        columns = slice(inputs.start // in_group * num_bytes, inputs.stop // in_group * num_bytes)
        return CodedWeight(self.coding, self.rows[outputs, columns])

    @staticmethod
    def joined(parts: Sequence["CodedWeight"]) -> "CodedWeight":
        """The outputs of parts of one coding, one after the other."""
        (coding,) = {part.coding for part in parts}
        return CodedWeight(coding, parts[0].rows if len(parts) == 1 else torch.cat([part.rows for part in parts]))


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out, in] packed by `ops.pack_weight` or `ops.pack_coded`. Only the implementation that packed it reads
    `data`."""

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
    coding: Coding | None = None
    """That of `data`, if its numbers are coded."""
    is_bf12: bool = False
    """Whether `data` holds the bfloat16 numbers in 12 bits each, bit for bit."""

    @property
    def width(self) -> int:
        """Columns of the product."""
        return self.out_features // 2 if self.gated else self.out_features
