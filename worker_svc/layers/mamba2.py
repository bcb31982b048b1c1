"""State space layers of Mamba 2 (arXiv 2405.21060), as hybrids of it and attention have."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire.runtime.settings import ConfigurationError
from quire_kernels import ops
from quire_kernels.states import StatePages, StateShape, StateUnits
from worker_svc.layers.embedding_norm import Numbers
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.layers.state_layer import GateNorm, StateLayer, Taps
from worker_svc.parallel.ranks import Ranks, Segment, part_of_rank
from worker_svc.weights import Placement


@dataclass(frozen=True, slots=True)
class Mamba2Config:
    """The sizes of these layers.

    Attributes:
        module: the name of the layer in the decoder's layer.
        num_heads, head_dim: of the inputs.
        num_groups: of heads, which share the projections B and C.
        state_dim: numbers of the state for each input.
        num_taps: tokens that an output of the convolution depends on.
        taps_bias, bias: whether the convolution, and the layers around all, have biases.
        least_step, greatest_step: bounds of the time step.
        norm_group: numbers of the result that are normalised together; None without a norm.
        norm_first: as in `GateNorm`.
        input_scale: factor on the layer's input.
        scales: factors on gate, inputs, B, C and time steps.
        output_bias: whether the output layer has biases, if it differs from `bias`.
        output_scale: factor on the result.
    """

    module: str
    num_heads: int
    head_dim: int
    num_groups: int
    state_dim: int
    num_taps: int
    activation: str
    norm_eps: float
    taps_bias: bool = True
    bias: bool = False
    least_step: float = 0.0
    greatest_step: float = float("inf")
    norm_group: int | None = None
    norm_first: bool = False
    input_scale: float = 1.0
    scales: tuple[float, ...] = (1.0,) * 5
    output_bias: bool | None = None
    output_scale: float = 1.0

    @property
    def inner_size(self) -> int:
        """Numbers of the inputs of a token."""
        return self.num_heads * self.head_dim

    @property
    def group_size(self) -> int:
        """Numbers of B of a token, and of C."""
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: inputs, B and C."""
        return self.inner_size + 2 * self.group_size

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution, and the matrices."""
        return (
            StateShape.of_conv(self.channels, self.num_taps),
            StateShape.of_recurrence(self.num_heads, self.state_dim, self.head_dim),
        )

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Inputs, B and C, which are split over ranks separately. Ranks with heads of one group have its B and C."""
        of_groups = Segment(self.group_size, self.num_groups)
        return (Segment(self.inner_size), of_groups, of_groups)

    def of_rank(self, ranks: Ranks) -> "Mamba2Config":
        """With some heads and their groups."""
        num_heads = part_of_rank(ranks, self.num_heads, "heads in layers of Mamba 2")
        if self.num_groups % ranks.size and ranks.size % self.num_groups:
            raise ConfigurationError(
                f"--tensor-parallel-size is {ranks.size}; it must divide the {self.num_groups} groups of heads in "
                "this model's layers of Mamba 2, or be a multiple of them"
            )
        return replace(self, num_heads=num_heads, num_groups=max(self.num_groups // ranks.size, 1))

    def make_layer(self, name: str, hidden: int, units: Sequence[StateUnits], placement: Placement) -> "Mamba2":
        return Mamba2(f"{name}.{self.module}", self, hidden, units, placement)


class Mamba2(StateLayer):
    """A layer whose state is the last inputs of a convolution, and a matrix [state_dim, head_dim] of each head.

    Args:
        name: of its module in the checkpoint.
        units: where its state is.
    """

    def __init__(
        self, name: str, config: Mamba2Config, hidden: int, units: Sequence[StateUnits], placement: Placement
    ) -> None:
        super().__init__()
        self._config = config.of_rank(placement.ranks)
        self._of_convolution, self._of_recurrence = units
        inner = config.inner_size
        parts = _input_parts(f"{name}.in_proj", config)
        self.inputs = Linear(parts, hidden, bias=config.bias, placement=placement, split=Split.OUTPUTS)
        self.convolution = Taps(f"{name}.conv1d", config.segments, config.num_taps, placement, bias=config.taps_bias)
        self.log_decay = Numbers(f"{name}.A_log", config.num_heads, placement)
        self.step_bias = Numbers(f"{name}.dt_bias", config.num_heads, placement)
        self.skip = Numbers(f"{name}.D", config.num_heads, placement)
        self.norm: GateNorm | None = None
        if config.norm_group is not None:
            self.norm = GateNorm(
                f"{name}.norm",
                inner,
                config.norm_eps,
                placement,
                group_size=config.norm_group,
                norm_first=config.norm_first,
                split=True,
            )
        bias = config.bias if config.output_bias is None else config.output_bias
        part = LinearPart(f"{name}.out_proj", hidden, scale=config.output_scale)
        self.output = Linear([part], inner, bias=bias, placement=placement, split=Split.INPUTS)

    def forward(self, x: torch.Tensor, pages: StatePages) -> torch.Tensor:
        config, num_tokens = self._config, x.shape[0]
        sizes = (config.inner_size, config.channels, config.num_heads)
        gate, mixed, steps = self.inputs(x).split_with_sizes(sizes, 1)
        decay, steps = ops.gates(
            steps,
            None,
            self.log_decay.values,
            self.step_bias.values,
            dt_min=config.least_step,
            dt_max=config.greatest_step,
        )
        taps = self.convolution
        mixed = ops.causal_conv(
            mixed, taps.weight, taps.bias, pages, self._of_convolution, activation=config.activation
        )
        inputs, b, c = mixed.split_with_sizes((config.inner_size, config.group_size, config.group_size), 1)
        results = ops.linear_recurrence(
            c.view(num_tokens, config.num_groups, config.state_dim),
            b.view(num_tokens, config.num_groups, config.state_dim),
            inputs.view(num_tokens, config.num_heads, config.head_dim),
            decay,
            steps,
            pages,
            self._of_recurrence,
            delta=False,
            unit_norm=False,
            scale=1.0,
            skip=self.skip.values,
        ).view(num_tokens, -1)
        if self.norm is None:
            return self.output(ops.gated_norm(results, gate, None, 1.0, config.inner_size, norm_first=True))
        return self.output(self.norm(results, gate))


def _input_parts(name: str, config: Mamba2Config) -> list[LinearPart]:
    """Gate, inputs, B, C and time steps: one layer of the checkpoint, in parts if these have factors."""
    segments = (Segment(config.inner_size), *config.segments, Segment(config.num_heads))
    sizes = [segment.size for segment in segments]
    if {config.input_scale, *config.scales} == {1.0}:
        return [LinearPart(name, sum(sizes), segments=segments)]
    return [
        LinearPart(
            name,
            segment.size,
            segments=(segment,),
            first=sum(sizes[:index]),
            of=sum(sizes),
            scale=scale,
            input_scale=config.input_scale,
        )
        for index, (segment, scale) in enumerate(zip(segments, config.scales, strict=True))
    ]
