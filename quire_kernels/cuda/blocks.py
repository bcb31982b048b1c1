"""Writes to the paged pool: new keys and values, and moves of whole blocks (copy-on-write and swap).

Moves of all layers are one launch. Their kernel takes pools as addresses. A pinned tensor of host memory has an address
that the GPU can use too, so a swap is a copy whose bytes cross the bus once.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from quire_kernels import reference
from quire_kernels.checks import check_dtype, check_shape, offset_of_values
from quire_kernels.cuda.launch import MAX_BYTES, ceil_div, launch, padded, warps_for, with_contiguous_heads
from quire_kernels.cuda.pointwise import load_rotated, rotated

_INDEXES = ("positions", "slot_mapping")
# Words of a block that a program moves at once: a piece.
WORDS = 4096
# Programs that move blocks over the bus. While they wait for it, nothing else runs on their multiprocessors, so there
# are few of them. They keep 512 kB in flight, which is more than the bus needs. Computed, not measured.
SWAP_PROGRAMS = 32


@triton.jit
def _slot_offsets(slot, heads, BLOCK_STRIDE: tl.constexpr, BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The offsets in a layer's keys of the `heads` of the token in `slot`; int64, with the shape of `heads`."""
    return slot // BLOCK_SIZE * BLOCK_STRIDE + (heads * BLOCK_SIZE + slot % BLOCK_SIZE) * HEAD_DIM


@triton.jit(do_not_specialize_on_alignment=_INDEXES)
def _reshape_and_cache_kernel(
    key,
    value,
    kv_cache,
    slot_mapping,
    key_stride,
    value_stride,
    value_offset,
    NUM_KV_HEADS: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
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
    target = _slot_offsets(slot, heads, BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM)[:, None] + dims[None, :]
    if tl.program_id(1) == 0:
        tl.store(kv_cache + target, tl.load(key + token * key_stride + source, mask=mask), mask=mask)
    else:
        tl.store(kv_cache + value_offset + target, tl.load(value + token * value_stride + source, mask=mask), mask=mask)


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """`quire_kernels.ops.reshape_and_cache`. A program writes the keys, or the values, of one token."""
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
        offset_of_values(kv_cache),
        NUM_KV_HEADS=num_kv_heads,
        BLOCK_STRIDE=kv_cache.stride(1),
        BLOCK_SIZE=kv_cache.shape[3],
        HEAD_DIM=head_dim,
        HEADS_PAD=padded(num_kv_heads),
        HEAD_PAD=padded(head_dim),
        num_warps=warps_for(padded(num_kv_heads) * padded(head_dim), key.dtype),
    )


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
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEADS_PAD: tl.constexpr,
    HALF_PAD: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    heads, dims = tl.arange(0, HEADS_PAD), tl.arange(0, HALF_PAD)
    mask = (heads < NUM_KV_HEADS)[:, None] & (dims < HEAD_DIM // 2)[None, :]
    slot = tl.load(slot_mapping + token)
    target = _slot_offsets(slot, heads, BLOCK_STRIDE, BLOCK_SIZE, HEAD_DIM)[:, None] + dims[None, :]
    if tl.program_id(1) == 0:
        cos_sin = cos_sin_cache + tl.load(positions + token) * HEAD_DIM
        first, second = load_rotated(  # pyrefly: ignore
            key + token * key_stride, heads, dims, mask, cos_sin, HEAD_DIM
        )
        tl.store(kv_cache + target, first.to(kv_cache.dtype.element_ty), mask=mask)
        tl.store(kv_cache + target + HEAD_DIM // 2, second.to(kv_cache.dtype.element_ty), mask=mask)
    else:
        source = value + token * value_stride + heads[:, None] * HEAD_DIM + dims[None, :]
        target += value_offset
        tl.store(kv_cache + target, tl.load(source, mask=mask), mask=mask)
        tl.store(kv_cache + target + HEAD_DIM // 2, tl.load(source + HEAD_DIM // 2, mask=mask), mask=mask)


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

    The same as `rotary` and `reshape_and_cache`, with their arguments, but the rotated keys are written only once.
    Returns the rotated query, a new tensor.
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
            offset_of_values(kv_cache),
            NUM_KV_HEADS=num_kv_heads,
            BLOCK_STRIDE=kv_cache.stride(1),
            BLOCK_SIZE=kv_cache.shape[3],
            HEAD_DIM=head_dim,
            HEADS_PAD=padded(num_kv_heads),
            HALF_PAD=padded(head_dim // 2),
            num_warps=warps_for(padded(num_kv_heads) * padded(head_dim // 2), key.dtype),
        )
    return rotated(query, positions, cos_sin_cache)


@triton.jit(do_not_specialize=("num_pieces",))
def _move_blocks_kernel(
    table,
    source_stride,
    destination_stride,
    num_pieces,
    NUM_LAYERS: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
    WORDS: tl.constexpr,
    WORD: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    NUM_PARTS: tl.constexpr,
):
    """`table`: addresses of source layers, then of destination layers, then the pairs; strides from keys to values."""
    chunks = tl.cdiv(BLOCK_WORDS, WORDS)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        chunk, line = piece % chunks, piece // chunks
        part, layer = (line % NUM_PARTS).to(tl.int64), line // NUM_PARTS % NUM_LAYERS
        pair = line // (NUM_PARTS * NUM_LAYERS)
        source = tl.multiple_of(
            tl.load(table + layer).to(tl.pointer_type(WORD)),  # pyrefly: ignore
            ALIGNMENT,
        )
        destination = tl.multiple_of(
            tl.load(table + NUM_LAYERS + layer).to(tl.pointer_type(WORD)),  # pyrefly: ignore
            ALIGNMENT,
        )
        from_block = tl.load(table + 2 * NUM_LAYERS + 2 * pair)
        to_block = tl.load(table + 2 * NUM_LAYERS + 2 * pair + 1)
        words = chunk * WORDS + tl.arange(0, WORDS)
        source += part * source_stride + from_block * BLOCK_WORDS
        destination += part * destination_stride + to_block * BLOCK_WORDS
        tl.store(destination + words, tl.load(source + words, mask=words < BLOCK_WORDS), mask=words < BLOCK_WORDS)


def copy_blocks(kv_caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """`quire_kernels.ops.copy_blocks`.

    Where the pairs are on the host and no source is the destination of another pair, one launch copies all. Otherwise,
    and for pairs on the device, which are not read here, the blocks are copied through a buffer of their size.
    """
    num_pairs = pairs.shape[0]
    if not kv_caches or not num_pairs:
        return
    if pairs.is_cpu and not torch.isin(pairs[:, 0], pairs[:, 1]).any():
        _move_blocks(kv_caches, kv_caches, pairs)
        return
    buffers = [each.new_empty(each.shape[0], num_pairs, *each.shape[2:]) for each in kv_caches]
    places = torch.arange(num_pairs, device=pairs.device)
    _move_blocks(kv_caches, buffers, torch.stack((pairs[:, 0], places), dim=1))
    _move_blocks(buffers, kv_caches, torch.stack((places, pairs[:, 1]), dim=1))


def swap_blocks(source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """`quire_kernels.ops.swap_blocks`; for host memory that is not pinned, the reference does it.

    The copy is queued on the current stream: the host must not touch a pool before the stream has come that far.
    """
    if not source or not pairs.shape[0]:
        return
    on_gpu = source[0].is_cuda or destination[0].is_cuda
    if on_gpu and any(each.is_cpu and not each.is_pinned() for each in (*source, *destination)):
        reference.swap_blocks(source, destination, pairs)
    else:
        _move_blocks(source, destination, pairs, max_programs=SWAP_PROGRAMS)


def _move_blocks(
    source: Sequence[torch.Tensor],
    destination: Sequence[torch.Tensor],
    pairs: torch.Tensor,
    *,
    max_programs: int | None = None,
) -> None:
    """Copies blocks of all layers, all layers of a shape in one launch; no block is both read and written."""
    layers_by_shape: dict[torch.Size, list[int]] = {}
    for index, layer in enumerate(source):
        layers_by_shape.setdefault(layer.shape, []).append(index)
    for alike in layers_by_shape.values():
        _move_alike([source[index] for index in alike], [destination[index] for index in alike], pairs, max_programs)


def _move_alike(
    source: Sequence[torch.Tensor],
    destination: Sequence[torch.Tensor],
    pairs: torch.Tensor,
    max_programs: int | None,
) -> None:
    """Copies blocks of layers that must be alike (ValueError). Each piece has a program of its own, unless
    `max_programs` are to share them."""
    num_parts = source[0].shape[0]
    for name, pool in (("source", source), ("destination", destination)):
        for layer in pool:
            check_shape(name, layer, (num_parts, pool[0].shape[1], *source[0].shape[2:]))
            check_dtype(name, layer, source[0].dtype)
    device = source[0].device if source[0].is_cuda else destination[0].device
    layers = [each.data_ptr() for each in (*source, *destination)]
    block_bytes = math.prod(source[0].shape[2:]) * source[0].dtype.itemsize
    # All layers start at a multiple of this many bytes, so a thread can move as many at once.
    alignment = math.gcd(MAX_BYTES, *layers)
    word_bytes = math.gcd(4, alignment, block_bytes)
    block_words = block_bytes // word_bytes
    num_pieces = pairs.shape[0] * num_parts * len(source) * ceil_div(block_words, WORDS)
    launch(
        _move_blocks_kernel,
        (min(num_pieces, max_programs or num_pieces),),
        _device_table(layers, pairs, device),
        source[0].shape[1] * block_words,
        destination[0].shape[1] * block_words,
        num_pieces,
        NUM_LAYERS=len(source),
        BLOCK_WORDS=block_words,
        WORDS=WORDS,
        WORD=tl.int32 if word_bytes == 4 else tl.int16,
        ALIGNMENT=alignment,
        NUM_PARTS=num_parts,
    )


def _device_table(addresses: Sequence[int], pairs: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Addresses and flat pairs in one int64 tensor on `device`: one transfer where the pairs are on the host."""
    table = torch.tensor(addresses, dtype=torch.int64)
    if pairs.is_cpu:
        table = torch.cat((table, pairs.reshape(-1)))
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table if pairs.is_cpu else torch.cat((table, pairs.to(device).reshape(-1)))
