"""Moves of whole blocks, of all layers in one launch: copy-on-write and swap.

The kernel knows pools by addresses. A pinned tensor of host memory has one that the GPU can use too, so that a swap is
a copy whose bytes cross the bus once.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kernels import reference
from kernels.checks import check_dtype, check_shape
from kernels.triton.launch import WIDEST, ceil_div, launch

# Words of a block that a program moves at once: a piece.
WORDS = 4096
# Programs that move blocks over the bus. They wait for it, and on a multiprocessor whose threads all wait nothing else
# runs: so few leave the steps their room, and have 512 kB on the way, which is more than the bus takes. Reckoned, not
# measured.
SWAP_PROGRAMS = 32


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
):
    """`table`: addresses of source layers, then of destination layers, then the pairs; strides from keys to values."""
    chunks = tl.cdiv(BLOCK_WORDS, WORDS)
    for piece in range(tl.program_id(0), num_pieces, tl.num_programs(0)):
        chunk, line = piece % chunks, piece // chunks
        part, layer, pair = (line % 2).to(tl.int64), line // 2 % NUM_LAYERS, line // (2 * NUM_LAYERS)
        source = tl.multiple_of(tl.load(table + layer).to(tl.pointer_type(WORD)), ALIGNMENT)  # pyright: ignore[reportArgumentType]
        destination = tl.multiple_of(tl.load(table + NUM_LAYERS + layer).to(tl.pointer_type(WORD)), ALIGNMENT)  # pyright: ignore[reportArgumentType]
        from_block = tl.load(table + 2 * NUM_LAYERS + 2 * pair)
        to_block = tl.load(table + 2 * NUM_LAYERS + 2 * pair + 1)
        words = chunk * WORDS + tl.arange(0, WORDS)
        source += part * source_stride + from_block * BLOCK_WORDS
        destination += part * destination_stride + to_block * BLOCK_WORDS
        tl.store(destination + words, tl.load(source + words, mask=words < BLOCK_WORDS), mask=words < BLOCK_WORDS)


def copy_blocks(kv_caches: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """`kernels.ops.copy_blocks`.

    Pairs on the host are looked at: unless the source of one is the destination of another, one launch copies all.
    Otherwise, and for pairs on the device, which are not waited for, the blocks pass through a buffer of their size.
    """
    num_pairs = pairs.shape[0]
    if not kv_caches or not num_pairs:
        return
    if pairs.is_cpu and not torch.isin(pairs[:, 0], pairs[:, 1]).any():
        _move_blocks(kv_caches, kv_caches, pairs)
        return
    _, _, *block_shape = kv_caches[0].shape
    buffers = kv_caches[0].new_empty(len(kv_caches), 2, num_pairs, *block_shape).unbind()
    places = torch.arange(num_pairs, device=pairs.device)
    _move_blocks(kv_caches, buffers, torch.stack((pairs[:, 0], places), dim=1))
    _move_blocks(buffers, kv_caches, torch.stack((places, pairs[:, 1]), dim=1))


def swap_blocks(source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor], pairs: torch.Tensor) -> None:
    """`kernels.ops.swap_blocks`; host memory that is not pinned goes the way of the reference.

    The copy is queued on the current stream: the host must not touch a pool before the stream has come that far.
    """
    if not source or not pairs.shape[0]:
        return
    on_gpu = source[0].is_cuda or destination[0].is_cuda
    if on_gpu and any(each.is_cpu and not each.is_pinned() for each in (*source, *destination)):
        reference.swap_blocks(source, destination, pairs)
    else:
        _move_blocks(source, destination, pairs, most_programs=SWAP_PROGRAMS)


def _move_blocks(
    source: Sequence[torch.Tensor],
    destination: Sequence[torch.Tensor],
    pairs: torch.Tensor,
    *,
    most_programs: int | None = None,
) -> None:
    """Copies blocks of all layers, which must be alike (ValueError); no block is both read and written. Each piece has
    a program of its own, unless `most_programs` are to share them."""
    for name, pool in (("source", source), ("destination", destination)):
        for layer in pool:
            check_shape(name, layer, (2, pool[0].shape[1], *source[0].shape[2:]))
            check_dtype(name, layer, source[0].dtype)
    device = source[0].device if source[0].is_cuda else destination[0].device
    layers = [each.data_ptr() for each in (*source, *destination)]
    block_bytes = math.prod(source[0].shape[2:]) * source[0].dtype.itemsize
    # What all layers start at a multiple of, in bytes, lets a thread move as many at once.
    alignment = math.gcd(WIDEST, *layers)
    word_bytes = math.gcd(4, alignment, block_bytes)
    block_words = block_bytes // word_bytes
    num_pieces = pairs.shape[0] * 2 * len(source) * ceil_div(block_words, WORDS)
    launch(
        _move_blocks_kernel,
        (min(num_pieces, most_programs or num_pieces),),
        _device_table(layers, pairs, device),
        source[0].shape[1] * block_words,
        destination[0].shape[1] * block_words,
        num_pieces,
        NUM_LAYERS=len(source),
        BLOCK_WORDS=block_words,
        WORDS=WORDS,
        WORD=tl.int32 if word_bytes == 4 else tl.int16,
        ALIGNMENT=alignment,
    )


def _device_table(addresses: Sequence[int], pairs: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Addresses and flat pairs in one int64 tensor on `device`: one transfer where the pairs are on the host."""
    table = torch.tensor(addresses, dtype=torch.int64)
    if pairs.is_cpu:
        table = torch.cat((table, pairs.reshape(-1)))
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    return table if pairs.is_cpu else torch.cat((table, pairs.to(device).reshape(-1)))
