"""State space layers of Mamba (arXiv 2312.00752), with or without attention in other layers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch
from torch import nn

from quire_kernels import ops
from quire_kernels.states import StatePages, StateShape, StateUnits
from worker_svc.layers.embedding_norm import NoNorm, Numbers, RmsNorm, UnitNorm
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.layers.state_layer import StateLayer, Taps
from worker_svc.parallel.ranks import Ranks, Segment, part_of_rank
from worker_svc.weights import Loadable, Placement, TensorReader, TensorSpec


class MambaNorms(Enum):
    """The norms of time steps, B and C."""

    NONE = auto()
    WITHOUT_WEIGHTS = auto()
    WITH_WEIGHTS = auto()


@dataclass(frozen=True, slots=True)
class MambaConfig:
    """The sizes of these layers.

    Attributes:
        module: the name of the layer in the decoder's layer.
        inner_size: numbers of the inputs of a token.
        state_dim: numbers of the state for each input.
        step_rank: numbers that the time steps of a token are made of.
        num_taps: tokens that an output of the convolution depends on.
        activation: of the convolution.
        taps_bias, bias: whether the convolution, and the layers around all, have biases.
        norms: with `norm_eps`.
    """

    module: str
    inner_size: int
    state_dim: int
    step_rank: int
    num_taps: int
    activation: str
    norm_eps: float
    taps_bias: bool
    bias: bool
    norms: MambaNorms = MambaNorms.NONE

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution, and the state of each input."""
        return (
            StateShape.of_conv(self.inner_size, self.num_taps),
            StateShape.of_scan(self.inner_size, self.state_dim),
        )

    def of_rank(self, ranks: Ranks) -> "MambaConfig":
        """With some inputs."""
        return replace(self, inner_size=part_of_rank(ranks, self.inner_size, "inputs in layers of Mamba"))

    def make_layer(self, name: str, hidden: int, units: Sequence[StateUnits], placement: Placement) -> "Mamba":
        return Mamba(f"{name}.{self.module}", self, hidden, units, placement)


class Mamba(StateLayer):
    """A layer whose state is the last inputs of a convolution, and `state_dim` numbers for each input.

    Args:
        name: of its module in the checkpoint.
        units: where its state is.
    """

    def __init__(
        self, name: str, config: MambaConfig, hidden: int, units: Sequence[StateUnits], placement: Placement
    ) -> None:
        super().__init__()
        self._config = config.of_rank(placement.ranks)
        self._of_convolution, self._of_scan = units
        inner, rank = config.inner_size, config.step_rank

        def linear(
            part: str, outputs: int, inputs: int, split: Split, *, bias: bool = False, segments: Sequence[Segment] = ()
        ) -> Linear:
            named = LinearPart(f"{name}.{part}", outputs, segments=tuple(segments))
            return Linear([named], inputs, bias=bias, placement=placement, split=split)

        def norm(part: str, size: int) -> nn.Module:
            if config.norms is MambaNorms.NONE:
                return NoNorm()
            if config.norms is MambaNorms.WITHOUT_WEIGHTS:
                return UnitNorm(size, config.norm_eps, placement)
            return RmsNorm(f"{name}.{part}", size, config.norm_eps, placement=placement)

        mixed, gate = Segment(inner), Segment(inner)
        self.inputs = linear("in_proj", 2 * inner, hidden, Split.OUTPUTS, bias=config.bias, segments=(mixed, gate))
        self.convolution = Taps(f"{name}.conv1d", (mixed,), config.num_taps, placement, bias=config.taps_bias)
        self.projections = linear("x_proj", rank + 2 * config.state_dim, inner, Split.INPUTS)
        self.step_norm, self.b_norm, self.c_norm = (
            norm("dt_layernorm", rank),
            norm("b_layernorm", config.state_dim),
            norm("c_layernorm", config.state_dim),
        )
        self.steps = linear("dt_proj", inner, rank, Split.OUTPUTS)
        self.step_bias = Numbers(f"{name}.dt_proj.bias", inner, placement)
        self.decay = _Decay(f"{name}.A_log", inner, config.state_dim, placement)
        self.skip = Numbers(f"{name}.D", inner, placement)
        self.output = linear("out_proj", hidden, inner, Split.INPUTS, bias=config.bias)

    def forward(self, x: torch.Tensor, pages: StatePages) -> torch.Tensor:
        config, taps = self._config, self.convolution
        mixed, gate = self.inputs(x).chunk(2, 1)
        mixed = ops.causal_conv(
            mixed, taps.weight, taps.bias, pages, self._of_convolution, activation=config.activation
        )
        sizes = (config.step_rank, config.state_dim, config.state_dim)
        steps, b, c = self.projections(mixed).split_with_sizes(sizes, 1)
        # The operation for layers whose decay is of a head: only its time steps are used.
        _, steps = ops.gates(self.steps(self.step_norm(steps)), None, self.decay.no_log_decay, self.step_bias.values)
        results = ops.selective_scan(
            mixed,
            steps,
            self.decay.values,
            self.b_norm(b),
            self.c_norm(c),
            pages,
            self._of_scan,
            skip=self.skip.values,
        )
        return self.output(ops.gated_norm(results, gate, None, 1.0, config.inner_size, norm_first=True))


class _Decay(Loadable):
    """The matrix A, whose logarithm the checkpoint has, of this rank's inputs."""

    values: torch.Tensor
    """[inputs, state_dim], negative, in float32."""
    no_log_decay: torch.Tensor
    """[inputs] zeros."""

    def __init__(self, name: str, num_inputs: int, state_dim: int, placement: Placement) -> None:
        super().__init__()
        self._spec, self._placement = TensorSpec(name, (num_inputs, state_dim)), placement

    def tensors(self) -> Iterator[TensorSpec]:
        yield self._spec

    def load(self, tensors: TensorReader) -> None:
        stored = tensors.read(self._spec)
        stored = stored[self._placement.ranks.shard(len(stored)).slice]
        values = torch.empty(stored.shape, dtype=torch.float32, device=self._placement.device).copy_(stored)
        self.values = values.exp_().neg_()
        self.no_log_decay = values.new_zeros(values.shape[0])
