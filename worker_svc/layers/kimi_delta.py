"""Kimi Delta Attention (arXiv 2510.26692): a delta rule whose decay differs between the channels of a key."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from quire_kernels import ops
from quire_kernels.states import StatePages, StateShape, StateUnits
from worker_svc.layers.embedding_norm import Numbers
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.layers.state_layer import GateNorm, StateLayer, Taps
from worker_svc.parallel.ranks import Ranks, Segment, part_of_rank
from worker_svc.weights import Placement


@dataclass(frozen=True, slots=True)
class KimiDeltaConfig:
    """The sizes of these layers.

    Attributes:
        num_heads, head_dim: of query, key and value.
        num_taps: tokens that an output of the convolution depends on.
        activation: of the convolution.
    """

    num_heads: int
    head_dim: int
    num_taps: int
    activation: str
    norm_eps: float

    @property
    def width(self) -> int:
        """Numbers of the keys of a token."""
        return self.num_heads * self.head_dim

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution, and the matrices."""
        return (
            StateShape.of_conv(3 * self.width, self.num_taps),
            StateShape.of_recurrence(self.num_heads, self.head_dim, self.head_dim),
        )

    def of_rank(self, ranks: Ranks) -> "KimiDeltaConfig":
        """With some heads."""
        return replace(self, num_heads=part_of_rank(ranks, self.num_heads, "heads in layers with delta rules"))

    def make_layer(self, name: str, hidden: int, units: Sequence[StateUnits], placement: Placement) -> "KimiDelta":
        return KimiDelta(f"{name}.self_attn", self, hidden, units, placement)


class KimiDelta(StateLayer):
    """A layer whose state is the last inputs of a convolution, and a matrix [head_dim, head_dim] of each head. Time
    steps and output gates come from few numbers of a token.

    Args:
        name: of its module in the checkpoint.
        units: where its state is.
    """

    def __init__(
        self, name: str, config: KimiDeltaConfig, hidden: int, units: Sequence[StateUnits], placement: Placement
    ) -> None:
        super().__init__()
        self._config = config.of_rank(placement.ranks)
        self._of_convolution, self._of_recurrence = units
        heads, head_dim, width = config.num_heads, config.head_dim, config.width

        def linear(
            *parts: tuple[str, int], inputs: int, split: Split = Split.OUTPUTS, keeps_weights: bool = False
        ) -> Linear:
            named = [LinearPart(f"{name}.{part}", size) for part, size in parts]
            return Linear(named, inputs, bias=False, placement=placement, split=split, keeps_weights=keeps_weights)

        self.inputs = linear(("q_proj", width), ("k_proj", width), ("v_proj", width), inputs=hidden)
        self.gate_inputs = linear(("g_a_proj", head_dim), inputs=hidden, split=Split.WHOLE)
        self.gates = linear(("g_b_proj", width), inputs=head_dim)
        # Errors of decays would add up over all later tokens.
        self.step_inputs = linear(("f_a_proj", head_dim), inputs=hidden, split=Split.WHOLE, keeps_weights=True)
        self.steps = linear(("f_b_proj", width), inputs=head_dim, keeps_weights=True)
        self.beta = linear(("b_proj", heads), inputs=hidden, keeps_weights=True)
        self.convolution = Taps(f"{name}.conv1d", (Segment(width),) * 3, config.num_taps, placement, bias=False)
        self.log_decay = Numbers(f"{name}.A_log", heads, placement, shape=(1, 1, heads, 1))
        self.step_bias = Numbers(f"{name}.dt_bias", width, placement)
        self.norm = GateNorm(f"{name}.o_norm", head_dim, config.norm_eps, placement, activation="sigmoid")
        self.output = linear(("o_proj", hidden), inputs=width, split=Split.INPUTS)

    def forward(self, x: torch.Tensor, pages: StatePages) -> torch.Tensor:
        config, num_tokens = self._config, x.shape[0]
        by_head = (num_tokens, config.num_heads, config.head_dim)
        decay, beta = ops.gates(
            self.steps(self.step_inputs(x)).view(by_head),
            self.beta(x),
            self.log_decay.values,
            self.step_bias.values.view(by_head[1:]),
        )
        mixed = ops.causal_conv(
            self.inputs(x), self.convolution.weight, None, pages, self._of_convolution, activation=config.activation
        )
        query, key, value = (each.view(by_head) for each in mixed.chunk(3, 1))
        attended = ops.linear_recurrence(
            query,
            key,
            value,
            decay,
            beta,
            pages,
            self._of_recurrence,
            delta=True,
            unit_norm=True,
            scale=config.head_dim**-0.5,
        )
        return self.output(self.norm(attended.view(num_tokens, -1), self.gates(self.gate_inputs(x))))
