"""The interface of a model: what the runner calls, what the loader reads."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from quire.settings import ConfigurationError
from worker_svc.layers.embedding import Embedding, TiedHead
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.layers.loadable import Placement
from worker_svc.layers.quantization import Quantization
from worker_svc.model_input import ModelInput


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What the rest of the worker needs to know of a model.

    Attributes:
        num_kv_heads: of this rank.
        vocab_size: width of the logits, those of all ranks.
        max_model_len: positions that the model knows.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int


class CausalLM(nn.Module):
    """A decoder-only language model over a paged KV pool.

    Attributes:
        architecture: its name in config.json.
    """

    architecture: str

    def __init__(self, shape: ModelShape, placement: Placement) -> None:
        super().__init__()
        self.num_layers = shape.num_layers
        self.num_kv_heads = shape.num_kv_heads
        self.head_dim = shape.head_dim
        self.vocab_size = shape.vocab_size
        self.max_model_len = shape.max_model_len
        self.ranks = placement.ranks
        self.device = placement.device
        self.dtype = placement.dtype

    @abstractmethod
    def forward(self, inputs: ModelInput) -> torch.Tensor:
        """Runs the new tokens through all layers, writing their keys and values into the pool.

        Returns:
            Hidden states after the final norm, [T, hidden].
        """

    @abstractmethod
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [S, hidden], lines that `forward` returned -> [S, vocab_size] float32."""


class NativeCausalLM(CausalLM):
    """A model of Quire's own layers.

    Construction reads the configuration and allocates no weights; the loader fills them in.

    Attributes:
        base_prefix: what the names of the base model's tensors start with in the checkpoint.
    """

    base_prefix: ClassVar[str]
    head: nn.Module

    @classmethod
    @abstractmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "NativeCausalLM":
        """Raises ConfigurationError for a configuration that this family cannot serve."""

    @abstractmethod
    def embed(self, inputs: ModelInput) -> torch.Tensor:
        """What the first layer takes, [T, hidden]."""

    @abstractmethod
    def run_layers(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """The rest of `forward`, from what `embed` returned, which may be overwritten."""

    def forward(self, inputs: ModelInput) -> torch.Tensor:
        return self.run_layers(self.embed(inputs), inputs)

    def outputs(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits in the dtype of the output layer."""
        return self.ranks.gather_columns(self.head(hidden), self.vocab_size)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.outputs(hidden).float()


def make_head(embedding: Embedding, dim: int, vocab_size: int, *, tied: bool, placement: Placement) -> nn.Module:
    """The output layer: the embedding itself, or `lm_head` of the checkpoint. Each rank has a part of the logits."""
    if tied:
        return TiedHead(embedding)
    precise = replace(placement, quantization=Quantization.NONE)
    return Linear([LinearPart("lm_head", vocab_size)], dim, bias=False, placement=precise, split=Split.OUTPUTS)


def head_dim_of(hidden_size: int, num_heads: int) -> int:
    """Head size of models that divide their hidden size over the heads."""
    if hidden_size % num_heads:
        raise ConfigurationError(
            f"config.json: hidden size {hidden_size} is not a multiple of the number of heads, {num_heads}"
        )
    return hidden_size // num_heads
