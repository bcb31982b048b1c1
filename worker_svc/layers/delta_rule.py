"""Linear attention with gated delta rules (Gated Delta Networks, arXiv 2412.06464), as Qwen3-Next, Qwen3.5 and OLMo
Hybrid have."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

import torch

from quire_kernels import ops
from quire_kernels.states import StatePages, StateShape, StateUnits
from worker_svc.layers.embedding_norm import Numbers
from worker_svc.layers.linear import Linear, LinearPart, Split, Spread
from worker_svc.layers.state_layer import GateNorm, StateLayer, Taps
from worker_svc.parallel.ranks import Ranks, Segment, part_of_rank
from worker_svc.weights import Placement


class DeltaInputs(Enum):
    """The layers of the checkpoint that have the inputs of a delta rule: query, key, value, gate, beta and decay."""

    MERGED = auto()
    """One has query, key and value."""
    BY_KEY = auto()
    """One has the first four of each head of key together, another one beta and decay."""
    APART = auto()
    """Each has its own."""
    TOGETHER = auto()
    """One has all of them, one after the other."""


@dataclass(frozen=True, slots=True)
class DeltaRuleConfig:
    """The sizes of these layers.

    Attributes:
        num_keys, num_values: heads of key and of value; the former divide the latter.
        key_dim, value_dim: of a head.
        num_taps: tokens that an output of the convolution depends on.
        activation: of the convolution.
        inputs: how the checkpoint has them.
        beta_scale: factor on beta.
    """

    num_keys: int
    num_values: int
    key_dim: int
    value_dim: int
    num_taps: int
    activation: str
    norm_eps: float
    inputs: DeltaInputs
    beta_scale: float = 1.0

    @property
    def keys(self) -> int:
        """Numbers of the keys of a token."""
        return self.num_keys * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of the values of a token."""
        return self.num_values * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: query, key and value."""
        return 2 * self.keys + self.values

    @property
    def segments(self) -> tuple[Segment, ...]:
        """Channels that are split over ranks separately."""
        return (Segment(self.keys), Segment(self.keys), Segment(self.values))

    @property
    def state_shapes(self) -> tuple[StateShape, ...]:
        """The last inputs of the convolution, and the matrices."""
        return (
            StateShape.of_conv(self.channels, self.num_taps),
            StateShape.of_recurrence(self.num_values, self.key_dim, self.value_dim),
        )

    def of_rank(self, ranks: Ranks) -> "DeltaRuleConfig":
        """With some heads of key, and their heads of value."""
        num_keys = part_of_rank(ranks, self.num_keys, "heads of key in layers with delta rules")
        return replace(self, num_keys=num_keys, num_values=self.num_values // ranks.size)

    def make_layer(self, name: str, hidden: int, units: Sequence[StateUnits], placement: Placement) -> "DeltaRule":
        return DeltaRule(f"{name}.linear_attn", self, hidden, units, placement)

    def input_parts(self, name: str) -> tuple[list[LinearPart], list[LinearPart]]:
        """The parts of query, key, value and output gate, and the parts of beta and decay."""
        narrow = [("in_proj_b", self.num_values), ("in_proj_a", self.num_values)]
        if self.inputs is DeltaInputs.MERGED:
            wide = [LinearPart(f"{name}.in_proj_qkv", self.channels, segments=self.segments)]
            return [*wide, LinearPart(f"{name}.in_proj_z", self.values)], _linear_parts(name, narrow)
        if self.inputs is DeltaInputs.TOGETHER:
            sizes = (self.channels, self.values, self.num_values, self.num_values)
            parts = [
                LinearPart(f"{name}.in_proj", size, first=sum(sizes[:index]), of=sum(sizes))
                for index, size in enumerate(sizes)
            ]
            return [replace(parts[0], segments=self.segments), parts[1]], parts[2:]
        if self.inputs is DeltaInputs.APART:
            inputs = [("q_proj", self.keys), ("k_proj", self.keys), ("v_proj", self.values), ("g_proj", self.values)]
            narrow = [("b_proj", self.num_values), ("a_proj", self.num_values)]
            return _linear_parts(name, inputs), _linear_parts(name, narrow)
        ratio = self.num_values // self.num_keys
        value = ratio * self.value_dim
        return (
            self._by_key(f"{name}.in_proj_qkvz", (self.key_dim, self.key_dim, value, value)),
            self._by_key(f"{name}.in_proj_ba", (ratio, ratio)),
        )

    def _by_key(self, name: str, sizes: tuple[int, ...]) -> list[LinearPart]:
        """Parts of a layer whose outputs are, for each head of key, these numbers of outputs of each part."""
        each = sum(sizes)
        return [
            LinearPart(
                name,
                self.num_keys * size,
                first=sum(sizes[:index]),
                of=self.num_keys * each,
                spread=Spread(size, each),
            )
            for index, size in enumerate(sizes)
        ]


class DeltaRule(StateLayer):
    """A layer whose state is the last inputs of a convolution, and a matrix [key_dim, value_dim] of each head of value.

    Args:
        name: of its module in the checkpoint.
        units: where its state is.
    """

    def __init__(
        self, name: str, config: DeltaRuleConfig, hidden: int, units: Sequence[StateUnits], placement: Placement
    ) -> None:
        super().__init__()
        self._config = config.of_rank(placement.ranks)
        self._of_convolution, self._of_recurrence = units
        wide, narrow = config.input_parts(name)
        self.inputs = Linear(wide, hidden, bias=False, placement=placement, split=Split.OUTPUTS)
        # A few numbers, whose errors would add up over all later tokens.
        self.gates = Linear(narrow, hidden, bias=False, placement=placement, split=Split.OUTPUTS, keeps_weights=True)
        self.convolution = Taps(f"{name}.conv1d", config.segments, config.num_taps, placement, bias=False)
        self.log_decay = Numbers(f"{name}.A_log", config.num_values, placement)
        self.step_bias = Numbers(f"{name}.dt_bias", config.num_values, placement)
        is_apart = config.inputs is DeltaInputs.APART
        norm, output = ("o_norm", "o_proj") if is_apart else ("norm", "out_proj")
        self.norm = GateNorm(f"{name}.{norm}", config.value_dim, config.norm_eps, placement)
        self.output = Linear(
            [LinearPart(f"{name}.{output}", hidden)],
            config.values,
            bias=False,
            placement=placement,
            split=Split.INPUTS,
        )

    def forward(self, x: torch.Tensor, pages: StatePages) -> torch.Tensor:
        config, num_tokens = self._config, x.shape[0]
        mixed, gate = self.inputs(x).split_with_sizes((config.channels, config.values), 1)
        beta, step = self.gates(x).chunk(2, 1)
        decay, beta = ops.gates(step, beta, self.log_decay.values, self.step_bias.values, beta_scale=config.beta_scale)
        mixed = ops.causal_conv(
            mixed, self.convolution.weight, None, pages, self._of_convolution, activation=config.activation
        )
        query, key, value = mixed.split_with_sizes((config.keys, config.keys, config.values), 1)
        attended = ops.linear_recurrence(
            query.view(num_tokens, config.num_keys, config.key_dim),
            key.view(num_tokens, config.num_keys, config.key_dim),
            value.view(num_tokens, config.num_values, config.value_dim),
            decay,
            beta,
            pages,
            self._of_recurrence,
            delta=True,
            unit_norm=True,
            scale=config.key_dim**-0.5,
        )
        return self.output(self.norm(attended.view(num_tokens, -1), gate))


def _linear_parts(name: str, sizes: list[tuple[str, int]]) -> list[LinearPart]:
    return [LinearPart(f"{name}.{part}", size) for part, size in sizes]
