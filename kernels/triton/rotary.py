"""Rotary position embedding, alone and together with the write into the KV pool."""

import torch
import triton
import triton.language as tl

from kernels.triton.launch import launch, padded, warps_for
from kernels.triton.reshape_and_cache import slot_offsets, with_contiguous_heads

_INDEXES = ("positions", "slot_mapping")


@triton.jit
def _load_turned(x, heads, dims, mask, cos_sin, HEAD_DIM: tl.constexpr):
    """Both halves of the rotated `heads` of one token, each [H, D / 2] float32; `x` points at the token's heads."""
    cos = tl.load(cos_sin + dims, mask=dims < HEAD_DIM // 2, other=0.0)[None, :]
    sin = tl.load(cos_sin + HEAD_DIM // 2 + dims, mask=dims < HEAD_DIM // 2, other=0.0)[None, :]
    offsets = heads[:, None] * HEAD_DIM + dims[None, :]
    first = tl.load(x + offsets, mask=mask, other=0.0).to(tl.float32)
    second = tl.load(x + offsets + HEAD_DIM // 2, mask=mask, other=0.0).to(tl.float32)
    return first * cos - second * sin, second * cos + first * sin


@triton.jit(do_not_specialize_on_alignment=_INDEXES)
def _rotary_kernel(
    output,
    x,
    positions,
    cos_sin_cache,
    x_stride,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PAD), tl.arange(0, HALF_PAD)
    mask = (heads < NUM_HEADS)[:, None] & (dims < HEAD_DIM // 2)[None, :]
    cos_sin = cos_sin_cache + tl.load(positions + token) * HEAD_DIM
    first, second = _load_turned(x + token * x_stride, heads, dims, mask, cos_sin, HEAD_DIM)  # pyright: ignore[reportGeneralTypeIssues]
    target = output + (token * NUM_HEADS + heads)[:, None] * HEAD_DIM + dims[None, :]
    tl.store(target, first.to(output.dtype.element_ty), mask=mask)
    tl.store(target + HEAD_DIM // 2, second.to(output.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize_on_alignment=_INDEXES)
def _rotary_key_and_cache_kernel(
    key,
    value,
    kv_cache,
    positions,
    cos_sin_cache,
    slot_mapping,
    key_stride,
    value_stride,
    value_offset,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PAD), tl.arange(0, HALF_PAD)
    mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM // 2)[None, :]
    slot = tl.load(slot_mapping + token)
    target = slot_offsets(slot, heads, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)[:, None] + dims[None, :]
    if tl.program_id(1) == 0:
        cos_sin = cos_sin_cache + tl.load(positions + token) * HEAD_DIM
        first, second = _load_turned(key + token * key_stride, heads, dims, mask, cos_sin, HEAD_DIM)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(kv_cache + target, first.to(kv_cache.dtype.element_ty), mask=mask)
        tl.store(kv_cache + target + HEAD_DIM // 2, second.to(kv_cache.dtype.element_ty), mask=mask)
    else:
        source = value + token * value_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        target += value_offset
        tl.store(kv_cache + target, tl.load(source, mask=mask), mask=mask)
        tl.store(kv_cache + target + HEAD_DIM // 2, tl.load(source + HEAD_DIM // 2, mask=mask), mask=mask)


def rotary(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`kernels.ops.rotary`."""
    return _turn(query, positions, cos_sin_cache), _turn(key, positions, cos_sin_cache)


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    cos_sin_cache: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """Rotates query and key and writes the rotated keys and the values into their slots of `kv_cache`, in place.

    The same as `rotary` and `reshape_and_cache`, whose arguments these are, without the way of the keys through
    memory. Returns the rotated query, a new tensor.
    """
    num_tokens, num_kv_heads, head_dim = key.shape
    if key.numel():
        key, value = with_contiguous_heads(key), with_contiguous_heads(value)
        launch(
            _rotary_key_and_cache_kernel,
            (num_tokens, 2),
            key,
            value,
            kv_cache,
            positions.contiguous(),
            cos_sin_cache.contiguous(),
            slot_mapping.contiguous(),
            key.stride(0),
            value.stride(0),
            kv_cache.stride(0),
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_SIZE=kv_cache.shape[3],
            HEAD_DIM=head_dim,
            HEADS_PAD=padded(num_kv_heads),
            HALF_PAD=padded(head_dim // 2),
            num_warps=warps_for(padded(num_kv_heads) * padded(head_dim // 2), key.dtype),
        )
    return _turn(query, positions, cos_sin_cache)


def _turn(x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> torch.Tensor:
    """x [T, H, D]; returns a new, contiguous tensor."""
    num_tokens, num_heads, head_dim = x.shape
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return output
    x = with_contiguous_heads(x)
    launch(
        _rotary_kernel,
        (num_tokens,),
        output,
        x,
        positions.contiguous(),
        cos_sin_cache.contiguous(),
        x.stride(0),
        NUM_HEADS=num_heads,
        HEAD_DIM=head_dim,
        HEADS_PAD=padded(num_heads),
        HALF_PAD=padded(head_dim // 2),
        num_warps=warps_for(padded(num_heads) * padded(head_dim // 2), x.dtype),
    )
    return output
