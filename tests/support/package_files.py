"""Tensors of quantized modules as packages save them: bitsandbytes, ModelOpt, compressed-tensors in FP4, HQQ, torchao.

Codes and scales are random. The layouts were compared once with what bitsandbytes 0.50.2, HQQ 0.2.8, torchao 0.18.0 and
compressed-tensors 0.20.0 make; ModelOpt's are as its documentation says. AutoRound 0.16.1 packs as GPTQ and AWQ do.
"""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests.support.coded_weights import E2M1
from tests.support.quantized_files import Quantized, Tensors

BLOCK = 64


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def as_bytes(text: str) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8)


def bitsandbytes_4_bits(
    out_features: int,
    in_features: int,
    seed: int,
    *,
    kind: str = "nf4",
    nested: bool = False,
    storage: torch.dtype = torch.uint8,
) -> Quantized:
    generator, count = seeded(seed), out_features * in_features
    codes = torch.randint(0, 16, (count,), generator=generator, dtype=torch.uint8)
    numbers = torch.linspace(-1, 1, 16) ** 3
    state = {"quant_type": kind, "blocksize": BLOCK, "dtype": "bfloat16", "shape": [out_features, in_features]}
    parts: Tensors = {}
    absmax = torch.rand(count // BLOCK, generator=generator).add(0.1).mul(0.05)
    parts["weight.absmax"] = absmax
    if nested:
        of_codes = torch.linspace(-1, 1, 256)
        codes_of_scales = torch.randint(0, 256, absmax.shape, generator=generator, dtype=torch.uint8)
        of_blocks = torch.rand(-(-absmax.shape[0] // 256), generator=generator).mul(0.01)
        absmax = of_codes[codes_of_scales.int()] * of_blocks.repeat_interleave(256)[: absmax.shape[0]] + 0.03
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.03}
        parts = {
            "weight.absmax": codes_of_scales,
            "weight.nested_absmax": of_blocks,
            "weight.nested_quant_map": of_codes,
        }
    packed = codes[0::2] << 4 | codes[1::2]
    parts |= {
        "weight": packed.view(storage).unsqueeze(1),
        "weight.quant_map": numbers,
        f"weight.quant_state.bitsandbytes__{kind}": as_bytes(json.dumps(state)),
    }
    expected = numbers[codes.int()] * absmax.repeat_interleave(BLOCK)
    return parts, expected.view(out_features, in_features)


def bitsandbytes_8_bits(out_features: int, in_features: int, seed: int) -> Quantized:
    generator = seeded(seed)
    weight = torch.randint(-127, 128, (out_features, in_features), generator=generator, dtype=torch.int8)
    largest = torch.rand(out_features, generator=generator).add(0.1).mul(0.1)
    parts = {"weight": weight, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    return parts, weight.float() * (largest.unsqueeze(1) / 127)


def modelopt_fp8(out_features: int, in_features: int, seed: int) -> Quantized:
    weight = torch.randn(out_features, in_features, generator=seeded(seed)).mul(60).clamp(-448, 448)
    weight = weight.to(torch.float8_e4m3fn)
    scale = torch.tensor(1e-3)
    return {"weight": weight, "weight_scale": scale, "input_scale": torch.tensor(0.01)}, weight.float() * scale


def e2m1(out_features: int, in_features: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes, the first of two in the lower half of a byte, and their numbers."""
    codes = torch.randint(0, 16, (out_features, in_features), generator=seeded(seed), dtype=torch.uint8)
    return codes[:, 0::2] | codes[:, 1::2] << 4, E2M1[codes.int()]


def nvfp4(out_features: int, in_features: int, seed: int, *, divides: bool = False) -> Quantized:
    """ModelOpt's; with `divides` compressed-tensors', whose scale for all divides the others."""
    packed, numbers = e2m1(out_features, in_features, seed)
    scales = (
        torch.rand(out_features, in_features // 16, generator=seeded(seed)).add(0.1).mul(200).to(torch.float8_e4m3fn)
    )
    if divides:
        of_all = torch.tensor([20000.0])
        parts = {"weight_packed": packed, "weight_scale": scales, "weight_global_scale": of_all}
        factors = scales.float() / of_all
    else:
        of_all = torch.tensor(5e-5)
        parts = {"weight": packed, "weight_scale": scales, "weight_scale_2": of_all, "input_scale": torch.tensor(0.01)}
        factors = scales.float() * of_all
    return parts, numbers * factors.repeat_interleave(16, 1)


def mxfp4(out_features: int, in_features: int, seed: int) -> Quantized:
    packed, numbers = e2m1(out_features, in_features, seed)
    shape = (out_features, in_features // 32)
    exponents = torch.randint(118, 122, shape, generator=seeded(seed), dtype=torch.uint8)
    scales = torch.ldexp(torch.ones(shape), exponents.int() - 127)
    return {"weight_packed": packed, "weight_scale": exponents}, numbers * scales.repeat_interleave(32, 1)


def hqq(out_features: int, in_features: int, seed: int, *, bits: int = 4, axis: int = 1, group: int = 64) -> Quantized:
    count, generator = out_features * in_features // group, seeded(seed)
    shape, of_groups = ((group, count), (1, count)) if axis == 0 else ((count, group), (count, 1))
    codes = torch.randint(0, 1 << bits, shape, generator=generator)
    scale = torch.rand(of_groups, generator=generator).add(0.1).mul(0.02)
    zero = torch.rand(of_groups, generator=generator).mul((1 << bits) - 1)
    per_word, dtype, name = (10, torch.int32, "3bit_32") if bits == 3 else (8 // bits, torch.uint8, f"{bits}bit_u8")
    rows = -(-shape[0] // per_word)
    padded = torch.zeros(rows * per_word, shape[1], dtype=torch.int64)
    padded[: shape[0]] = codes
    shifts = torch.arange(per_word - 1, -1, -1).mul(bits).view(-1, 1, 1)
    parts = {
        "W_q": (padded.unflatten(0, (per_word, rows)) << shifts).sum(0).to(dtype),
        "scale": scale,
        "zero": zero,
        "nbits": torch.tensor(bits, dtype=torch.int32),
        "group_size": torch.tensor(group, dtype=torch.int32),
        "axis": torch.tensor(axis, dtype=torch.int32),
        "shape": torch.tensor([out_features, in_features]),
        "packing": as_bytes(name),
        "encoded_state_dict": torch.tensor(1, dtype=torch.uint8),
    }
    return parts, ((codes.float() - zero) * scale).reshape(out_features, in_features)


def torchao_octets(
    out_features: int, in_features: int, seed: int, *, group: int | None = None, has_zeros: bool = False
) -> Quantized:
    generator, group = seeded(seed), group or in_features
    weight = torch.randint(-128, 128, (out_features, in_features), generator=generator, dtype=torch.int8)
    shape = (out_features, in_features // group)
    scale = torch.rand(shape, generator=generator).add(0.1).mul(1e-3)
    zeros = torch.zeros(shape, dtype=torch.int8)
    if has_zeros:
        zeros = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
    parts = {"_weight_qdata": weight, "_weight_scale": scale, "_weight_zero_point": zeros}
    expected = weight.float() - zeros.float().repeat_interleave(group, 1)
    return parts, expected * scale.repeat_interleave(group, 1)


def torchao_int4(out_features: int, in_features: int, seed: int) -> Quantized:
    generator = seeded(seed)
    codes = torch.randint(-8, 8, (out_features, in_features), generator=generator, dtype=torch.int8)
    shape = (in_features // BLOCK, out_features)
    scale, zero = (torch.rand(shape, generator=generator).sub(offset).mul(0.01) for offset in (-0.1, 0.5))
    parts = {
        "_weight_qdata": codes[:, 0::2] & 15 | codes[:, 1::2] << 4,
        "_weight_scale": scale,
        "_weight_zero_point": zero,
    }
    of_inputs = (each.t().repeat_interleave(BLOCK, 1) for each in (scale, zero))
    return parts, codes.float() * next(of_inputs) + next(of_inputs)


def describe_for_torchao(directory: Path, kind: str, group: int | None = None) -> None:
    """Writes the type of each weight with codes to the header of the file."""
    path = directory / "model.safetensors"
    tensors, header = load_file(path), {"format": "pt"}
    for name, tensor in tensors.items():
        if name.endswith("._weight_qdata"):
            block = [1, group or tensor.shape[1]]
            described = {"_type": kind, "_data": {"block_size": block}, "_tensor_data_names": ["qdata", "scale"]}
            header[f"{name.removesuffix('_weight_qdata')}weight"] = json.dumps(described)
    save_file(tensors, path, metadata=header)
