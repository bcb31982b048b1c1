"""Launches and sizes, typed: to a type checker, Triton's own are functions of a language that it does not know."""

from typing import Any


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **constants: Any) -> None:
    """Queues `kernel` on the current stream of the current device, one program for each point of `grid`."""
    kernel[grid](*arguments, **constants)


def ceil_div(dividend: int, divisor: int) -> int:
    return -(-dividend // divisor)


def padded(size: int, least: int = 1) -> int:
    """The power of two in which a dimension of `size` fits: Triton's tiles have no other sizes.

    Args:
        least: 16 where the dimension is one of a matrix product.
    """
    return max(least, 1 << (size - 1).bit_length())
