"""A KV pool of int16: bits of bfloat16 numbers. The CPU library keeps full blocks in 12 bits a number (ADR 0015).

Keys and values go in and come out bit for bit; what a block holds in between is the library's affair
(kernels/cpu/short_block.h). It is as large as a pool of bfloat16, and whatever moves blocks moves them as they are.
Other implementations take it for one of bfloat16, which it is as long as the library writes nothing to it.

The tokens of a block are to be written in order, and of a full block none again but the last ones.
"""

import torch

SHORT_DTYPE = torch.int16
# ShortGroup::kNumbers, the size of ShortTile, and what its mark and the numbers of its exceptions allow.
_NUMBERS_OF_GROUP = 128
_HEAD_BYTES = 64
_LEAST_HEAD_DIM = 16
_MOST_NUMBERS = 1 << 16


def can_be_short(block_size: int, head_dim: int) -> bool:
    """Whether there are short blocks of such tiles."""
    numbers = block_size * head_dim
    return head_dim >= _LEAST_HEAD_DIM and numbers % _NUMBERS_OF_GROUP == 0 and numbers <= _MOST_NUMBERS


def tile_bytes(block_size: int, head_dim: int) -> int:
    """What is read of the tile of a full block and one head: its head, and its numbers."""
    return _HEAD_BYTES + block_size * head_dim * 12 // 8


def as_numbers(kv_cache: torch.Tensor) -> torch.Tensor:
    """The pool as one of bfloat16, while no block of it is short."""
    return kv_cache.view(torch.bfloat16)
