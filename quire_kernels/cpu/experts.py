"""The products of a layer's experts as tables that the CPU library reads."""

from ctypes import Array, addressof
from dataclasses import dataclass

import torch

from quire_kernels.cpu.library import ProductArgs
from quire_kernels.packed_weight import PackedWeight


@dataclass(frozen=True, slots=True)
class HeldTable:
    """The arguments of one product of each expert, but for its tokens and outputs."""

    entries: Array[ProductArgs]
    held: tuple[tuple[PackedWeight, torch.Tensor | None], ...]
    """The weights and biases that the entries name."""

    @property
    def address(self) -> int:
        return addressof(self.entries)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The products of all experts of a layer."""

    inner: HeldTable
    down: HeldTable
    inner_weight: PackedWeight
    """The first expert's; the others have the same shape."""
    down_weight: PackedWeight

    @property
    def count(self) -> int:
        return len(self.inner.held)
