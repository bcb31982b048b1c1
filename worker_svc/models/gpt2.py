"""GPT-2: pre-norm decoder with learned positions, whose linear layers are stored input-major (Conv1D)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker_svc.layers.activation import ActivationKind
from worker_svc.layers.attention import PagedAttention
from worker_svc.layers.embedding import Embedding
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.layers.loadable import Placement
from worker_svc.layers.norm import LayerNorm
from worker_svc.model_input import ModelInput
from worker_svc.models.base import ModelShape, NativeCausalLM, head_dim_of, make_head
from worker_svc.models.config_fields import ConfigFields
from worker_svc.models.plain_layer import PlainLayer, run_norm_first
from worker_svc.parallel.ranks import heads_of_rank


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """What GPT-2 reads from config.json; defaults are those of transformers."""

    vocab_size: int
    max_positions: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    head_dim: int
    activation: str
    layer_norm_eps: float
    scale_by_head_dim: bool
    scale_by_layer: bool
    tied: bool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "GPT2Config":
        fields = ConfigFields(values)
        if fields.flag("add_cross_attention", False):
            raise fields.error("add_cross_attention", True, "false: a decoder alone is served")
        hidden_size = fields.integer("n_embd", 768)
        num_heads = fields.integer("n_head", 12)
        return cls(
            vocab_size=fields.integer("vocab_size", 50257),
            max_positions=fields.integer("n_positions", 1024),
            hidden_size=hidden_size,
            inner_size=fields.integer("n_inner", 4 * hidden_size),
            num_layers=fields.integer("n_layer", 12),
            num_heads=num_heads,
            head_dim=head_dim_of(hidden_size, num_heads),
            activation=fields.text("activation_function", "gelu_new"),
            layer_norm_eps=fields.number("layer_norm_epsilon", 1e-5),
            scale_by_head_dim=fields.flag("scale_attn_weights", True),
            scale_by_layer=fields.flag("scale_attn_by_inverse_layer_idx", False),
            tied=fields.flag("tie_word_embeddings", True),
        )

    def attention_scale(self, layer_index: int) -> float:
        scale = self.head_dim**-0.5 if self.scale_by_head_dim else 1.0
        return scale / (layer_index + 1) if self.scale_by_layer else scale


class GPT2Layer(PlainLayer):
    """One decoder layer, number `index`."""

    def __init__(self, index: int, config: GPT2Config, placement: Placement) -> None:
        super().__init__()
        name, hidden = f"transformer.h.{index}", config.hidden_size

        def linear(
            part: LinearPart, in_features: int, split: Split, activation: ActivationKind | None = None
        ) -> Linear:
            return Linear(
                [part],
                in_features,
                bias=True,
                placement=placement,
                split=split,
                input_major=True,
                activation=activation,
            )

        def norm(module: str) -> LayerNorm:
            return LayerNorm(f"{name}.{module}", hidden, config.layer_norm_eps, placement=placement)

        self.attention_norm = norm("ln_1")
        self.qkv = linear(LinearPart(f"{name}.attn.c_attn", 3 * hidden, segments=3), hidden, Split.OUTPUTS)
        num_heads, _ = heads_of_rank(placement.ranks, config.num_heads, config.num_heads)
        self.attention = PagedAttention(num_heads, num_heads, config.head_dim, config.attention_scale(index))
        self.attention_output = linear(LinearPart(f"{name}.attn.c_proj", hidden), hidden, Split.INPUTS)
        self.mlp_norm = norm("ln_2")
        up, down = LinearPart(f"{name}.mlp.c_fc", config.inner_size), LinearPart(f"{name}.mlp.c_proj", hidden)
        self.up = linear(up, hidden, Split.OUTPUTS, ActivationKind(config.activation))
        self.down = linear(down, config.inner_size, Split.INPUTS)


class GPT2LMHeadModel(NativeCausalLM):
    """Served from the tensors that transformers' model of the same name writes."""

    architecture = "GPT2LMHeadModel"
    base_prefix = "transformer."

    def __init__(self, config: GPT2Config, placement: Placement) -> None:
        shape = ModelShape(
            num_layers=config.num_layers,
            num_kv_heads=heads_of_rank(placement.ranks, config.num_heads, config.num_heads)[1],
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_model_len=config.max_positions,
        )
        super().__init__(shape, placement)
        hidden = config.hidden_size
        self.embedding = Embedding("transformer.wte", config.vocab_size, hidden, placement=placement, split=True)
        self.position_embedding = Embedding("transformer.wpe", config.max_positions, hidden, placement=placement)
        layers = [GPT2Layer(index, config, placement) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = LayerNorm("transformer.ln_f", hidden, config.layer_norm_eps, placement=placement)
        self._norms = [*(layer.attention_norm for layer in layers), self.norm]
        self.head = make_head(self.embedding, hidden, config.vocab_size, tied=config.tied, placement=placement)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "GPT2LMHeadModel":
        return cls(GPT2Config.read(config), placement)

    def embed(self, inputs: ModelInput) -> torch.Tensor:
        return self.embedding(inputs.token_ids) + self.position_embedding(inputs.positions)

    def run_layers(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        return run_norm_first(self.layers, self._norms, x, inputs)
