"""Tensors of several processes of one machine brought together, through memory that all of them have mapped.

Every process of a group calls the same operations in the same order, with tensors of the same dtype and number of
lines; a call returns when all have made it. What it returns is bitwise the same for all. A process that dies leaves the
others waiting without end: whoever started them has to see to that.
"""

import functools

import torch

from kernels.checks import FLOATING, check_device, check_dtype, check_shape
from kernels.choice import implementation_for
from kernels.cpu.bindings import CpuKernels
from kernels.cpu.library import group_bytes
from kernels.shared_group import SLOT_BYTES, SharedGroup

_CPU = torch.device("cpu")


def can_exchange() -> bool:
    """Whether this machine has the CPU library, which alone knows these operations."""
    return isinstance(implementation_for(_CPU), CpuKernels)


@functools.cache
def shared_bytes(size: int) -> int:
    """Bytes of memory that a group of `size` processes shares. Small tensors touch little of it.

    Raises:
        LibraryUnavailableError: there is no CPU library.
    """
    return group_bytes(size, SLOT_BYTES)


def all_reduce(x: torch.Tensor, group: SharedGroup) -> torch.Tensor:
    """The sum of x over all processes, which takes the place of x [..., n], on the CPU and contiguous.

    Summed in float32 in the order of ranks, and rounded once.
    """
    check_dtype("x", x, FLOATING)
    check_device("x", x, _CPU)
    if not x.is_contiguous():
        raise ValueError("x is not contiguous")
    _kernels_for(group).all_reduce(x, group)
    return x


def all_gather(x: torch.Tensor, group: SharedGroup, total: int) -> torch.Tensor:
    """The columns of all processes side by side, in the order of ranks.

    Args:
        x: [S, n] of any dtype, on the CPU. Each process has `ceil(total / size)` columns, the last ones fewer or none.
        total: columns of all.

    Returns:
        [S, total].
    """
    width = -(-total // group.size)
    check_shape("x", x, (None, max(min(width, total - group.rank * width), 0)))
    check_device("x", x, _CPU)
    return _kernels_for(group).all_gather(x, group, total)


def _kernels_for(group: SharedGroup) -> CpuKernels:
    check_dtype("memory", group.memory, torch.uint8)
    check_shape("memory", group.memory, (shared_bytes(group.size),))
    kernels = implementation_for(_CPU)
    if not isinstance(kernels, CpuKernels):
        raise ValueError("processes share memory by the CPU library alone")
    return kernels
