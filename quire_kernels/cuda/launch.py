"""Launches and sizes, typed: to a type checker, Triton's own are functions of a language that it does not know."""

from typing import Any

import torch

# The largest number of bytes that a thread of a GPU moves at once, and the threads of a warp.
MAX_BYTES = 16
WARP = 32


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Queues `kernel` on the current stream of the current device, one program for each point of `grid`.

    The first dimension is the one that grows with tokens or rows: CUDA takes 2^31 - 1 programs along it, 65,535 along
    the others.
    """
    kernel[grid](*arguments, **constants)


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def padded(size: int, least: int = 1) -> int:
    """The smallest power of two that is at least `size`: Triton's tiles have no other sizes.

    Args:
        least: 16 where the dimension is one of a matrix product.
    """
    return max(least, 1 << (size - 1).bit_length())


def warps_for(elements: int, dtype: torch.dtype) -> int:
    """Warps of a program that moves a tile of `elements`, a power of two: 4, or fewer so that each thread moves
    MAX_BYTES."""
    return min(4, max(1, elements * dtype.itemsize // (MAX_BYTES * WARP)))


def with_contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] itself where each token's heads lie together, as in a slice of a fused projection; else a copy."""
    return x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous()
