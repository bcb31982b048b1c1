"""Products with weights as files store them: codes become numbers in the tile that is multiplied.

All codings have one form here, in about the bytes of the file: planes of codes, and scales of two levels as those of
GGUF's K-quants. A number is computed in float32 and rounded to the dtype of the tokens. So it is that of the
dequantized weight, bit for bit: all operations but one are exact.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import triton
import triton.language as tl

from kernels.cuda.launch import ceil_div, launch
from kernels.packed_weight import CodedWeight, Coding, PackedWeight, Quantization
from kernels.reference import activated

# Inputs of a tile, and of 32 bytes of halves of codes: each byte has an input and the one 32 inputs behind.
_INPUTS = 64
# Tokens and outputs of a tile: few tokens leave more programs to read the weight.
_OF_FEW, _OF_MANY = (16, 32), (64, 64)
# Of IQ4_NL and IQ4_XS: what the 16 codes stand for.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class Scales:
    """What the codes of R rows stand for: (code - zero) * unit * step - minimum_unit * minimum_step."""

    units: torch.Tensor
    """[R, units], floating; `inputs_of_unit` each."""
    inputs_of_unit: int
    zero: int = 0
    zeros: torch.Tensor | None = None
    """[R, units] uint8, instead of `zero`."""
    table: torch.Tensor | None = None
    """[codes] float32, instead of code - zero."""
    steps: torch.Tensor | None = None
    """[R, groups] int8; None: 1."""
    inputs_of_step: int = 32
    minimum_units: torch.Tensor | None = None
    """As `units`; None: there are no minima."""
    minimum_steps: torch.Tensor | None = None

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """[R, in] float32 for codes [R, in] uint8."""
        inputs = torch.arange(codes.shape[1], device=codes.device)
        of_unit, of_step = inputs // self.inputs_of_unit, inputs // self.inputs_of_step
        if self.table is not None:
            numbers = self.table[codes.long()]
        else:
            numbers = codes.float() - (self.zero if self.zeros is None else self.zeros[:, of_unit].float())
        numbers *= _product_of(self.units[:, of_unit], self.steps, of_step)
        if self.minimum_units is not None:
            numbers -= _product_of(self.minimum_units[:, of_unit], self.minimum_steps, of_step)
        return numbers


def _product_of(units: torch.Tensor, steps: torch.Tensor | None, of_step: torch.Tensor) -> torch.Tensor:
    return units.float() if steps is None else units.float() * steps[:, of_step]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight(PackedWeight):
    """`data` has the codes, [out, bytes]; those of more than 4 and less than 8 bits only their lower 4."""

    bits: int
    """Of a code."""
    high: torch.Tensor | None
    """[out, bytes], the other bits, from the lowest on."""
    scale: Scales


@triton.jit(do_not_specialize=("num_tokens",))
def _product_kernel(
    output,
    x,
    data,
    high,
    table,
    zeros,
    units,
    steps,
    minimum_units,
    minimum_steps,
    bias,
    num_tokens,
    x_stride,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BITS: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    HIGH_BYTES: tl.constexpr,
    ZERO: tl.constexpr,
    UNIT: tl.constexpr,
    NUM_UNITS: tl.constexpr,
    STEP: tl.constexpr,
    NUM_STEPS: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    outputs = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)
    rows = outputs[None, :]
    sums = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for start in range(0, IN, INPUTS):
        columns = start + tl.arange(0, INPUTS)
        inputs = columns[:, None]
        mask = (inputs < IN) & (rows < OUT)
        if BITS == 8:
            codes = tl.load(data + rows * ROW_BYTES + inputs, mask=mask, other=0).to(tl.int32)
        else:
            halves = tl.load(data + rows * ROW_BYTES + inputs // 64 * 32 + inputs % 32, mask=mask, other=0)
            codes = (halves.to(tl.int32) >> (inputs % 64 // 32 * 4)) & 15
        if high is not None:
            places = inputs * (BITS - 4)
            more = tl.load(high + rows * HIGH_BYTES + places // 8, mask=mask, other=0).to(tl.int32)
            codes += ((more >> (places % 8)) & ((1 << (BITS - 4)) - 1)) << 4
        of_unit, of_step = rows * NUM_UNITS + inputs // UNIT, rows * NUM_STEPS + inputs // STEP
        if table is not None:
            numbers = tl.load(table + codes)
        elif zeros is not None:
            numbers = (codes - tl.load(zeros + of_unit, mask=mask, other=0).to(tl.int32)).to(tl.float32)
        else:
            numbers = (codes - ZERO).to(tl.float32)
        scales = tl.load(units + of_unit, mask=mask, other=0.0).to(tl.float32)
        if steps is not None:
            scales *= tl.load(steps + of_step, mask=mask, other=0).to(tl.float32)
        numbers *= scales
        if minimum_units is not None:
            minima = tl.load(minimum_units + of_unit, mask=mask, other=0.0).to(tl.float32)
            if minimum_steps is not None:
                minima *= tl.load(minimum_steps + of_step, mask=mask, other=0).to(tl.float32)
            numbers -= minima
        values = tl.load(
            x + tokens[:, None] * x_stride + columns[None, :],
            mask=(tokens < num_tokens)[:, None] & (columns < IN)[None, :],
            other=0.0,
        )
        sums = tl.dot(values, numbers.to(values.dtype), sums)
    if bias is not None:
        sums += tl.load(bias + outputs, mask=outputs < OUT, other=0.0).to(tl.float32)[None, :]
    mask = (tokens < num_tokens)[:, None] & (rows < OUT)
    tl.store(output + tokens[:, None] * OUT + rows, sums.to(output.dtype.element_ty), mask=mask)


def product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: str, output_dtype: torch.dtype
) -> torch.Tensor:
    """`kernels.ops.product` with a weight of `pack_coded`."""
    assert isinstance(weight, GroupedWeight)
    is_plain = not weight.gated and activation == "identity"
    sums = torch.empty(
        (*x.shape[:-1], weight.out_features), dtype=output_dtype if is_plain else torch.float32, device=x.device
    )
    if sums.numel():
        lines, scale, high = x.reshape(-1, x.shape[-1]), weight.scale, weight.high
        lines = lines if lines.stride(1) == 1 else lines.contiguous()
        tokens, outputs = _OF_FEW if len(lines) <= _OF_FEW[0] else _OF_MANY
        launch(
            _product_kernel,
            (ceil_div(len(lines), tokens), ceil_div(weight.out_features, outputs)),
            sums,
            lines,
            weight.data,
            high,
            scale.table,
            scale.zeros,
            scale.units,
            scale.steps,
            scale.minimum_units,
            scale.minimum_steps,
            bias,
            len(lines),
            lines.stride(0),
            OUT=weight.out_features,
            IN=weight.in_features,
            TOKENS=tokens,
            OUTPUTS=outputs,
            INPUTS=_INPUTS,
            BITS=weight.bits,
            ROW_BYTES=weight.data.shape[1],
            HIGH_BYTES=0 if high is None else high.shape[1],
            ZERO=scale.zero,
            UNIT=scale.inputs_of_unit,
            NUM_UNITS=scale.units.shape[1],
            STEP=scale.inputs_of_step,
            NUM_STEPS=0 if scale.steps is None else scale.steps.shape[1],
        )
    return sums if is_plain else activated(sums, weight.gated, activation, output_dtype)


def products(
    x: torch.Tensor, weights: Sequence[PackedWeight], bias: torch.Tensor | None, output_dtype: torch.dtype
) -> torch.Tensor:
    """`kernels.ops.products`."""
    sizes = [weight.out_features for weight in weights]
    biases = [None] * len(weights) if bias is None else bias.split(sizes)
    parts = [product(x, *each, "identity", output_dtype) for each in zip(weights, biases, strict=True)]
    return torch.cat(parts, -1)


def look_up(weight: CodedWeight, ids: torch.Tensor) -> torch.Tensor:
    """`kernels.ops.look_up`."""
    codes, _, scale = read(CodedWeight(weight.coding, weight.rows[ids]))
    return scale.numbers(codes).bfloat16()


def pack_coded(weight: CodedWeight, gated: bool, quantization: Quantization) -> GroupedWeight:
    """`kernels.ops.pack_coded`."""
    codes, bits, scale = read(weight)
    (out_features, in_features), data, high = codes.shape, codes, None
    if bits < 8:
        pairs = torch.nn.functional.pad(codes & 15, (0, -in_features % _INPUTS)).view(out_features, -1, 2, _INPUTS // 2)
        data = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    if 4 < bits < 8:
        shifts = torch.arange(0, 8, bits - 4, dtype=torch.uint8, device=codes.device)
        # Codes come in groups of 32 and more, so that they fill bytes.
        high = ((codes >> 4).view(out_features, -1, len(shifts)) << shifts).sum(-1, dtype=torch.uint8)
    return GroupedWeight(
        data=data,
        scales=None,
        dtype=torch.bfloat16,
        out_features=out_features,
        in_features=in_features,
        padded_in=in_features,
        gated=gated,
        quantization=quantization,
        coding=weight.coding,
        bits=bits,
        high=high,
        scale=scale,
    )


def read(weight: CodedWeight) -> tuple[torch.Tensor, int, Scales]:
    """The codes [out, in] uint8, their bits, and what they stand for."""
    rows, grouped = weight.rows, weight.scales
    if grouped is None:
        bits, decode = _DECODERS[weight.coding]
        codes, scale = decode(rows.unflatten(1, (-1, weight.coding.group[1])))
        return codes.reshape(len(rows), -1), bits, scale
    units, zeros = grouped.values.contiguous(), grouped.zeros if grouped.zeros is None else grouped.zeros.contiguous()
    if weight.coding is Coding.INT4:
        return _halves(rows[..., None]).flatten(1), 4, Scales(units, grouped.inputs, 8, zeros)
    if weight.coding is Coding.INT8:
        return rows.contiguous(), 8, Scales(units, grouped.inputs, 128, zeros)
    every = torch.arange(256, dtype=torch.uint8, device=rows.device)
    table = every.view(torch.float8_e4m3fn).float()
    return rows.contiguous(), 8, Scales(units, grouped.inputs, table=table)


def _halves(data: torch.Tensor, dim: int = -2) -> torch.Tensor:
    """The lower and the upper halves of bytes, in a new dimension."""
    return torch.stack((data & 15, data >> 4), dim)


def _bits(data: torch.Tensor, width: int) -> torch.Tensor:
    """All parts of so many bits: [..., B] uint8 -> [..., parts, B], the lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
    return data[..., None, :] >> shifts[:, None] & (1 << width) - 1


def _float16(data: torch.Tensor) -> torch.Tensor:
    """[R, blocks, 2] uint8 -> [R, blocks]."""
    return data.contiguous().view(torch.float16)[..., 0]


# Blocks [R, n, bytes of a block] to codes, whose order is that of the inputs, and scales; as ggml documents them.


def _k_with_minima(blocks: torch.Tensor, *, bits: int) -> tuple[torch.Tensor, Scales]:
    packed = blocks[..., 4:16]
    first, second, both = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    steps = torch.cat((first & 63, both & 15 | first >> 6 << 4), -1).view(torch.int8).flatten(1)
    minimum_steps = torch.cat((second & 63, both >> 4 | second >> 6 << 4), -1).view(torch.int8).flatten(1)
    codes = _halves(blocks[..., -128:].unflatten(-1, (4, 32)))
    if bits == 5:
        codes = codes.flatten(2, 3) | _bits(blocks[..., 16:48], 1) << 4
    units, minimum_units = _float16(blocks[..., :2]), _float16(blocks[..., 2:4])
    return codes, Scales(units, 256, steps=steps, minimum_units=minimum_units, minimum_steps=minimum_steps)


def _q6_k(blocks: torch.Tensor) -> tuple[torch.Tensor, Scales]:
    low, high = blocks[..., :128].unflatten(-1, (2, 2, 32)), blocks[..., 128:192].unflatten(-1, (2, 32))
    codes = _halves(low, -3).flatten(3, 4) | _bits(high, 2) << 4
    steps = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1)
    return codes, Scales(_float16(blocks[..., 208:]), 256, 32, steps=steps, inputs_of_step=16)


def _q8_0(blocks: torch.Tensor) -> tuple[torch.Tensor, Scales]:
    return blocks[..., 2:] ^ 128, Scales(_float16(blocks[..., :2]), 32, 128)


def _legacy(blocks: torch.Tensor, *, bits: int, has_minima: bool) -> tuple[torch.Tensor, Scales]:
    """Q4_0, Q4_1, Q5_0, Q5_1."""
    codes = _halves(blocks[..., -16:]).flatten(2)
    if bits == 5:
        # Four bytes with a bit of each input.
        high = _bits(blocks[..., -20:-16], 1).transpose(-1, -2).flatten(2)
        codes = codes | high << 4
    units = _float16(blocks[..., :2])
    if has_minima:
        return codes, Scales(units, 32, minimum_units=-_float16(blocks[..., 2:4]))
    return codes, Scales(units, 32, 1 << (bits - 1))


@functools.cache
def _iq4_table(device: torch.device) -> torch.Tensor:
    """Copied to the device once: no copy can be recorded."""
    return torch.tensor(_IQ4, dtype=torch.float32, device=device)


def _iq4_nl(blocks: torch.Tensor) -> tuple[torch.Tensor, Scales]:
    return _halves(blocks[..., 2:]), Scales(_float16(blocks[..., :2]), 32, table=_iq4_table(blocks.device))


def _iq4_xs(blocks: torch.Tensor) -> tuple[torch.Tensor, Scales]:
    low = _halves(blocks[..., 4:8], -1).flatten(2)
    high = _bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(2)
    steps = ((low | high << 4).view(torch.int8) - 32).flatten(1)
    codes = _halves(blocks[..., 8:].unflatten(-1, (8, 16)))
    return codes, Scales(_float16(blocks[..., :2]), 256, table=_iq4_table(blocks.device), steps=steps)


_DECODERS: dict[Coding, tuple[int, Callable[[torch.Tensor], tuple[torch.Tensor, Scales]]]] = {
    Coding.Q4_K: (4, partial(_k_with_minima, bits=4)),
    Coding.Q5_K: (5, partial(_k_with_minima, bits=5)),
    Coding.Q6_K: (6, _q6_k),
    Coding.Q8_0: (8, _q8_0),
    Coding.Q4_0: (4, partial(_legacy, bits=4, has_minima=False)),
    Coding.Q4_1: (4, partial(_legacy, bits=4, has_minima=True)),
    Coding.Q5_0: (5, partial(_legacy, bits=5, has_minima=False)),
    Coding.Q5_1: (5, partial(_legacy, bits=5, has_minima=True)),
    Coding.IQ4_NL: (4, _iq4_nl),
    Coding.IQ4_XS: (4, _iq4_xs),
}
