"""Sums and gathers over processes of one machine, through memory that all of them have mapped.

Every process of a group calls the same operations in the same order, with tensors of the same dtype and number of
lines; a call returns when all have made it. Its result is bitwise the same for all. If a process dies, the others
wait forever: their supervisor has to end them.
"""

import functools
from dataclasses import dataclass

import torch

from quire_kernels.backends import implementation_for
from quire_kernels.checks import FLOATING, check_device, check_dtype, check_shape
from quire_kernels.cpu.bindings import CpuKernels
from quire_kernels.cpu.library import MAX_RANKS, SLOT_BYTES, group_bytes

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class SharedGroup:
    """One process of a group. Used by one thread at a time.

    Attributes:
        rank: which of `size` processes this is.
        memory: [shared_bytes(size)] uint8 on the CPU, mapped by all of them. All zeros before the group's first
            operation.
    """

    rank: int
    size: int
    memory: torch.Tensor

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size <= MAX_RANKS:
            raise ValueError(f"rank is {self.rank} of {self.size}; expected 0 up to the size, of at most {MAX_RANKS}")


def can_exchange() -> bool:
    """Whether this machine has the CPU library, the only implementation of these operations."""
    return isinstance(implementation_for(_CPU), CpuKernels)


@functools.cache
def shared_bytes(size: int) -> int:
    """Bytes of memory that a group of `size` processes shares. Small tensors touch little of it.

    Raises:
        LibraryUnavailableError: there is no CPU library.
    """
    return group_bytes(size, SLOT_BYTES)


def all_reduce(x: torch.Tensor, group: SharedGroup) -> torch.Tensor:
    """The sum of x [..., n] over all processes, in place; x is on the CPU and contiguous.

    Summed in float32 in the order of ranks, and rounded once.
    """
    check_dtype("x", x, FLOATING)
    check_device("x", x, _CPU)
    if not x.is_contiguous():
        raise ValueError("x is not contiguous")
    _kernels_for(group).all_reduce(x, group.memory, group.rank, group.size)
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
    return _kernels_for(group).all_gather(x, group.memory, group.rank, group.size, total)


def _kernels_for(group: SharedGroup) -> CpuKernels:
    check_dtype("memory", group.memory, torch.uint8)
    check_shape("memory", group.memory, (shared_bytes(group.size),))
    kernels = implementation_for(_CPU)
    if not isinstance(kernels, CpuKernels):
        raise ValueError("shared memory needs the CPU library, which this machine does not have")
    return kernels
