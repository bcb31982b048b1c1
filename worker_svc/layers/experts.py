"""MLPs: a single one for all tokens, or experts, and a router that chooses a few of them for each token.

A step multiplies with the experts that its tokens have chosen, and with no other: the tokens of one expert together, by
the products that all linear layers have, so experts may be rounded, or coded as a file has them. A token's experts are
added in float32 in the order of the router's choice, so their sum does not depend on the other tokens. On the CPU one
operation of the library does all this, another one chooses, and both can be recorded.
"""

from dataclasses import dataclass, field, replace
from enum import Enum, auto
from functools import cached_property
from statistics import NormalDist

import torch
from torch import nn

from quire_kernels import ops
from quire_kernels.cpu.experts import PackedExperts
from quire_kernels.experts import ChoiceRule
from worker_svc.layers.activations import ActivationKind
from worker_svc.layers.embedding_norm import NoNorm, Numbers, RmsNorm
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.weights import Placement, TensorReader, TensorSpec, frozen

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")
MERGED_GATE_UP_DOWN = ("gate_up_proj", "gate_up_proj", "down_proj")


class Mlp(nn.Module):
    """`down(activation(gate(x)) * up(x))`, or `down(activation(up(x)))`. Each rank has some of the inner features.

    Args:
        name: of the module in the checkpoint.
        names: of gate, up and down in it; two names are of up and down, without a gate. Gate and up of one name are
            merged there, the gates first.
        sparsity: the share of the gates that is 0, if they are normally distributed: a cutoff is subtracted from all.
        scales: factors on the gates, before the activation, and on the outputs.
    """

    def __init__(
        self,
        name: str,
        hidden: int,
        inner: int,
        activation: str,
        *,
        placement: Placement,
        bias: bool = False,
        names: tuple[str, ...] = GATE_UP_DOWN,
        sparsity: float = 0.0,
        scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        super().__init__()
        *inputs, down = (f"{name}.{each}" for each in names)
        parts = [LinearPart(each, inner) for each in inputs]
        is_gated = len(inputs) == 2
        if is_gated and inputs[0] == inputs[1]:
            apart = ((0, f"{name}.{GATE_UP_DOWN[0]}"), (inner, f"{name}.{GATE_UP_DOWN[1]}"))
            parts = [LinearPart(inputs[0], inner, first=first, of=2 * inner, apart=other) for first, other in apart]
        if is_gated:
            parts[0] = replace(parts[0], scale=scales[0])
        kind = ActivationKind(activation, gated=is_gated)
        self.up = Linear(
            parts,
            hidden,
            bias=bias,
            placement=placement,
            split=Split.OUTPUTS,
            activation=None if sparsity else kind,
        )
        # Gates above it in multiples of their standard deviation are the largest `1 - sparsity`.
        self._cutoff = NormalDist().inv_cdf(sparsity) if sparsity else None
        self._function, self._inner, self._ranks = kind.function, inner, placement.ranks
        output = LinearPart(down, hidden, scale=scales[1])
        self.down = Linear([output], inner, bias=bias, placement=placement, split=Split.INPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden]; returns the same shape."""
        return self.down(self._inner_features(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """The same, of the inner features of this rank."""
        return self.down.partial(self._inner_features(x))

    def _inner_features(self, x: torch.Tensor) -> torch.Tensor:
        features = self.up(x)
        if self._cutoff is None:
            return features
        gates, ups = features.float().chunk(2, dim=-1)
        mean = self._sum(gates) / self._inner
        deviation = (self._sum((gates - mean).square()) / self._inner).sqrt()
        gates = (gates - mean - self._cutoff * deviation).relu()
        return self._function(torch.cat((gates, ups), dim=-1).to(features.dtype))

    def _sum(self, x: torch.Tensor) -> torch.Tensor:
        """Over the inner features of all ranks."""
        return self._ranks.sum(x.sum(dim=-1, keepdim=True))


class Scoring(Enum):
    """How a router's outputs become the scores of experts, by which they are chosen and weighted."""

    SOFTMAX = auto()
    SIGMOID = auto()
    SPARSE_MIXER = auto()
    """Each of two experts has its share among the experts with nearly as large outputs (PhiMoE)."""


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a model's layers.

    Attributes:
        num_chosen: experts of each token.
        inner_size: of each expert.
        normalized: whether the weights of a token's experts are divided by their sum.
        dense_layers: indices of the layers that have one MLP instead.
        module: the name of all of it in the checkpoint, within the layer.
        names: as in `Mlp`, of an expert.
        bias: whether the layers of experts and the router have biases.
        router: the name of the router.
        correction: the name of numbers that are added to the scores when experts are chosen; None if there are none.
        correction_is_row: whether the checkpoint has these as [1, count].
        num_groups: experts are in groups of neighbours, and only experts of the best groups are chosen.
        group_members: The score of a group is the sum of this number of its best.
        scale: a factor on the weights.
        tolerance: of `SPARSE_MIXER`.
        shared_inner_size: of the expert that all tokens have; None without it.
        shared: its name, within the layer.
        shared_gate: the name of the layer whose sigmoid is its weight; None if the weight is 1.
        beside_mlp: The experts are in addition to an MLP, as in `ExpertsBesideMlp`: names of the norms of the MLP's
            output, of the experts' input and of the experts' output, within the layer.
        router_scale: the name of the weights of a norm of the router's input; None if it is the experts' input.
        expert_scales: the name of a factor of each expert's weights; None if there are none.
    """

    count: int
    num_chosen: int
    inner_size: int
    normalized: bool
    dense_layers: frozenset[int] = field(default_factory=frozenset)
    module: str = "mlp"
    names: tuple[str, ...] = GATE_UP_DOWN
    bias: bool = False
    router: str = "gate"
    scoring: Scoring = Scoring.SOFTMAX
    correction: str | None = None
    correction_is_row: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    group_members: int = 2
    scale: float = 1.0
    tolerance: float = 0.0
    shared_inner_size: int | None = None
    shared: str = "mlp.shared_expert"
    shared_names: tuple[str, ...] = GATE_UP_DOWN
    shared_gate: str | None = None
    beside_mlp: tuple[str, str, str] | None = None
    router_scale: str | None = None
    expert_scales: str | None = None


class Experts(nn.Module):
    """The experts of one layer, whose name in the checkpoint is `layer`.

    Each rank has some of the inner features of every expert. All ranks make the same choice.
    """

    def __init__(self, layer: str, config: ExpertsConfig, hidden: int, activation: str, placement: Placement) -> None:
        super().__init__()
        name = f"{layer}.{config.module}" if config.module else layer
        self._config, self._ranks = config, placement.ranks
        self._rule = ChoiceRule(
            num_chosen=config.num_chosen,
            sigmoid=config.scoring is Scoring.SIGMOID,
            normalized=config.normalized,
            num_groups=config.num_groups,
            num_chosen_groups=config.num_chosen_groups,
            group_members=config.group_members,
            scale=config.scale,
        )

        def whole(module: str, out_features: int, *, bias: bool = False) -> Linear:
            # A few numbers, whose errors would choose other experts.
            part = LinearPart(module, out_features)
            return Linear([part], hidden, bias=bias, placement=placement, keeps_weights=True)

        def mlp(module: str, inner: int, names: tuple[str, ...]) -> Mlp:
            return Mlp(module, hidden, inner, activation, placement=placement, bias=config.bias, names=names)

        self.router = whole(f"{name}.{config.router}", config.count, bias=config.bias)
        self.correction: Numbers | None = None
        if config.correction is not None:
            shape = (1, config.count) if config.correction_is_row else None
            self.correction = Numbers(f"{name}.{config.correction}", config.count, placement, split=False, shape=shape)
        self.expert_scales: Numbers | None = None
        if config.expert_scales is not None:
            self.expert_scales = Numbers(f"{name}.{config.expert_scales}", config.count, placement, split=False)
        self.experts = nn.ModuleList(
            mlp(f"{name}.experts.{number}", config.inner_size, config.names) for number in range(config.count)
        )
        self.shared: Mlp | None = None
        self.shared_gate: Linear | None = None
        if config.shared_inner_size is not None:
            self.shared = mlp(f"{layer}.{config.shared}", config.shared_inner_size, config.shared_names)
            if config.shared_gate is not None:
                self.shared_gate = whole(f"{name}.{config.shared_gate}", 1)

    def forward(self, x: torch.Tensor, router_input: torch.Tensor | None = None) -> torch.Tensor:
        """x [T, hidden], and the router's input if it is another; returns the same shape."""
        weights, chosen = self._choose(x if router_input is None else router_input)
        shared = shared_gate = None
        if self.shared is not None:
            shared = self.shared.partial(x)
            shared_gate = None if self.shared_gate is None else self.shared_gate(x)
        if self._packed is not None:
            return self._ranks.sum(ops.experts(x, self._packed, weights, chosen, shared, shared_gate))
        outputs = self._multiply(x, chosen)
        total = x.new_zeros(x.shape, dtype=torch.float32)
        # Products and sums are rounded one by one, as a fused operation of torch would not round them at all places.
        for place in range(self._config.num_chosen):
            total += outputs[:, place].float() * weights[:, place, None]
        if shared is not None:
            total += shared.float() if shared_gate is None else shared.float() * _sigmoid(shared_gate.float())
        return self._ranks.sum(total.to(x.dtype))

    @cached_property
    def _packed(self) -> PackedExperts | None:
        """The experts for `ops.experts`; None if they are multiplied one by one. Weights are loaded only once."""
        factors = [(each.up.factor, each.down.factor) for each in self.experts if isinstance(each, Mlp)]
        whole = [(up, down) for up, down in factors if up is not None and down is not None]
        return ops.pack_experts(*zip(*whole, strict=True)) if len(whole) == len(factors) else None

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, num_chosen] float32 of each token's experts, the first chosen first, and their numbers, int64."""
        config, outputs = self._config, self.router(x)
        correction, factors = (None if each is None else each.values for each in (self.correction, self.expert_scales))
        if config.scoring is not Scoring.SPARSE_MIXER and ops.can_choose_experts(outputs.device, outputs.dtype):
            return ops.choose_experts(outputs, self._rule, correction, factors)
        outputs = outputs.float()
        if config.scoring is Scoring.SPARSE_MIXER:
            return _mix_sparsely(outputs, config.num_chosen, config.tolerance)
        scores = _sigmoid(outputs) if config.scoring is Scoring.SIGMOID else outputs.softmax(dim=-1)
        preferences = scores if correction is None else scores + correction
        if config.num_groups > 1:
            groups = preferences.unflatten(-1, (config.num_groups, -1))
            best = groups.topk(config.group_members).values.sum(dim=-1).topk(config.num_chosen_groups).indices
            is_left_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
            preferences = groups.masked_fill(is_left_out.unsqueeze(-1), -torch.inf).flatten(-2)
        chosen = preferences.topk(config.num_chosen).indices
        weights = scores.gather(-1, chosen)
        weights = weights / weights.sum(dim=-1, keepdim=True) if config.normalized else weights
        weights = weights if factors is None else weights * factors[chosen]
        return weights if config.scale == 1 else weights * config.scale, chosen

    def _multiply(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The outputs of each token's experts, [T, num_chosen, hidden], from the inner features of this rank."""
        (num_tokens, hidden), num_chosen = x.shape, self._config.num_chosen
        outputs = x.new_empty(num_tokens * num_chosen, hidden)
        places = chosen.view(-1).argsort(stable=True)
        counts = chosen.view(-1).bincount(minlength=len(self.experts)).tolist()
        for expert, of_expert in zip(self.experts, places.split(counts), strict=True):
            if of_expert.numel():
                assert isinstance(expert, Mlp)
                outputs[of_expert] = expert.partial(x[of_expert // num_chosen])
        return outputs.view(num_tokens, num_chosen, hidden)


class ExpertsBesideMlp(nn.Module):
    """Experts of a layer in addition to its MLP, each with a norm. The norms of the experts' and of the router's input
    are of the residual stream."""

    def __init__(
        self, layer: str, config: ExpertsConfig, hidden: int, activation: str, eps: float, placement: Placement
    ) -> None:
        super().__init__()
        assert config.beside_mlp is not None
        assert config.router_scale is not None
        norms = (RmsNorm(f"{layer}.{name}", hidden, eps, placement=placement) for name in config.beside_mlp)
        self.mlp_norm, self.norm, self.output_norm = norms
        self.router_norm = _RouterNorm(f"{layer}.{config.router_scale}", hidden, eps, placement)
        self.experts = Experts(layer, config, hidden, activation, placement)
        self._sum = NoNorm()

    def forward(self, output: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """output of the MLP [T, hidden], residual [T, hidden] -> the output of both."""
        of_experts = self.experts(self.norm(residual), self.router_norm(residual))
        return self._sum.add(self.output_norm(of_experts), self.mlp_norm(output))[1]


class _RouterNorm(RmsNorm):
    """A norm whose weights, the tensor `name`, are divided by the root of their number."""

    def __init__(self, name: str, dim: int, eps: float, placement: Placement) -> None:
        super().__init__(name, dim, eps, placement=placement)
        self._spec = TensorSpec(name, (dim,))

    def load(self, tensors: TensorReader) -> None:
        weight = tensors.read(self._spec)
        self.weight = frozen(self._placement.copy(weight.float() * weight.shape[0] ** -0.5))


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    """By a softmax, whose bits do not depend on the place in the batch."""
    return torch.stack((x, torch.zeros_like(x)), -1).softmax(dim=-1)[..., 0]


def _mix_sparsely(outputs: torch.Tensor, count: int, tolerance: float) -> tuple[torch.Tensor, torch.Tensor]:
    """SparseMixer-v2 (Liu et al. 2024), as it chooses when it is not trained: the weight of an expert is its share in a
    softmax over the experts left whose outputs differ by little from the best."""
    left, weights, chosen = outputs, [], []
    for _ in range(count):
        best, index = left.max(dim=-1, keepdim=True)
        distance = (best - outputs) / outputs.abs().maximum(best)
        near = left.masked_fill(distance > 2 * tolerance, -torch.inf)
        weights.append(near.softmax(dim=-1).gather(-1, index))
        chosen.append(index)
        left = left.scatter(-1, index, -torch.inf)
    return torch.cat(weights, dim=-1), torch.cat(chosen, dim=-1)
