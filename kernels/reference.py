"""The operations in plain torch: the truth that faster kernels are tested against, and what runs where none exists.

`kernels.ops` documents the arguments and checks them.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch.nn import functional

from kernels.int8 import quantize
from kernels.packed_weight import PackedWeight, Rounding
from kernels.reference_attention import ScoreRule, paged_attention

__all__ = [
    "ScoreRule",
    "add_layer_norm",
    "add_rms_norm",
    "copy_blocks",
    "layer_norm",
    "pack_weight",
    "paged_attention",
    "product",
    "reshape_and_cache",
    "rms_norm",
    "rotary",
    "rotary_and_cache",
    "silu_and_mul",
    "swap_blocks",
]


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    block_size = kv_cache.shape[3]
    blocks = torch.div(slot_mapping, block_size, rounding_mode="floor")
    offsets = slot_mapping - blocks * block_size
    kv_cache[0, blocks, :, offsets] = key
    kv_cache[1, blocks, :, offsets] = value


def copy_blocks(kv_caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    for kv_cache in kv_caches:
        source, destination = pairs.to(kv_cache.device, non_blocking=True).unbind(1)
        kv_cache.index_copy_(1, destination, kv_cache.index_select(1, source))


def swap_blocks(source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    if not source:
        return
    # The indices travel once, not once a layer.
    from_ids, to_ids = pairs[:, 0].to(source[0].device), pairs[:, 1].to(destination[0].device)
    for from_cache, to_cache in zip(source, destination, strict=True):
        to_cache.index_copy_(1, to_ids, from_cache.index_select(1, from_ids).to(to_cache.device))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return functional.rms_norm(total, weight.shape, weight, eps), total


def layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps)


def add_layer_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return layer_norm(total, weight, bias, eps), total


def rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    cos, sin = cos_sin_cache.index_select(0, positions).unsqueeze(1).chunk(2, dim=-1)
    return _rotate(query, cos, sin), _rotate(key, cos, sin)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x [T, H, D]; cos, sin [T, 1, D/2] float32."""
    rotated = torch.empty(x.shape, dtype=cos.dtype, device=x.device)
    first, second = x.to(cos.dtype).chunk(2, dim=-1)
    rotated_first, rotated_second = rotated.chunk(2, dim=-1)
    torch.mul(first, cos, out=rotated_first).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=rotated_second).addcmul_(first, sin)
    return rotated.to(x.dtype)


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    query, key = rotary(query, key, positions, cos_sin_cache)
    reshape_and_cache(key, value, kv_cache, slot_mapping)
    return query


def silu_and_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)


def pack_weight(weight: torch.Tensor, gated: bool, rounding: Rounding) -> PackedWeight:
    out_features, in_features = weight.shape
    if rounding is Rounding.NONE:
        return PackedWeight(weight, None, weight.dtype, out_features, in_features, in_features, gated, rounding)
    lines = quantize(weight)
    return PackedWeight(
        lines.codes, lines.scales.squeeze(-1), weight.dtype, out_features, in_features, in_features, gated, rounding
    )


def product(
    x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None, activation: str, output_dtype: torch.dtype
) -> torch.Tensor:
    if weight.scales is None:
        # float64 stays what it is.
        wide = torch.promote_types(weight.dtype, torch.float32)
        sums = functional.linear(x.to(wide), weight.data.to(wide), None if bias is None else bias.to(wide))
    elif weight.rounding is Rounding.WEIGHT:
        sums = functional.linear(x.float(), weight.data.float()) * weight.scales
        sums = sums if bias is None else sums + bias
    else:
        lines = quantize(x)
        # In float64 whole numbers of this size are exact.
        exact = functional.linear(lines.codes.double(), weight.data.double()).float()
        sums = exact * lines.scales * weight.scales
        sums = sums if bias is None else sums + bias
    return (silu_and_mul(sums) if weight.gated else _ACTIVATIONS[activation](sums)).to(output_dtype)


_ACTIVATIONS = {
    "identity": torch.nn.Identity(),
    "relu": functional.relu,
    "silu": functional.silu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
}
