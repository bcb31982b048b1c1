"""The base of layers that hold weights."""

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from worker_svc.layers.quantization import Quantization
from worker_svc.parallel.ranks import ALONE, Ranks
from worker_svc.weights import TensorReader, TensorSpec


@dataclass(frozen=True, slots=True)
class Placement:
    """Where weights go, in which dtype, and which part of them: that of one of the ranks."""

    device: torch.device
    dtype: torch.dtype
    ranks: Ranks = ALONE
    quantization: Quantization = Quantization.NONE
    """What linear layers keep of their weights."""

    def empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, device=self.device, dtype=self.dtype)

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of its own memory, never a view of a mapped file."""
        return self.empty(*tensor.shape).copy_(tensor)


class Loadable(nn.Module):
    """A layer that knows which tensors of the checkpoint it needs. It holds no memory until `load`."""

    @abstractmethod
    def tensors(self) -> Iterator[TensorSpec]:
        """The tensors that `load` reads."""

    @abstractmethod
    def load(self, read: TensorReader) -> None:
        """Reads the tensors, one at a time, and places them."""


def frozen(tensor: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
