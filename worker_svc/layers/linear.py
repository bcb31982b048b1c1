"""Linear layers. This is the one place where weights are merged; sharding belongs here too."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from worker_svc.layers.activation import check_activation
from worker_svc.layers.loadable import Loadable, Placement
from worker_svc.layers.product import Product, make_product
from worker_svc.weights import TensorReader, TensorSpec


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A linear layer of the checkpoint, by the name of its module."""

    name: str
    out_features: int


class Linear(Loadable):
    """`activation(x @ weight.T + bias)` for one or more linear layers of the checkpoint that share their input.

    Several parts (query, key and value; gate and up) are merged into one matrix at load, outputs one after the other.

    Args:
        input_major: the checkpoint stores [in, out], as GPT-2's Conv1D does, and not [out, in].
        activation: its name in config.json; none is the identity. ConfigurationError for a name that is not known.
    """

    def __init__(
        self,
        parts: Sequence[LinearPart],
        in_features: int,
        *,
        bias: bool,
        placement: Placement,
        input_major: bool = False,
        activation: str | None = None,
    ) -> None:
        super().__init__()
        if activation is not None:
            check_activation(activation)
        self._parts = tuple(parts)
        self._in_features = in_features
        self._has_bias = bias
        self._placement = placement
        self._input_major = input_major
        self._activation = activation
        self._product: Product

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
        self._product = make_product(weight, bias, self._activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out]."""
        return self._product(x)

    def _weight_spec(self, part: LinearPart) -> TensorSpec:
        shape = (part.out_features, self._in_features)
        return TensorSpec(f"{part.name}.weight", shape[::-1] if self._input_major else shape)

    def _bias_spec(self, part: LinearPart) -> TensorSpec:
        return TensorSpec(f"{part.name}.bias", (part.out_features,))
