"""Products with the low-rank adapters of their tokens.

Adapters add to the sums before the activation, so that tokens without one keep their bits (ADR 0054).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from quire_kernels.cpu.low_rank import PackedTable, TokenAddends
from quire_kernels.low_rank import MaskedTable
from worker_svc.layers.activations import Activation
from worker_svc.layers.products import CodedProduct, OwnProduct, Product


class TokenSlots:
    """The slot of each token's adapter in the pass of a model that runs, which its linear layers read."""

    def __init__(self) -> None:
        self.current: torch.Tensor | None = None
        """[T] int64, slots from 1 on, and 0 for tokens without an adapter; None if there are no others."""

    @contextmanager
    def used(self, slots: torch.Tensor | None) -> Iterator[None]:
        """Within it, layers take the adapters of these slots."""
        self.current = slots
        try:
            yield
        finally:
            self.current = None


@dataclass(frozen=True, slots=True)
class PackedAdapted:
    """A product of our own kernel with the adapters of its tokens."""

    product: OwnProduct | CodedProduct
    table: PackedTable

    def __call__(self, x: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return self.product(x, TokenAddends(self.table, slots))


@dataclass(frozen=True, slots=True)
class MaskedAdapted:
    """The same by torch."""

    product: Product
    """Without activation."""
    table: MaskedTable
    activation: Activation | None

    def __call__(self, x: torch.Tensor, slots: torch.Tensor | None = None) -> torch.Tensor:
        product = self.product(x)
        if slots is not None:
            product = self.table.add(product, x, slots)
        return product if self.activation is None else self.activation(product)


AdaptedProduct = PackedAdapted | MaskedAdapted
