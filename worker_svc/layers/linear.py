"""Linear layers. This is the one place where weights are merged; sharding and prepacking belong here too."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from worker_svc.layers.loadable import Loadable, Placement, frozen
from worker_svc.weights import TensorReader, TensorSpec


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A linear layer of the checkpoint, by the name of its module."""

    name: str
    out_features: int


class Linear(Loadable):
    """`x @ weight.T + bias` for one or more linear layers of the checkpoint that share their input.

    Several parts (query, key and value; gate and up) are merged into one matrix at load, outputs one after the other.

    Args:
        input_major: the checkpoint stores [in, out], as GPT-2's Conv1D does, and not [out, in].
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self,
        parts: Sequence[LinearPart],
        in_features: int,
        *,
        bias: bool,
        placement: Placement,
        input_major: bool = False,
    ) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self._in_features = in_features
        self._has_bias = bias
        self._placement = placement
        self._input_major = input_major

    def tensors(self) -> Iterator[TensorSpec]:
        for part in self._parts:
            yield self._weight_spec(part)
            if self._has_bias:
                yield self._bias_spec(part)

    def load(self, read: TensorReader) -> None:
        out_features = sum(part.out_features for part in self._parts)
        weight = self._placement.empty(out_features, self._in_features)
        bias = self._placement.empty(out_features) if self._has_bias else None
        start = 0
        for part in self._parts:
            end = start + part.out_features
            stored = read(self._weight_spec(part))
            weight[start:end] = stored.t() if self._input_major else stored
            if bias is not None:
                bias[start:end] = read(self._bias_spec(part))
            start = end
        self.install(weight, bias)

    def install(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Takes merged weights, [out, in] and [out]."""
        self.weight = frozen(weight)
        self.bias = None if bias is None else frozen(bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return functional.linear(x, self.weight, self.bias)

    def _weight_spec(self, part: LinearPart) -> TensorSpec:
        shape = (part.out_features, self._in_features)
        return TensorSpec(f"{part.name}.weight", shape[::-1] if self._input_major else shape)

    def _bias_spec(self, part: LinearPart) -> TensorSpec:
        return TensorSpec(f"{part.name}.bias", (part.out_features,))
