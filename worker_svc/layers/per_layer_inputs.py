"""Inputs of each layer of their own, in addition to the residual stream, as in Gemma 3n and 4."""

from dataclasses import dataclass

import torch
from torch import nn

from quire_kernels import ops
from worker_svc.layers.activations import ActivationKind
from worker_svc.layers.embedding_norm import Embedding, RmsNorm
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.weights import Placement


@dataclass(frozen=True, slots=True)
class PerLayerConfig:
    """The inputs of a token.

    Attributes:
        size: of the input of one layer.
        vocab_size: of their table; tokens beyond it have the inputs of token 0.
    """

    size: int
    vocab_size: int


class PerLayerInputs(nn.Module):
    """The inputs of all layers: the sum of a table's and of a projection of the embedding, each with variance 1/2."""

    def __init__(self, config: PerLayerConfig, num_layers: int, hidden: int, eps: float, placement: Placement) -> None:
        super().__init__()
        width = num_layers * config.size
        self._config = config
        # As transformers, which rounds it.
        self._table_scale = torch.tensor(config.size**0.5, dtype=placement.dtype).item()
        self.table = Embedding(
            "model.embed_tokens_per_layer", config.vocab_size, width, placement=placement, split=True
        )
        self.projection = Linear(
            [LinearPart("model.per_layer_model_projection", width)], hidden, bias=False, placement=placement
        )
        # The projection is to be divided by the root of `hidden`, which changes its norm by the eps only.
        self.norm = RmsNorm("model.per_layer_projection_norm", config.size, eps * hidden, placement=placement)

    def forward(self, token_ids: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        """token_ids [T], embedded [T, hidden] -> [T, layers * size]."""
        projected = self.norm(self.projection(embedded).unflatten(1, (-1, self._config.size)))
        of_tokens = self.table(token_ids.where(token_ids < self._config.vocab_size, 0))
        return (projected.flatten(1) + of_tokens * self._table_scale) * 0.5**0.5


class PerLayerGate(nn.Module):
    """Adds a layer's own input to its output; `layer` is the layer's name in the checkpoint."""

    def __init__(
        self, layer: str, config: PerLayerConfig, hidden: int, activation: str, eps: float, placement: Placement
    ) -> None:
        super().__init__()
        size = config.size
        self.gate = Linear(
            [LinearPart(f"{layer}.per_layer_input_gate", size)],
            hidden,
            bias=False,
            placement=placement,
            split=Split.OUTPUTS,
            activation=ActivationKind(activation),
        )
        self.projection = Linear(
            [LinearPart(f"{layer}.per_layer_projection", hidden)],
            size,
            bias=False,
            placement=placement,
            split=Split.INPUTS,
        )
        self.norm = RmsNorm(f"{layer}.post_per_layer_input_norm", hidden, eps, placement=placement)
        self._shard = placement.ranks.shard(size)

    def forward(self, x: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
        """x [T, hidden], own [T, size], the layer's own input -> what is to be added to x."""
        return self.norm(self.projection(ops.multiply(self.gate(x), own[:, self._shard.slice])))
