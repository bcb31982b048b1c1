"""Embedding tables, and the head that shares one."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from worker_svc.layers.loadable import Loadable, Placement, frozen
from worker_svc.layers.product import Product, make_product
from worker_svc.weights import TensorReader, TensorSpec


class Embedding(Loadable):
    """A table of `num_embeddings` vectors; `name` is its module in the checkpoint."""

    weight: nn.Parameter

    def __init__(self, name: str, num_embeddings: int, dim: int, *, placement: Placement) -> None:
        super().__init__()
        self._spec = TensorSpec(f"{name}.weight", (num_embeddings, dim))
        self._placement = placement

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, read: TensorReader) -> None:
        self.weight = frozen(self._placement.copy(read(self._spec)))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids [T] int64 -> [T, dim]."""
        return functional.embedding(ids, self.weight)


class TiedHead(Loadable):
    """The output layer of a model whose embedding is its output matrix too.

    Where a packed product pays, the matrix is held twice: packed for the product, by rows for the embedding. Every
    sampled token reads all of it, and the plain product takes twice as long.
    """

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = embedding
        self._product: Product

    def tensors(self) -> Iterator[TensorSpec]:
        yield from ()

    def load(self, read: TensorReader) -> None:
        """Takes the embedding's matrix, which must be loaded."""
        self._product = make_product(self._embedding.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, dim] -> [S, num_embeddings]."""
        return self._product(hidden)
