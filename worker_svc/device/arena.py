"""The pool of a model whose layers keep states: one tensor, whose blocks hold either tokens or a part of a state.

A block of tokens has the keys and values of each layer of attention, one layer after the other. A block of a state has
units of equal bytes, as `quire_kernels.states` describes. Both are bytes of the same tensor, `[1, num_blocks, 1, 1,
width]` of the pool's dtype, so blocks are copied, swapped, moved and kept in files as the blocks of other models are.

If no layer attends, blocks of tokens hold nothing: they only name the tokens, as the scheduler counts them. A block is
a small part of a state then. So 16 tokens take a 512th of the state of a sequence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from worker_svc.layers.state_layer import StateSize

_ALIGNMENT = 64
"""Blocks begin at cache lines."""
_BLOCKS_OF_STATE = 512
"""The blocks of a state, at most, if blocks of tokens hold nothing. More of them would make steps slower, and fewer
would take more memory for tokens."""


def arena_block_bytes(bytes_of_tokens: int, state: StateSize) -> int:
    """Bytes of a block, which holds tokens or at least a unit of a state."""
    least = bytes_of_tokens or -(-state.num_units // _BLOCKS_OF_STATE) * state.unit_bytes
    return -(-max(least, state.unit_bytes) // _ALIGNMENT) * _ALIGNMENT


def arena_shape(num_blocks: int, block_bytes: int, dtype: torch.dtype) -> tuple[int, ...]:
    """The shape of the tensor."""
    return (1, num_blocks, 1, 1, block_bytes // dtype.itemsize)


def caches_of(arena: Tensor, shapes: Sequence[tuple[int, int, int, int]]) -> tuple[Tensor, ...]:
    """The caches of layers of attention, each [lines_per_token, num_blocks, num_kv_heads, block_size, width].

    Args:
        shapes: of each layer, without the number of blocks.
    """
    # `as_strided` counts from the start of the memory, where the arena may be a part of a file.
    num_blocks, block_width, start = arena.shape[1], arena.stride(1), arena.storage_offset()
    caches = list[Tensor]()
    for num_lines, num_heads, block_size, width in shapes:
        line = num_heads * block_size * width
        strides = (line, block_width, block_size * width, width, 1)
        caches.append(arena.as_strided((num_lines, num_blocks, num_heads, block_size, width), strides, start))
        start += num_lines * line
    return tuple(caches)


def pages_of(arena: Tensor) -> Tensor:
    """The same memory as the bytes of blocks, [num_blocks, block_bytes]."""
    return arena.view(torch.uint8).view(arena.shape[1], -1)
