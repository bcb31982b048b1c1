"""Writes new keys and values into the paged pool: split, reshape and block write in one launch."""

import torch
import triton
import triton.language as tl

from kernels.triton.launch import launch, padded, warps_for


@triton.jit
def slot_offsets(slot, heads, NUM_KV_HEADS: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Where in a layer's keys the `heads` of the token in `slot` start; of the shape of `heads`, int64."""
    return ((slot // BLOCK_SIZE * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM


@triton.jit(do_not_specialize_on_alignment=("slot_mapping",))
def _reshape_and_cache_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    key_stride,
    value_stride,
    value_offset,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HEAD_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PAD), tl.arange(0, HEAD_PAD)
    mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM)[None, :]
    source = heads[:, None] * HEAD_DIM + dims[None, :]
    slot = tl.load(slot_mapping + token)
    target = slot_offsets(slot, heads, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)[:, None] + dims[None, :]
    if tl.program_id(1) == 0:
        tl.store(kv_cache + target, tl.load(key + token * key_stride + source, mask=mask), mask=mask)
    else:
        tl.store(kv_cache + value_offset + target, tl.load(value + token * value_stride + source, mask=mask), mask=mask)


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`kernels.ops.reshape_and_cache`. A program writes the keys, or the values, of one token."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if not key.numel():
        return
    key, value = with_contiguous_heads(key), with_contiguous_heads(value)
    launch(
        _reshape_and_cache_kernel,
        (num_tokens, 2),
        key,
        value,
        kv_cache,
        slot_mapping.contiguous(),
        key.stride(0),
        value.stride(0),
        kv_cache.stride(0),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_SIZE=kv_cache.shape[3],
        HEAD_DIM=head_dim,
        HEADS_PAD=padded(num_kv_heads),
        HEAD_PAD=padded(head_dim),
        num_warps=warps_for(padded(num_kv_heads) * padded(head_dim), key.dtype),
    )


def with_contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] itself where each token's heads lie together, as in a slice of a fused projection; else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
