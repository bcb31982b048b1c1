"""Linear layers. This is the one place where weights are merged and split over ranks (as in Megatron-LM)."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import groupby
from operator import itemgetter

import torch

from worker_svc.layers.activation import ActivationKind
from worker_svc.layers.loadable import Loadable, Placement
from worker_svc.layers.product import Product
from worker_svc.layers.quantized_product import make_linear_product
from worker_svc.parallel.ranks import Shard
from worker_svc.weights import TensorReader, TensorSpec


class Split(Enum):
    """What of a layer each rank holds."""

    WHOLE = auto()
    OUTPUTS = auto()
    """Some of the outputs; a layer that is split by inputs takes them as they are."""
    INPUTS = auto()
    """The weights of some inputs; the sum over the ranks is the layer's output."""


@dataclass(frozen=True, slots=True)
class LinearPart:
    """A linear layer of the checkpoint, by the name of its module.

    Attributes:
        segments: equal runs of outputs that are split each by itself, as GPT-2's query, key and value in one layer.
        num_shards: parts that the outputs are split into where that are fewer than there are ranks.
    """

    name: str
    out_features: int
    segments: int = 1
    num_shards: int | None = None


class Linear(Loadable):
    """`activation(x @ weight.T + bias)` for one or more linear layers of the checkpoint that share their input.

    Several parts (query, key and value; gate and up) are merged into one matrix at load, outputs one after the other.

    Args:
        in_features: of the whole layer.
        split: what of it each rank holds.
        input_major: the checkpoint stores [in, out], as GPT-2's Conv1D does, and not [out, in].
        activation: none is the identity.
    """

    def __init__(
        self,
        parts: Sequence[LinearPart],
        in_features: int,
        *,
        bias: bool,
        placement: Placement,
        split: Split = Split.WHOLE,
        input_major: bool = False,
        activation: ActivationKind | None = None,
    ) -> None:
        super().__init__()
        self._parts = tuple(parts)
        self._in_features = in_features
        self._has_bias = bias
        self._placement = placement
        self._split = split
        self._input_major = input_major
        self._activation = activation
        self._product: Product

    def tensors(self) -> Iterator[TensorSpec]:
        for part in self._parts:
            yield self._weight_spec(part)
            if self._has_bias:
                yield self._bias_spec(part)

    def load(self, read: TensorReader) -> None:
        shards = [(part, shard) for part in self._parts for shard in self._outputs_of_rank(part)]
        inputs = self._inputs_of_rank()
        out_features = sum(shard.size for _, shard in shards)
        weight = self._placement.empty(out_features, inputs.size)
        bias = self._placement.empty(out_features) if self._has_bias and self._adds_bias else None
        start = 0
        for part, group in groupby(shards, key=itemgetter(0)):
            stored = read(self._weight_spec(part))
            stored = stored.t() if self._input_major else stored
            stored_bias = read(self._bias_spec(part)) if self._has_bias else None
            for _, shard in group:
                end = start + shard.size
                weight[start:end] = stored[shard.slice, inputs.slice]
                if bias is not None and stored_bias is not None:
                    bias[start:end] = stored_bias[shard.slice]
                start = end
        self.install(weight, bias)

    def install(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Takes merged weights, [out, in] and [out]."""
        self._product = make_linear_product(weight, bias, self._activation, self._placement.quantization)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in] -> [..., out], of each the rank's part where the layer is split by it."""
        product = self._product(x)
        return self._placement.ranks.sum(product) if self._split is Split.INPUTS else product

    @property
    def _adds_bias(self) -> bool:
        """Of partial sums one has the bias."""
        return self._split is not Split.INPUTS or self._placement.ranks.rank == 0

    def _inputs_of_rank(self) -> Shard:
        if self._split is Split.INPUTS:
            return self._placement.ranks.shard(self._in_features)
        return Shard(0, self._in_features)

    def _outputs_of_rank(self, part: LinearPart) -> Iterator[Shard]:
        if self._split is not Split.OUTPUTS:
            yield Shard(0, part.out_features)
            return
        width = part.out_features // part.segments
        shard = self._placement.ranks.shard(width, part.num_shards)
        for segment in range(part.segments):
            yield Shard(segment * width + shard.start, segment * width + shard.end)

    def _weight_spec(self, part: LinearPart) -> TensorSpec:
        shape = (part.out_features, self._in_features)
        return TensorSpec(f"{part.name}.weight", shape[::-1] if self._input_major else shape)

    def _bias_spec(self, part: LinearPart) -> TensorSpec:
        return TensorSpec(f"{part.name}.bias", (part.out_features,))
