"""Weights of a product in the order in which an implementation reads them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch

ACTIVATIONS = ("identity", "relu", "silu", "gelu_tanh", "gelu")
"""Operations that a product can apply to its sums before they are rounded."""
GATES = ("silu", "gelu_tanh", "gelu", "clamped_swiglu")
"""Operations that it can apply to the gates of a gated weight; the last one, GPT-OSS's, clamps gates and ups."""


class Quantization(Enum):
    """The parts of a product that are rounded to int8, as in `quire_kernels.int8`, by the names of `--quantization`."""

    NONE = "none"
    INT8_WEIGHT_ONLY = "int8-weight-only"
    """The weight, with one scale for each output."""
    INT8_DYNAMIC = "int8-dynamic"
    """The input too, with one scale for each token: sums are exact."""


class Coding(Enum):
    """How a file stores the rows of a weight: groups of inputs, whose numbers have codes of a few bits and scales.

    Values are the names of GGUF, by which ggml documents them. The rows of the last six hold only codes
    (`GroupScales`): integers from 0 on, E4M3 numbers except NaN, numbers of E2M1, or places in a table. The first of
    two codes of 4 bits is in the lower half of a byte.
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
    INT4 = "int4"
    INT8 = "int8"
    FP8 = "float8_e4m3fn"
    MXFP4 = "MXFP4"
    NVFP4 = "NVFP4"
    TABLE4 = "4-bit table"

    @property
    def group(self) -> tuple[int, int]:
        """Inputs of a group, and its bytes; if rows hold only codes, the smallest number of inputs that fills bytes."""
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
    Coding.INT4: (2, 1),
    Coding.INT8: (1, 1),
    Coding.FP8: (1, 1),
    Coding.MXFP4: (2, 1),
    Coding.NVFP4: (2, 1),
    Coding.TABLE4: (2, 1),
}
# The codes that stand for 0 where a weight does not say which ones do.
_MIDDLE = {Coding.INT4: 8, Coding.INT8: 128, Coding.FP8: 0}
# The inputs that share a scale of `GroupScales.parts`.
_PARTS = {Coding.MXFP4: 32, Coding.NVFP4: 16}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
"""The numbers of the codes of MXFP4 and NVFP4."""
_NUMBERS_AT_ONCE = 1 << 22


@dataclass(frozen=True, slots=True)
class GroupScales:
    """The values of codes that are stored apart from their scales: `(code - zero) * scale`, computed in float32.

    The difference is exact, and with scales of 16 bits the product, too, so that serving in bfloat16 rounds once.
    Compressed-tensors and transformers (FP8) give the same bits: they multiply in the dtype of the scales, which is
    bfloat16, or in float32. AWQ and GPTQ have float16 scales, and their own code rounds to float16 first: in float16
    the bits are the same, in bfloat16 this is the closer number where they differ.

    In FP4 the scale of a group is multiplied with that of a part first, in float32.
    """

    values: torch.Tensor
    """[out, groups] float32, bfloat16 or float16."""
    zeros: torch.Tensor | None
    """[out, groups] uint8, the codes of 0; None: the code in the middle, or 0 in FP8."""
    inputs: int
    """Inputs of a group. The last one may have fewer."""
    parts: torch.Tensor | None = None
    """[out, parts] of FP4, where all inputs are one group: float8_e8m0fnu scales of 32 inputs in MXFP4, and
    float8_e4m3fn ones of 16 inputs in NVFP4."""
    table: torch.Tensor | None = None
    """[16] float32, the numbers of the codes of TABLE4."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "GroupScales":
        """The same with all tensors of outputs changed."""
        zeros, parts = (None if each is None else change(each) for each in (self.zeros, self.parts))
        return replace(self, values=change(self.values), zeros=zeros, parts=parts)


@dataclass(frozen=True, slots=True)
class CodedWeight:
    """A weight [out, in] as a file stores it."""

    coding: Coding
    rows: torch.Tensor
    """[out, bytes of a row] uint8, which may be a view of the file."""
    scales: GroupScales | None = None
    """Set for codings whose rows hold only codes."""
    rounds_inputs: bool = False
    """The format rounds the inputs of products to FP8 too. Implementations may do so or not."""

    @classmethod
    def of_fp4(cls, coding: Coding, rows: torch.Tensor, parts: torch.Tensor, unit: float = 1.0) -> "CodedWeight":
        """A weight in MXFP4 or NVFP4; `parts` are the bytes of scales [out, parts], `unit` a factor on all of them."""
        scales = parts.view(torch.float8_e8m0fnu if coding is Coding.MXFP4 else torch.float8_e4m3fn)
        units = torch.full((rows.shape[0], 1), unit)
        return cls(coding, rows, GroupScales(units, None, 2 * rows.shape[1], scales))

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
        scales = self.scales
        if scales is not None:
            in_group = scales.inputs
            is_cut = inputs.start % in_group or (inputs.stop % in_group and inputs.stop != self.in_features)
            if is_cut and scales.values.shape[1] > 1:
                return None
            groups = slice(inputs.start // in_group, -(-inputs.stop // in_group))
            parts = scales.parts
            if parts is not None:
                of_part = _PARTS[self.coding]
                if inputs.start % of_part or inputs.stop % of_part:
                    return None
                parts, in_group = parts[outputs, inputs.start // of_part : inputs.stop // of_part], self.in_features
            zeros = None if scales.zeros is None else scales.zeros[outputs, groups]
            values = scales.values[outputs, groups]
            scales = replace(scales, values=values, zeros=zeros, inputs=in_group, parts=parts)
        return replace(self, rows=self.rows[outputs, columns], scales=scales)

    def to(self, device: torch.device) -> "CodedWeight":
        """The weight on that device: itself if it is there already, perhaps as a view of a file."""
        scales = None if self.scales is None else self.scales.each(lambda tensor: tensor.to(device))
        return replace(self, rows=self.rows.to(device), scales=scales)

    @property
    def kind(self) -> tuple[object, ...]:
        """Weights of one kind can be joined."""
        scales = self.scales
        return (
            self.coding,
            self.rounds_inputs,
            *((scales.inputs, scales.values.dtype, scales.zeros is None) if scales else ()),
            None if scales is None or scales.table is None else tuple(scales.table.tolist()),
        )

    @staticmethod
    def joined(parts: Sequence["CodedWeight"]) -> "CodedWeight":
        """The outputs of parts of one kind, one after the other."""
        if len(parts) == 1:
            return parts[0]
        (_,) = {part.kind for part in parts}
        rows = torch.cat([part.rows for part in parts])
        scales = [part.scales for part in parts if part.scales is not None]
        if not scales:
            return replace(parts[0], rows=rows)
        of_all = [[each.values, each.zeros, each.parts] for each in scales]
        values, zeros, of_parts = (
            torch.cat([each for each in tensors if each is not None]) if tensors[0] is not None else None
            for tensors in zip(*of_all, strict=True)
        )
        assert values is not None
        return replace(parts[0], rows=rows, scales=replace(scales[0], values=values, zeros=zeros, parts=of_parts))

    def dequantized(self) -> torch.Tensor:
        """[out, in] float32, where rows hold only codes."""
        scales, out_features = self.scales, self.rows.shape[0]
        if scales is None:
            raise ValueError(f"rows in {self.coding.value} hold more than codes")
        result = torch.empty((out_features, self.in_features))
        group_of = torch.arange(self.in_features) // scales.inputs
        step = max(_NUMBERS_AT_ONCE // max(self.in_features, 1), 1)
        for rows in (slice(start, start + step) for start in range(0, out_features, step)):
            codes, numbers = self.rows[rows], result[rows]
            if self.coding.group == (2, 1):
                codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1)
            factors = scales.values[rows].float()[:, group_of]
            if self.coding not in _MIDDLE:
                table, parts = E2M1 if scales.table is None else scales.table, scales.parts
                if parts is not None:
                    factors *= parts[rows].float().repeat_interleave(_PARTS[self.coding], 1)[:, : self.in_features]
                torch.mul(table[codes.int()], factors, out=numbers)
                continue
            numbers.copy_(codes.contiguous().view(torch.float8_e4m3fn) if self.coding is Coding.FP8 else codes)
            zero = _MIDDLE[self.coding] if scales.zeros is None else scales.zeros[rows].float()[:, group_of]
            numbers.sub_(zero).mul_(factors)
        return result


@dataclass(frozen=True, slots=True)
class Grouping:
    """The groups of a packed weight whose codes and scales are separate.

    Attributes:
        pieces: Pieces of 32 inputs in a group.
        scale_dtype: Dtype of the group's scale.
        has_zeros: Whether each group says which code stands for 0.
    """

    pieces: int
    scale_dtype: torch.dtype
    has_zeros: bool


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
    """The first half of the outputs are gates: the product is `activation(gate) * up`."""
    quantization: Quantization
    coding: Coding | None = None
    """The coding of `data`, if its numbers are coded."""
    grouping: Grouping | None = None
    """Set for codings whose scales are stored apart from codes."""
    is_bf12: bool = False
    """Whether `data` holds the bfloat16 numbers in 12 bits each, bit for bit."""

    @property
    def width(self) -> int:
        """Columns of the product."""
        return self.out_features // 2 if self.gated else self.out_features
