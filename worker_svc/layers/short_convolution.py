"""Gated short convolutions, as LFM2 has: each channel is convolved over a few tokens, between two gates."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire_kernels import ops
from quire_kernels.states import StatePages, StateShape, StateUnits
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.layers.state_layer import StateLayer, Taps
from worker_svc.parallel.ranks import Ranks, Segment, part_of_rank
from worker_svc.weights import Placement


@dataclass(frozen=True, slots=True)
class ShortConvolutionConfig:
    """The sizes of these layers.

    Attributes:
        channels: the hidden size.
        num_taps: tokens that an output depends on.
        bias: whether the convolution and the layers around it have biases.
    """

    channels: int
    num_taps: int
    bias: bool

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        return (StateShape.of_conv(self.channels, self.num_taps),)

    def of_rank(self, ranks: Ranks) -> "ShortConvolutionConfig":
        return replace(self, channels=part_of_rank(ranks, self.channels, "channels of convolutions"))

    def make_layer(
        self, name: str, hidden: int, units: Sequence[StateUnits], placement: Placement
    ) -> "ShortConvolution":
        return ShortConvolution(f"{name}.conv", self, hidden, units, placement)


class ShortConvolution(StateLayer):
    """A layer whose state is the last inputs of its convolution.

    Args:
        name: of its module in the checkpoint.
        units: where its state is.
    """

    def __init__(
        self, name: str, config: ShortConvolutionConfig, hidden: int, units: Sequence[StateUnits], placement: Placement
    ) -> None:
        super().__init__()
        (self._units,) = units
        channels, bias = config.channels, config.bias
        self.inputs = Linear(
            [LinearPart(f"{name}.in_proj", 3 * channels, segments=(Segment(channels),) * 3)],
            hidden,
            bias=bias,
            placement=placement,
            split=Split.OUTPUTS,
        )
        self.convolution = Taps(f"{name}.conv", (Segment(channels),), config.num_taps, placement, bias=bias)
        output = LinearPart(f"{name}.out_proj", hidden)
        self.output = Linear([output], channels, bias=bias, placement=placement, split=Split.INPUTS)

    def forward(self, x: torch.Tensor, pages: StatePages) -> torch.Tensor:
        before, after, inputs = self.inputs(x).chunk(3, 1)
        taps = self.convolution
        return self.output(
            ops.causal_conv(inputs, taps.weight, taps.bias, pages, self._units, before=before, after=after)
        )
