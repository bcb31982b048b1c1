"""Normalisation layers."""

from collections.abc import Iterator

import torch
from torch import nn

from kernels import ops
from worker_svc.weights import Loadable, Placement, TensorReader, TensorSpec, frozen


class RmsNorm(Loadable):
    """Root mean square norm; `name` is its module in the checkpoint."""

    weight: nn.Parameter

    def __init__(self, name: str, dim: int, eps: float, *, placement: Placement) -> None:
        super().__init__()
        self._spec = TensorSpec(f"{name}.weight", (dim,))
        self._eps = eps
        self._placement = placement

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, read: TensorReader) -> None:
        self.weight = frozen(self._placement.copy(read(self._spec)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.rms_norm(x, self.weight, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual)."""
        return ops.add_rms_norm(x, residual, self.weight, self._eps)


class LayerNorm(Loadable):
    """Layer norm; without `affine` it has neither weight nor bias."""

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, name: str, dim: int, eps: float, *, placement: Placement, affine: bool = True) -> None:
        super().__init__()
        self._weight_spec = TensorSpec(f"{name}.weight", (dim,))
        self._bias_spec = TensorSpec(f"{name}.bias", (dim,))
        self._eps = eps
        self._placement = placement
        self._affine = affine
        self.weight = None
        self.bias = None

    def tensors(self) -> Iterator[TensorSpec]:
        if self._affine:
            yield self._weight_spec
            yield self._bias_spec

    def load(self, read: TensorReader) -> None:
        if self._affine:
            self.weight = frozen(self._placement.copy(read(self._weight_spec)))
            self.bias = frozen(self._placement.copy(read(self._bias_spec)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ops.layer_norm(x, self.weight, self.bias, self._eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm of x + residual, x + residual); the sum may be written into `residual`."""
        return ops.add_layer_norm(x, residual, self.weight, self.bias, self._eps)
