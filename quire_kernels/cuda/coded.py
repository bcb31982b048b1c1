"""Products with weights as files store them: codes become numbers in the tile that is multiplied.

All codings have one form here, of about the size in the file: planes of codes, and scales of two levels as in GGUF's
K-quants. A number is computed in float32 and rounded to the dtype of the tokens. It has the same bits as in the
dequantized weight, since all operations but one are exact.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch.nn import functional

from quire_kernels.cuda import fp8
from quire_kernels.cuda.launch import ceil_div, launch
from quire_kernels.packed_weight import E2M1, CodedWeight, Coding, PackedWeight, Quantization
from quire_kernels.reference import activated

# Inputs of a tile: all of its codes of an output have the same scale, or the two halves have.
_INPUTS = 32
# Tokens and outputs of a tile, and pieces of inputs of a turn of the loop, at most: few tokens leave more programs to
# read the weight, and room for longer turns.
_OF_FEW, _OF_MANY = (16, 32, 8), (64, 64, 4)
# With few tokens, several programs share the inputs of a tile: target programs, maximum parts, minimum inputs per part.
_PROGRAMS, _MAX_PARTS, _INPUTS_OF_PART = 512, 8, 512
_MULTIPLE = 256
# The values of the 16 codes of IQ4_NL and IQ4_XS.
_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ4_LOWER, _IQ4_UPPER = (
    tl.constexpr(int.from_bytes(bytes(number + 128 for number in each), "little")) for each in (_IQ4[:8], _IQ4[8:])
)


@dataclass(frozen=True, slots=True)
class Scales:
    """The values of the codes of R rows: (code - zero) * unit * step - minimum_unit * minimum_step."""

    units: torch.Tensor
    """[units, R], floating; of `inputs_of_unit` inputs each, a multiple of 32 where there are several."""
    inputs_of_unit: int
    zero: int = 0
    zeros: torch.Tensor | None = None
    """[units, R] uint8, instead of `zero`."""
    kind: Literal["whole", "iq4", "fp8", "table"] = "whole"
    """The kind of codes: integers, places of integers in `_IQ4`, numbers in E4M3, or places in `table`; the last two
    kinds have no zero."""
    table: torch.Tensor | None = None
    """[16] float32."""
    steps: torch.Tensor | None = None
    """[groups, R] int8; None: 1."""
    step_kind: Literal["whole", "e8m0", "e4m3"] = "whole"
    """Numbers that the bytes of `steps` stand for."""
    inputs_of_step: int = 32
    """32 or 16."""
    minimum_units: torch.Tensor | None = None
    """As `units`; None: there are no minima."""
    minimum_steps: torch.Tensor | None = None

    def numbers(self, codes: torch.Tensor) -> torch.Tensor:
        """[R, in] float32 for codes [R, in] uint8."""
        inputs = torch.arange(codes.shape[1], device=codes.device)
        of_unit, of_step = inputs // self.inputs_of_unit, inputs // self.inputs_of_step
        steps = self.steps
        if steps is not None and self.step_kind != "whole":
            steps = steps.view(torch.float8_e8m0fnu if self.step_kind == "e8m0" else torch.float8_e4m3fn).float()
        if self.kind == "fp8":
            numbers = codes.view(torch.float8_e4m3fn).float()
        elif self.kind == "table":
            assert self.table is not None
            numbers = self.table[codes.long()]
        elif self.kind == "iq4":
            numbers = _iq4_table(codes.device)[codes.long()]
        else:
            numbers = codes.float() - (self.zero if self.zeros is None else self.zeros[of_unit].t().float())
        numbers *= _product_of(self.units[of_unit], steps, of_step)
        if self.minimum_units is not None:
            numbers -= _product_of(self.minimum_units[of_unit], self.minimum_steps, of_step)
        return numbers


def _product_of(units: torch.Tensor, steps: torch.Tensor | None, of_step: torch.Tensor) -> torch.Tensor:
    return (units.float() if steps is None else units.float() * steps[of_step]).t()


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedWeight(PackedWeight):
    """A weight whose `data` has the codes, [out, bytes], or the lower 4 bits of codes of 5 to 7 bits.

    32 bytes hold parts of the codes of several pieces of 32 inputs, the first piece in the lowest bits: two pieces with
    parts of 4 bits, four with 2 bits, eight with 1 bit. Rows end with whole bytes.
    """

    bits: int
    """Bits of a code."""
    high: torch.Tensor | None
    """[out, bytes], the other bits."""
    scale: Scales


@triton.jit
def _step(steps, KIND: tl.constexpr):
    if KIND == "whole":
        return steps.to(tl.float32)
    bits = steps.to(tl.uint8, bitcast=True).to(tl.int32)
    if KIND == "e8m0":
        # 0 is 2^-127, which has no bits of an exponent.
        return tl.maximum(bits << 23, 1 << 22).to(tl.float32, bitcast=True)
    # As for numbers in FP8 below.
    return (((bits & 128) << 24) | ((bits & 127) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def _scales_of(units, steps, unit, inputs, at, rows, num_outputs, STEP: tl.constexpr, KIND: tl.constexpr):
    """float32 [1, outputs], or [32, outputs] where the inputs from `at` on have two steps."""
    scales = tl.load(units + unit * num_outputs + rows).to(tl.float32)
    if steps is not None:
        step = tl.load(steps + at // STEP * num_outputs + rows)
        if STEP < 32:
            step = tl.where(inputs < STEP, step, tl.load(steps + (at // STEP + 1) * num_outputs + rows))
        scales *= _step(step, KIND)
    return scales


@triton.jit(do_not_specialize=("num_tokens",))
def _product_kernel(
    output,
    x,
    data,
    high,
    zeros,
    units,
    steps,
    minimum_units,
    minimum_steps,
    table,
    bias,
    num_tokens,
    x_stride,
    num_outputs,
    num_inputs,
    turns,
    row_bytes,
    high_bytes,
    TOKENS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PIECES: tl.constexpr,
    BITS: tl.constexpr,
    WIDTH: tl.constexpr,
    ZERO: tl.constexpr,
    KIND: tl.constexpr,
    UNIT: tl.constexpr,
    STEP: tl.constexpr,
    STEP_KIND: tl.constexpr,
):
    tokens = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)[:, None]
    outputs = tl.program_id(1).to(tl.int64) * OUTPUTS + tl.arange(0, OUTPUTS)[None, :]
    first = tl.program_id(2) * turns
    # Behind the last output that one is read again.
    rows = tl.minimum(outputs, num_outputs - 1)
    inputs, columns = tl.arange(0, 32)[:, None], tl.arange(0, 32)[None, :]
    is_token = tokens < num_tokens
    sums = tl.zeros((TOKENS, OUTPUTS), tl.float32)
    for turn in range(first, tl.minimum(first + turns, tl.cdiv(num_inputs, PIECES * 32))):
        for piece in tl.static_range(PIECES):  # pyrefly: ignore
            begin = turn * (PIECES * 32) + piece * 32
            # Behind the last input tokens have zeros, and the last scales are read again.
            at = tl.minimum(begin, (num_inputs - 1) // 32 * 32)
            unit = at // UNIT if UNIT else 0
            if BITS == 8:
                codes = tl.load(data + rows * row_bytes + begin + inputs).to(tl.int32)
            else:
                if piece % 2 == 0:
                    halves = tl.load(data + rows * row_bytes + turn * (PIECES * 16) + piece * 16 + inputs)
                codes = ((halves >> (piece % 2 * 4)) & 15).to(tl.int32)  # pyrefly: ignore[unbound-name]
            if high is not None:
                if piece % (8 // WIDTH) == 0:
                    place = (turn * PIECES + piece) * (4 * WIDTH)
                    upper = tl.load(high + rows * high_bytes + place + inputs)
                more = (upper >> (piece % (8 // WIDTH) * WIDTH)) & ((1 << WIDTH) - 1)  # pyrefly: ignore
                codes |= more.to(tl.int32) << 4
            if KIND == "fp8":
                # Exponent and fraction where float32 has them: 2^120 times smaller, also if there is no exponent.
                bits = ((codes & 128) << 24) | ((codes & 127) << 20)
                numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
            elif KIND == "table":
                numbers = tl.load(table + codes)
            else:
                if KIND == "iq4":
                    # Eight bytes each, which are 128 more than the values of codes.
                    eight = tl.where(codes < 8, _IQ4_LOWER, _IQ4_UPPER).to(tl.uint64)
                    codes = ((eight >> (codes % 8 * 8).to(tl.uint64)) & 255).to(tl.int32)
                # 2^23 plus the code: an exact conversion without an instruction for that.
                numbers = (codes | 0x4B000000).to(tl.float32, bitcast=True)
                if zeros is not None:
                    numbers -= tl.load(zeros + unit * num_outputs + rows).to(tl.float32) + 8388608.0
                else:
                    numbers -= 8388608.0 + ZERO
            numbers *= _scales_of(units, steps, unit, inputs, at, rows, num_outputs, STEP, STEP_KIND)
            if minimum_units is not None:
                numbers -= _scales_of(minimum_units, minimum_steps, unit, inputs, at, rows, num_outputs, STEP, "whole")
            values = tl.load(
                x + tokens * x_stride + begin + columns, mask=is_token & (begin + columns < num_inputs), other=0.0
            )
            sums = tl.dot(values, numbers.to(values.dtype), sums)
    if bias is not None:
        sums += tl.load(bias + rows).to(tl.float32) * (first == 0)
    output += tl.program_id(2).to(tl.int64) * num_tokens * num_outputs
    tl.store(
        output + tokens * num_outputs + outputs,
        sums.to(output.dtype.element_ty),
        mask=is_token & (outputs < num_outputs),
    )


def product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: str, output_dtype: torch.dtype
) -> torch.Tensor:
    """`quire_kernels.ops.product` with a weight of `pack_coded`."""
    if isinstance(weight, fp8.Fp8Weight):
        return fp8.product(x, weight, bias, activation, output_dtype)
    assert isinstance(weight, GroupedWeight)
    is_plain = not weight.gated and activation == "identity"
    lines, scale, high = x.reshape(-1, x.shape[-1]), weight.scale, weight.high
    lines = lines if lines.stride(1) == 1 else lines.contiguous()
    tokens, outputs, pieces = _OF_FEW if len(lines) <= _OF_FEW[0] else _OF_MANY
    programs = ceil_div(weight.out_features, outputs)
    if weight.high is not None:
        # More of them would not stay in registers.
        pieces = _pieces(weight.bits)
    pieces = math.gcd(pieces, weight.padded_in // _INPUTS)
    parts, part = _parts(weight.in_features, programs) if tokens == _OF_FEW[0] else (1, weight.in_features)
    dtype = output_dtype if is_plain and parts == 1 else torch.float32
    sums = torch.empty((parts, len(lines), weight.out_features), dtype=dtype, device=x.device)
    if sums.numel():
        launch(
            _product_kernel,
            (ceil_div(len(lines), tokens), programs, parts),
            sums,
            lines,
            weight.data,
            high,
            scale.zeros,
            scale.units,
            scale.steps,
            scale.minimum_units,
            scale.minimum_steps,
            scale.table,
            bias,
            len(lines),
            lines.stride(0),
            weight.out_features,
            weight.in_features,
            ceil_div(part, pieces * _INPUTS),
            weight.data.shape[1],
            0 if high is None else high.shape[1],
            TOKENS=tokens,
            OUTPUTS=outputs,
            PIECES=pieces,
            BITS=weight.bits,
            WIDTH=weight.bits - 4,
            ZERO=scale.zero,
            KIND=scale.kind,
            UNIT=scale.inputs_of_unit if len(scale.units) > 1 else 0,
            STEP=scale.inputs_of_step,
            STEP_KIND=scale.step_kind,
        )
    whole = (sums[0] if parts == 1 else sums.sum(0)).view(*x.shape[:-1], weight.out_features)
    return whole.to(output_dtype) if is_plain else activated(whole, weight.gated, activation, output_dtype)


def _pieces(bits: int) -> int:
    """Pieces of 32 inputs that share the bytes of a plane."""
    return {5: 8, 6: 4}.get(bits, 2)


def _parts(in_features: int, programs: int) -> tuple[int, int]:
    """Programs that share the inputs of a tile, and the inputs of each: they follow from the weight, so that the
    rounding of a token's sum does not depend on other tokens."""
    parts = min(_MAX_PARTS, _PROGRAMS // programs, in_features // _INPUTS_OF_PART)
    part = ceil_div(in_features, max(parts, 1) * _MULTIPLE) * _MULTIPLE
    return ceil_div(in_features, part), part


def products(
    x: torch.Tensor, weights: Sequence[PackedWeight], bias: torch.Tensor | None, output_dtype: torch.dtype
) -> torch.Tensor:
    sizes = [weight.out_features for weight in weights]
    biases = [None] * len(weights) if bias is None else bias.split(sizes)
    parts = [product(x, *each, "identity", output_dtype) for each in zip(weights, biases, strict=True)]
    return torch.cat(parts, -1)


def look_up(weight: CodedWeight, ids: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    codes, _, scale = read(CodedWeight(weight.coding, weight.rows[ids]))
    return scale.numbers(codes).to(dtype)


def pack_coded(
    weight: CodedWeight, gated: bool, quantization: Quantization, dtype: torch.dtype = torch.bfloat16
) -> PackedWeight:
    if fp8.takes(weight) and fp8.has_products(weight.rows.device, dtype):
        return fp8.pack(weight, gated)
    codes, bits, scale = read(weight)
    scale = replace(scale, **{each.name: _packed(getattr(scale, each.name)) for each in fields(scale)})
    out_features, in_features = codes.shape
    codes = functional.pad(codes, (0, -in_features % (_INPUTS * _pieces(bits))))
    return GroupedWeight(
        data=codes if bits == 8 else _plane(codes & 15, 4),
        scales=None,
        dtype=dtype,
        out_features=out_features,
        in_features=in_features,
        padded_in=codes.shape[1],
        gated=gated,
        quantization=quantization,
        coding=weight.coding,
        bits=bits,
        high=_plane(codes >> 4, bits - 4) if 4 < bits < 8 else None,
        scale=scale,
    )


def _packed(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def _plane(parts: torch.Tensor, width: int) -> torch.Tensor:
    """Parts of codes, [R, in] uint8 below 2^width, in the bytes of `GroupedWeight`."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=parts.device)
    pieces = parts.unflatten(1, (-1, len(shifts), _INPUTS)) << shifts[:, None]
    return pieces.sum(2, dtype=torch.uint8).flatten(1)


def read(weight: CodedWeight) -> tuple[torch.Tensor, int, Scales]:
    """The codes [out, in] uint8, their bits, and their values."""
    rows, grouped = weight.rows, weight.scales
    if grouped is None:
        bits, decode = _DECODERS[weight.coding]
        codes, scale = decode(rows.unflatten(1, (-1, weight.coding.group[1])))
        return codes.reshape(len(rows), -1), bits, scale
    units, zeros = grouped.values.t(), None if grouped.zeros is None else grouped.zeros.t()
    if weight.coding is Coding.TABLE4 or grouped.parts is not None:
        table = _e2m1_table(units.device) if grouped.table is None else grouped.table
        scale = Scales(units, grouped.inputs, kind="table", table=table)
        if grouped.parts is not None:
            kind, inputs = ("e8m0", 32) if weight.coding is Coding.MXFP4 else ("e4m3", 16)
            scale = replace(scale, steps=grouped.parts.view(torch.int8).t(), inputs_of_step=inputs, step_kind=kind)
        return _halves(rows[..., None]).flatten(1), 4, scale
    if weight.coding is Coding.INT4:
        return _halves(rows[..., None]).flatten(1), 4, Scales(units, grouped.inputs, 8, zeros)
    if weight.coding is Coding.INT8:
        return rows.contiguous(), 8, Scales(units, grouped.inputs, 128, zeros)
    return rows.contiguous(), 8, Scales(units, grouped.inputs, kind="fp8")


def _halves(data: torch.Tensor, dim: int = -2) -> torch.Tensor:
    """The lower and the upper halves of bytes, in a new dimension."""
    return torch.stack((data & 15, data >> 4), dim)


def _bits(data: torch.Tensor, width: int) -> torch.Tensor:
    """All parts of `width` bits: [..., B] uint8 -> [..., parts, B], the lowest first."""
    shifts = torch.arange(0, 8, width, dtype=torch.uint8, device=data.device)
    return data[..., None, :] >> shifts[:, None] & (1 << width) - 1


def _float16(data: torch.Tensor) -> torch.Tensor:
    """[R, blocks, 2] uint8 -> [blocks, R]."""
    return data.contiguous().view(torch.float16)[..., 0].t()


# Convert blocks [R, n, bytes of a block] to codes in the order of inputs, and scales; as ggml documents them.


def _k_with_minima(blocks: torch.Tensor, *, bits: int) -> tuple[torch.Tensor, Scales]:
    packed = blocks[..., 4:16]
    first, second, both = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    steps = torch.cat((first & 63, both & 15 | first >> 6 << 4), -1).view(torch.int8).flatten(1).t()
    minimum_steps = torch.cat((second & 63, both >> 4 | second >> 6 << 4), -1).view(torch.int8).flatten(1).t()
    codes = _halves(blocks[..., -128:].unflatten(-1, (4, 32)))
    if bits == 5:
        codes = codes.flatten(2, 3) | _bits(blocks[..., 16:48], 1) << 4
    units, minimum_units = _float16(blocks[..., :2]), _float16(blocks[..., 2:4])
    return codes, Scales(units, 256, steps=steps, minimum_units=minimum_units, minimum_steps=minimum_steps)


def _q6_k(blocks: torch.Tensor) -> tuple[torch.Tensor, Scales]:
    low, high = blocks[..., :128].unflatten(-1, (2, 2, 32)), blocks[..., 128:192].unflatten(-1, (2, 32))
    codes = _halves(low, -3).flatten(3, 4) | _bits(high, 2) << 4
    steps = blocks[..., 192:208].contiguous().view(torch.int8).flatten(1).t()
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


@functools.cache
def _e2m1_table(device: torch.device) -> torch.Tensor:
    return E2M1.to(device)


def _iq4_nl(blocks: torch.Tensor) -> tuple[torch.Tensor, Scales]:
    return _halves(blocks[..., 2:]), Scales(_float16(blocks[..., :2]), 32, 128, kind="iq4")


def _iq4_xs(blocks: torch.Tensor) -> tuple[torch.Tensor, Scales]:
    low = _halves(blocks[..., 4:8], -1).flatten(2)
    high = _bits(blocks[..., 2:4], 2).transpose(-1, -2).flatten(2)
    steps = ((low | high << 4).view(torch.int8) - 32).flatten(1).t()
    codes = _halves(blocks[..., 8:].unflatten(-1, (8, 16)))
    return codes, Scales(_float16(blocks[..., :2]), 256, 128, kind="iq4", steps=steps)


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
