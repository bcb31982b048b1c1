"""Models whose linear layers are quantized in formats of safetensors files, for measurements.

Weights are rounded to the nearest number without data of any kind, so a file that a tool made with calibration is
better than these.
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from quire.model_directory import weight_files

_LINEAR = re.compile(r"(model\.layers\.\d+\.(?:self_attn|mlp)\.\w+_proj)\.weight")
_GROUP, _BLOCK = 64, 128
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_GROUPS: dict[str, Any] = {"bits": 4, "group_size": _GROUP}
_CONFIGS: dict[str, dict[str, Any]] = {
    "AWQ": {"quant_method": "awq", "version": "gemm", "zero_point": True, **_GROUPS},
    "GPTQ": {"quant_method": "gptq", "desc_act": False, "sym": True, **_GROUPS},
    "FP8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [_BLOCK, _BLOCK]},
}
FORMATS = (*_CONFIGS,)


def write_rounded(model: Path, directory: Path, format: str) -> None:
    """Writes a model of Llama's layers in one of `FORMATS`."""
    shutil.copytree(model, directory, ignore=shutil.ignore_patterns("*.safetensors*"))
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": _CONFIGS[format]}))
    tensors: dict[str, torch.Tensor] = {}
    for file in weight_files(model):
        for name, tensor in load_file(file).items():
            linear = _LINEAR.fullmatch(name)
            parts = {name: tensor} if linear is None else _rounded(linear[1], tensor.float(), format)
            tensors.update({each: part.contiguous() for each, part in parts.items()})
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})


def _rounded(name: str, weight: torch.Tensor, format: str) -> dict[str, torch.Tensor]:
    if format == "FP8":
        return _fp8(name, weight)
    groups = weight.unflatten(1, (-1, _GROUP))
    if format == "AWQ":
        lowest, highest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((highest - lowest) / 15).clamp(min=1e-6).half()
        zeros = (-lowest / scales.float()).round().clamp(0, 15)
    else:
        scales = (groups.abs().amax(-1) / 7.5).clamp(min=1e-6).half()
        zeros = torch.full(scales.shape, 8.0)
    codes = ((groups / scales.float()[..., None]).round() + zeros[..., None]).clamp(0, 15).flatten(1)
    if format == "AWQ":
        parts = {"qweight": _words(_awq_order(codes.t())), "qzeros": _words(_awq_order(zeros.t()))}
    else:
        group_of = (torch.arange(weight.shape[1]) // _GROUP).int()
        parts = {"qweight": _words(codes).t(), "qzeros": _words(zeros.t() - 1), "g_idx": group_of}
    return {f"{name}.{part}": tensor for part, tensor in {**parts, "scales": scales.t()}.items()}


def _fp8(name: str, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    grid = [-(-size // _BLOCK) for size in weight.shape]
    wide = weight.new_zeros(grid[0] * _BLOCK, grid[1] * _BLOCK)
    wide[: weight.shape[0], : weight.shape[1]] = weight
    blocks = wide.unflatten(1, (-1, _BLOCK)).unflatten(0, (-1, _BLOCK))
    scales = (blocks.abs().amax((1, 3)) / 448).clamp(min=1e-12)
    numbers = (blocks / scales[:, None, :, None]).flatten(2).flatten(0, 1)[: weight.shape[0], : weight.shape[1]]
    return {f"{name}.weight": numbers.to(torch.float8_e4m3fn), f"{name}.weight_scale_inv": scales}


def _awq_order(codes: torch.Tensor) -> torch.Tensor:
    return codes.unflatten(1, (-1, 8))[..., _AWQ_ORDER].flatten(1)


def _words(codes: torch.Tensor) -> torch.Tensor:
    """[n, codes] -> [n, words] int32, the first code in the lowest bits."""
    words = (codes.long().unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)).sum(-1)
    return words.to(torch.uint32).view(torch.int32)
