"""Layers that keep a state of fixed size for each sequence instead of keys and values: their common parts."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import nn

from quire_kernels import ops
from quire_kernels.states import StatePages, StateShape, StateUnits
from worker_svc.layers.embedding_norm import rms_factor
from worker_svc.parallel.ranks import ALONE, Ranks, Segment
from worker_svc.weights import Loadable, Placement, TensorReader, TensorSpec


@dataclass(frozen=True, slots=True)
class StateSize:
    """The state of one sequence, of all layers of a model that keep one: units of equal bytes, in blocks of the pool.

    Attributes:
        num_units: of all layers.
        unit_bytes: of each; a unit lies within one block.
    """

    num_units: int
    unit_bytes: int

    @property
    def num_bytes(self) -> int:
        """The number of bytes of all units."""
        return self.num_units * self.unit_bytes

    def num_blocks(self, block_bytes: int) -> int:
        """The blocks that hold a state; a block holds at least a unit."""
        return -(-self.num_units // (block_bytes // self.unit_bytes))


class StateLayer(nn.Module):
    """A layer that keeps a state for each sequence, in the place of attention."""

    @abstractmethod
    def forward(self, x: torch.Tensor, pages: StatePages) -> torch.Tensor:
        """x [T, hidden], after the norm -> what is added to the residual stream, [T, hidden]. The states of the rows
        of `pages` become those after their new tokens."""


class StateConfig(Protocol):
    """The sizes of the layers of a model that keep a state; all have the same."""

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """The parts of a layer's state, in their order."""
        ...

    def of_rank(self, ranks: Ranks) -> Self:
        """The sizes of a rank's part. ConfigurationError if the ranks cannot have equal parts."""
        ...

    def make_layer(self, name: str, hidden: int, units: Sequence[StateUnits], placement: Placement) -> StateLayer:
        """A layer of the decoder's layer `name`, of all ranks. `units` says where each part of this rank's state is."""
        ...


@dataclass(frozen=True, slots=True)
class StateLayout:
    """Where the states of a model's layers are.

    Args:
        shapes: of a layer.
    """

    shapes: tuple[StateShape, ...]

    @property
    def unit_bytes(self) -> int:
        """The bytes of a unit: the bytes of the largest tile."""
        return max(shape.tile_bytes for shape in self.shapes)

    def size(self, num_layers: int) -> StateSize:
        """The state of all layers."""
        of_layer = sum(shape.num_units(self.unit_bytes) for shape in self.shapes)
        return StateSize(num_layers * of_layer, self.unit_bytes)

    def units(self, number: int) -> list[StateUnits]:
        """Where each part of the state of layer `number` is, counted among the layers that keep a state."""
        first, unit_bytes = self.size(number).num_units, self.unit_bytes
        sizes = [shape.num_units(unit_bytes) for shape in self.shapes]
        return [StateUnits(first + sum(sizes[:index]), unit_bytes) for index in range(len(sizes))]


class Taps(Loadable):
    """The weights of a causal convolution of each channel on its own, and perhaps biases, in float32.

    Args:
        name: of its module in the checkpoint.
        channels: of all ranks.
        size: the tokens that an output depends on.
    """

    weight: torch.Tensor
    """[channels of this rank, size], the weights of a tap together."""
    bias: torch.Tensor | None

    def __init__(self, name: str, channels: Sequence[Segment], size: int, placement: Placement, *, bias: bool) -> None:
        super().__init__()
        count = sum(segment.size for segment in channels)
        self._weight = TensorSpec(f"{name}.weight", (count, 1, size))
        self._bias = TensorSpec(f"{name}.bias", (count,)) if bias else None
        self._shards = [shard.slice for shard in placement.ranks.shards(channels)]
        self._placement = placement
        self.bias = None

    def tensors(self) -> Iterator[TensorSpec]:
        yield from (spec for spec in (self._weight, self._bias) if spec is not None)

    def load(self, tensors: TensorReader) -> None:
        self.weight = self._placed(tensors.read(self._weight).squeeze(1))
        if self._bias is not None:
            self.bias = self._placed(tensors.read(self._bias))

    def _placed(self, stored: torch.Tensor) -> torch.Tensor:
        """This rank's channels, the last dimension of memory."""
        values = torch.cat([stored[shard] for shard in self._shards]).t()
        return torch.empty(values.shape, dtype=torch.float32, device=self._placement.device).copy_(values).t()


class GateNorm(Loadable):
    """A root mean square norm of the results of a layer, in groups, with gates: `norm(x) * activation(gate)`, or
    `norm(x * activation(gate))`.

    Args:
        name: of its module in the checkpoint.
        num_weights: of all groups together, or of one group: then all have the same.
        group_size: numbers that are normalised together.
        split: each rank has a part of the groups, or of one group, and of the weights.
        norm_first: the first of the two.
        activation: "silu" or "sigmoid".
    """

    weight: torch.Tensor

    def __init__(
        self,
        name: str,
        num_weights: int,
        eps: float,
        placement: Placement,
        *,
        group_size: int | None = None,
        norm_first: bool = True,
        activation: str = "silu",
        split: bool = False,
    ) -> None:
        super().__init__()
        self._shard = (placement.ranks if split else ALONE).shard(num_weights)
        self._spec = TensorSpec(f"{name}.weight", (num_weights,))
        self._eps, self._group_size, self._norm_first = eps, group_size or num_weights, norm_first
        self._activation = activation
        self._placement = placement

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, tensors: TensorReader) -> None:
        self.weight = self._placement.copy(tensors.read(self._spec)[self._shard.slice])

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x and gate [T, n], n a multiple of the group size, or this rank's part of a group; returns the same shape."""
        if x.shape[1] < self._group_size:
            return self._over_ranks(x, gate)
        return ops.gated_norm(
            x,
            gate,
            self.weight,
            self._eps,
            self._group_size,
            norm_first=self._norm_first,
            activation=self._activation,
        )

    def _over_ranks(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """The same with parts of a group on several ranks, in float32 until the end."""

        def gated(values: torch.Tensor) -> torch.Tensor:
            width, activation = values.shape[1], self._activation
            return ops.gated_norm(values, gate.float(), None, 1.0, width, norm_first=True, activation=activation)

        values, size = x.float(), self._group_size
        values = values if self._norm_first else gated(values)
        factor = rms_factor(values, size, self._eps, self._placement.ranks, self._spec.shape[0] // size)
        values = values * factor * self.weight
        return (gated(values) if self._norm_first else values).to(x.dtype)
