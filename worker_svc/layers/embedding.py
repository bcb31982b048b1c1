"""Embedding tables, and the head that shares one."""

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

from worker_svc.layers.loadable import Loadable, Placement, frozen
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


class TiedHead(nn.Module):
    """The output layer of a model whose embedding is its output matrix too."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self._embedding = embedding

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, dim] -> [S, num_embeddings]."""
        return functional.linear(hidden, self._embedding.weight)
