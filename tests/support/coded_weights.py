"""Weights as files store them, of any codes and scales: the package `gguf` reads more kinds than it writes."""

import gguf
import numpy as np
import torch

from quire_kernels.packed_weight import CodedWeight, Coding, GroupScales

_FLOAT16_AT = {Coding.Q6_K: (208,), **dict.fromkeys((Coding.Q4_K, Coding.Q5_K, Coding.Q4_1, Coding.Q5_1), (0, 2))}
"""Byte offsets of the float16 numbers of a group, if it is not one number at its beginning."""
_LARGEST = {
    Coding.Q4_K: 15 * 63,
    Coding.Q5_K: 31 * 63,
    Coding.Q6_K: 32 * 127,
    Coding.Q8_0: 127,
    Coding.Q4_0: 8,
    Coding.Q4_1: 15,
    Coding.Q5_0: 16,
    Coding.Q5_1: 31,
    Coding.IQ4_NL: 127,
    Coding.IQ4_XS: 127 * 32,
    Coding.INT4: 15,
    Coding.INT8: 255,
    Coding.FP8: 448,
    Coding.TABLE4: 1,
}
"""Largest absolute value of a number, in scales of its group."""


SCALED = (Coding.INT4, Coding.INT8, Coding.FP8, Coding.TABLE4)
"""Codings whose rows hold only codes, with scales of groups of any size."""
FLOATS = (Coding.FP8, Coding.TABLE4)
"""Codings whose codes are no integers, and have no codes of 0."""
FP4 = {Coding.MXFP4: 32, Coding.NVFP4: 16}
"""Codings of E2M1, with the inputs that share a scale of a byte."""
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def make_coded(coding: Coding, out_features: int, num_groups: int, seed: int = 0) -> CodedWeight:
    """Random bytes, with scales of either sign that make numbers of at most about 0.1. If groups may have any number of
    inputs, and scales any dtype, the seed chooses them."""
    if coding in FP4:
        return make_fp4(coding, out_features, 64 * num_groups - 16 * (coding is Coding.NVFP4), seed)
    if coding in SCALED:
        inputs = (32, 64, 128, 96)[seed % 4]
        # The last group of FP8 may have fewer inputs; a single group may have any number.
        in_features = inputs * num_groups - (seed % 3 * 30 if num_groups == 1 or coding is Coding.FP8 else 0)
        dtype = (torch.float16, torch.bfloat16, torch.float32)[seed // 4 % 3]
        return make_scaled(coding, out_features, max(in_features, 2), inputs, dtype, seed=seed, has_zeros=seed % 2 == 1)
    generator = np.random.default_rng(seed)
    groups = generator.integers(0, 256, (out_features, num_groups, coding.group[1]), dtype=np.uint8)
    for at in _FLOAT16_AT.get(coding, (0,)):
        numbers = (generator.normal(0, 0.05, groups.shape[:2]) / _LARGEST[coding]).astype("<f2")
        groups[..., at : at + 2] = numbers[..., None].view(np.uint8)
    return CodedWeight(coding, torch.from_numpy(groups.reshape(out_features, -1)))


def make_scaled(
    coding: Coding,
    out_features: int,
    in_features: int,
    inputs: int,
    dtype: torch.dtype,
    *,
    has_zeros: bool,
    seed: int = 0,
) -> CodedWeight:
    """The same with groups of `inputs` inputs and scales of this dtype."""
    generator = np.random.default_rng(seed)
    per_group, num_bytes = coding.group
    codes = generator.integers(0, 256, (out_features, in_features // per_group * num_bytes), dtype=np.uint8)
    if coding is Coding.FP8:
        codes[codes & 127 == 127] ^= 1  # NaN
    groups = -(-in_features // inputs)
    scales = torch.from_numpy(generator.normal(0, 0.05, (out_features, groups)) / _LARGEST[coding]).to(dtype)
    zeros = None
    if has_zeros and coding not in FLOATS:
        zeros = torch.from_numpy(generator.integers(0, 16 if coding is Coding.INT4 else 256, scales.shape, np.uint8))
    table = torch.from_numpy(generator.uniform(-1, 1, 16).astype("f4")) if coding is Coding.TABLE4 else None
    return CodedWeight(coding, torch.from_numpy(codes), GroupScales(scales, zeros, inputs, table=table))


def make_fp4(coding: Coding, out_features: int, in_features: int, seed: int = 0) -> CodedWeight:
    """Random codes, and scales that make numbers of at most about 0.1."""
    generator = np.random.default_rng(seed)
    rows = generator.integers(0, 256, (out_features, in_features // 2), dtype=np.uint8)
    low, high, unit = (115, 121, 1.0) if coding is Coding.MXFP4 else (0, 127, 5e-5)
    parts = generator.integers(low, high, (out_features, in_features // FP4[coding]), dtype=np.uint8)
    return CodedWeight.of_fp4(coding, torch.from_numpy(rows), torch.from_numpy(parts), unit)


def dequantized(weight: CodedWeight) -> torch.Tensor:
    """[out, in] float32, by the package `gguf`; if rows hold only codes, number by number in float64."""
    if (scales := weight.scales) is not None:
        codes = weight.rows
        if weight.coding in FP4 or weight.coding is Coding.TABLE4:
            table = E2M1 if scales.table is None else scales.table
            numbers = table.double()[torch.stack((codes & 15, codes >> 4), -1).flatten(1).int()]
        elif weight.coding is Coding.FP8:
            numbers = codes.view(torch.float8_e4m3fn).double()
        else:
            bits = 4 if weight.coding is Coding.INT4 else 8
            numbers = torch.stack([codes >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)], -1).flatten(1)
            zeros = torch.full(scales.values.shape, 1 << (bits - 1)) if scales.zeros is None else scales.zeros
            numbers = numbers.double() - zeros.double().repeat_interleave(scales.inputs, 1)[:, : numbers.shape[1]]
        factors = scales.values.double().repeat_interleave(scales.inputs, 1)[:, : numbers.shape[1]]
        if scales.parts is not None:
            factors = (factors[:, :1] * scales.parts.double()).float().double()
            factors = factors.repeat_interleave(FP4[weight.coding], 1)
        return (numbers * factors).float()
    return torch.from_numpy(gguf.dequantize(weight.rows.numpy(), gguf.GGMLQuantizationType[weight.coding.value]))
