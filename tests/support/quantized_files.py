"""Model directories whose linear layers are quantized, in the formats of safetensors files.

AWQ and GPTQ are written as their formats are specified; compressed-tensors by the package of that name, with whose
weights the results are also compared. Codes and scales are random, and do not depend on the weights that they replace.
"""

import re
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from quire_kernels.packed_weight import CodedWeight, Coding
from tests.support.coded_weights import dequantized, make_scaled
from tests.support.models import edit_config, edit_tensors

Tensors = dict[str, torch.Tensor]
Quantized = tuple[Tensors, torch.Tensor]
"""Tensors of a module, and the weight [out, in] that they stand for."""
Quantize = Callable[[int, int, int], Quantized]
"""Makes a module for numbers of outputs and inputs and a seed."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_LINEAR = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.\w+_proj\.weight")


def codes_of(weight: CodedWeight) -> torch.Tensor:
    """[out, in]"""
    if weight.coding is not Coding.INT4:
        return weight.rows
    return torch.stack((weight.rows & 15, weight.rows >> 4), -1).flatten(1)


def words_of(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """[n, codes] -> [n, words] int32, the first code in the lowest bits."""
    codes = codes.long().unflatten(1, (-1, 32 // bits))
    return (codes << torch.arange(0, 32, bits)).sum(-1).to(torch.uint32).view(torch.int32)


def as_awq(weight: CodedWeight) -> Tensors:
    scales = weight.scales
    assert scales is not None
    zeros = torch.full_like(scales.values, 8, dtype=torch.uint8) if scales.zeros is None else scales.zeros

    def packed(codes: torch.Tensor) -> torch.Tensor:
        in_order = codes.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)
        return words_of(in_order, 4)

    return {
        "qweight": packed(codes_of(weight).t()),
        "qzeros": packed(zeros.t()),
        "scales": scales.values.t().contiguous(),
    }


def as_gptq(weight: CodedWeight, *, is_v2: bool = False) -> Tensors:
    scales, bits = weight.scales, 4 if weight.coding is Coding.INT4 else 8
    assert scales is not None
    middle = 1 << (bits - 1)
    zeros = torch.full(scales.values.shape, middle) if scales.zeros is None else scales.zeros.long()
    stored = zeros if is_v2 else (zeros - 1) % (2 * middle)
    in_features = weight.in_features
    return {
        "qweight": words_of(codes_of(weight), bits).t().contiguous(),
        "qzeros": words_of(stored.t(), bits),
        "scales": scales.values.t().contiguous(),
        "g_idx": (torch.arange(in_features) // scales.inputs).int(),
    }


def awq(out_features: int, in_features: int, seed: int, *, group: int = 64, symmetric: bool = False) -> Quantized:
    """Symmetric codes also have zeros, each of them 8."""
    has_zeros = not symmetric
    weight = make_scaled(Coding.INT4, out_features, in_features, group, torch.float16, has_zeros=has_zeros, seed=seed)
    return as_awq(weight), dequantized(weight)


def gptq(
    out_features: int,
    in_features: int,
    seed: int,
    *,
    bits: int = 4,
    group: int = 64,
    symmetric: bool = False,
    is_v2: bool = False,
    in_order: bool = True,
) -> Quantized:
    """Without `in_order`, inputs are in the order of their activations, so that groups are mixed."""
    coding = Coding.INT4 if bits == 4 else Coding.INT8
    weight = make_scaled(coding, out_features, in_features, group, torch.float16, has_zeros=not symmetric, seed=seed)
    tensors, expected = as_gptq(weight, is_v2=is_v2), dequantized(weight)
    if in_order:
        return tensors, expected
    order = torch.randperm(in_features, generator=torch.Generator().manual_seed(seed))
    tensors["g_idx"] = tensors["g_idx"][order]
    tensors["qweight"] = words_of(codes_of(weight)[:, order], bits).t().contiguous()
    return tensors, expected[:, order]


def compressed(
    out_features: int, in_features: int, seed: int, *, args: dict[str, Any], form: str, dtype: torch.dtype
) -> Quantized:
    """`compress` of the package makes the tensors from a weight, and `decompress` the expected weight from those."""
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))
    assert scheme.weights is not None
    generator = torch.Generator().manual_seed(seed)
    shape = {
        "tensor": (1,),
        "channel": (out_features, 1),
        "group": (out_features, in_features // (scheme.weights.group_size or 1)),
        "block": tuple(-(-size // 128) for size in (out_features, in_features)),
    }[args["strategy"]]
    state = {
        "weight": torch.randn(out_features, in_features, generator=generator).mul(0.05).to(dtype),
        "weight_scale": (torch.rand(shape, generator=generator) + 0.1).mul(0.1 / 2**scheme.weights.num_bits).to(dtype),
    }
    if args.get("type") == "float":
        state["weight_scale"] = state["weight_scale"] / 2
    if not args["symmetric"]:
        half = 1 << (scheme.weights.num_bits - 1)
        state["weight_zero_point"] = torch.randint(-half, half, shape, generator=generator, dtype=torch.int8)
    compressor = BaseCompressor.get_value_from_registry(form)
    tensors = compressor.compress(dict(state), scheme)
    expected = compressor.decompress(dict(tensors), scheme)["weight"]
    assert expected.dtype == dtype
    return {name: tensor.contiguous() for name, tensor in tensors.items()}, expected.float()


def fp8(
    out_features: int, in_features: int, seed: int, *, block: tuple[int, int] = (128, 128), dtype: torch.dtype
) -> Quantized:
    """The expected weight is scaled in float32, as by transformers and DeepSeek's own code."""
    generator = torch.Generator().manual_seed(seed)
    grid = (-(-out_features // block[0]), -(-in_features // block[1]))
    numbers = torch.randn(out_features, in_features, generator=generator).mul(60).clamp(-448, 448)
    weight = numbers.to(torch.float8_e4m3fn)
    scales = (torch.rand(grid, generator=generator) + 0.1).mul(1e-3).to(dtype)
    of_numbers = scales.float().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
    return {"weight": weight, "weight_scale_inv": scales}, weight.float() * of_numbers[:out_features, :in_features]


def quantize_model(directory: Path, quantize: Quantize, **config: Any) -> Tensors:
    """Replaces the linear layers of the decoder's blocks, and writes `quantization_config`; returns the weights that
    the codes stand for."""
    expected: Tensors = {}

    def change(tensors: Tensors) -> Tensors:
        changed: Tensors = {}
        for name, tensor in tensors.items():
            if not _LINEAR.fullmatch(name):
                changed[name] = tensor
                continue
            parts, expected[name] = quantize(tensor.shape[0], tensor.shape[1], zlib.crc32(name.encode()))
            changed |= {f"{name.removesuffix('.weight')}.{kind}": part for kind, part in parts.items()}
        return changed

    edit_tensors(directory, change)
    edit_config(directory, quantization_config=config)
    return expected
