"""Gated MLPs: a single one for all tokens, or experts, and a router that chooses a few of them for each token.

A step multiplies with the experts that its tokens have chosen, and with no other: the tokens of one expert together, by
the products that all linear layers have, so experts may be rounded, or coded as a file has them. A token's experts are
added in float32 in the order of the router's choice, so their sum does not depend on the other tokens.
"""

from dataclasses import dataclass, field

import torch
from torch import nn

from worker_svc.layers.activations import ActivationKind
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.weights import Placement

GATE_UP_DOWN = ("gate_proj", "up_proj", "down_proj")


class GatedMlp(nn.Module):
    """`down(activation(gate(x)) * up(x))`. Each rank has some of the inner features.

    Args:
        name: of the module in the checkpoint.
        names: of gate, up and down in it. Gate and up of one name are merged there, the gates first.
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
        names: tuple[str, str, str] = GATE_UP_DOWN,
    ) -> None:
        super().__init__()
        gate, up, down = (f"{name}.{each}" for each in names)
        parts = [LinearPart(gate, inner), LinearPart(up, inner)]
        if gate == up:
            apart = ((0, f"{name}.{GATE_UP_DOWN[0]}"), (inner, f"{name}.{GATE_UP_DOWN[1]}"))
            parts = [LinearPart(gate, inner, first=first, of=2 * inner, apart=other) for first, other in apart]
        self.gate_up = Linear(
            parts,
            hidden,
            bias=bias,
            placement=placement,
            split=Split.OUTPUTS,
            activation=ActivationKind(activation, gated=True),
        )
        self.down = Linear([LinearPart(down, hidden)], inner, bias=bias, placement=placement, split=Split.INPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden]; returns the same shape."""
        return self.down(self.gate_up(x))

    def partial(self, x: torch.Tensor) -> torch.Tensor:
        """The same, of the inner features of this rank."""
        return self.down.partial(self.gate_up(x))


@dataclass(frozen=True, slots=True)
class ExpertsConfig:
    """The experts of a model's layers.

    Attributes:
        num_chosen: experts of each token.
        inner_size: of each expert.
        normalized: whether the weights of a token's experts are divided by their sum.
        shared_inner_size: of the expert that all tokens have, times a gate of its own; None without it.
        dense_layers: indices of the layers that have one MLP instead.
        module: the name of all of it in the checkpoint, within the layer.
        names: of gate, up and down in an expert.
    """

    count: int
    num_chosen: int
    inner_size: int
    normalized: bool
    shared_inner_size: int | None = None
    dense_layers: frozenset[int] = field(default_factory=frozenset)
    module: str = "mlp"
    names: tuple[str, str, str] = GATE_UP_DOWN


class Experts(nn.Module):
    """The experts of one layer, whose name in the checkpoint is `layer`.

    Each rank has some of the inner features of every expert. All ranks make the same choice.
    """

    def __init__(self, layer: str, config: ExpertsConfig, hidden: int, activation: str, placement: Placement) -> None:
        super().__init__()
        name = f"{layer}.{config.module}"
        self._num_chosen, self._normalized, self._ranks = config.num_chosen, config.normalized, placement.ranks

        def whole(module: str, out_features: int) -> Linear:
            # A few numbers, whose errors would choose other experts.
            part = LinearPart(f"{name}.{module}", out_features)
            return Linear([part], hidden, bias=False, placement=placement, keeps_weights=True)

        self.router = whole("gate", config.count)
        self.experts = nn.ModuleList(
            GatedMlp(
                f"{name}.experts.{number}",
                hidden,
                config.inner_size,
                activation,
                placement=placement,
                names=config.names,
            )
            for number in range(config.count)
        )
        self.shared: GatedMlp | None = None
        if config.shared_inner_size is not None:
            shared = f"{name}.shared_expert"
            self.shared = GatedMlp(shared, hidden, config.shared_inner_size, activation, placement=placement)
            self.shared_gate = whole("shared_expert_gate", 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden]; returns the same shape."""
        weights, chosen = self._choose(x)
        outputs = self._multiply(x, chosen)
        total = x.new_zeros(x.shape, dtype=torch.float32)
        # Products and sums are rounded one by one, as a fused operation of torch would not round them at all places.
        for place in range(self._num_chosen):
            total += outputs[:, place].float() * weights[:, place, None]
        if self.shared is not None:
            # A sigmoid as a softmax, whose bits do not depend on the place in the batch.
            shares = nn.functional.pad(self.shared_gate(x).float(), (0, 1)).softmax(dim=-1)
            total += self.shared.partial(x).float() * shares[:, :1]
        return self._ranks.sum(total.to(x.dtype))

    def _choose(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights [T, num_chosen] float32 of each token's experts, the greatest first, and their numbers, int64."""
        weights, chosen = self.router(x).float().softmax(dim=-1).topk(self._num_chosen)
        return weights / weights.sum(dim=-1, keepdim=True) if self._normalized else weights, chosen

    def _multiply(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """The outputs of each token's experts, [T, num_chosen, hidden], from the inner features of this rank."""
        num_tokens, hidden = x.shape
        outputs = x.new_empty(num_tokens * self._num_chosen, hidden)
        places = chosen.view(-1).argsort(stable=True)
        counts = chosen.view(-1).bincount(minlength=len(self.experts)).tolist()
        for expert, of_expert in zip(self.experts, places.split(counts), strict=True):
            if of_expert.numel():
                assert isinstance(expert, GatedMlp)
                outputs[of_expert] = expert.partial(x[of_expert // self._num_chosen])
        return outputs.view(num_tokens, self._num_chosen, hidden)
