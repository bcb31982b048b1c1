"""OPT: decoder with learned positions, layer norm before or after each block, and optional embedding projections."""

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

# The position table starts with two lines that no token uses.
POSITION_OFFSET = 2
LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class OPTConfig:
    """What OPT reads from config.json; defaults are those of transformers.

    Attributes:
        embedding_size: width of the token embedding; projections bridge to `hidden_size` where they differ.
        norm_first: layer norm before each block and not after it.
    """

    vocab_size: int
    embedding_size: int
    hidden_size: int
    ffn_size: int
    max_positions: int
    num_layers: int
    num_heads: int
    head_dim: int
    activation: str
    norm_first: bool
    final_norm: bool
    bias: bool
    affine_norms: bool
    tied: bool

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> "OPTConfig":
        fields = ConfigFields(values)
        hidden_size = fields.integer("hidden_size", 768)
        num_heads = fields.integer("num_attention_heads", 12)
        norm_first = fields.flag("do_layer_norm_before", True)
        return cls(
            vocab_size=fields.integer("vocab_size", 50272),
            embedding_size=fields.integer("word_embed_proj_dim", hidden_size),
            hidden_size=hidden_size,
            ffn_size=fields.integer("ffn_dim", 3072),
            max_positions=fields.integer("max_position_embeddings", 2048),
            num_layers=fields.integer("num_hidden_layers", 12),
            num_heads=num_heads,
            head_dim=head_dim_of(hidden_size, num_heads),
            activation=fields.text("activation_function", "relu"),
            norm_first=norm_first,
            final_norm=norm_first and not fields.flag("_remove_final_layer_norm", False),
            bias=fields.flag("enable_bias", True),
            affine_norms=fields.flag("layer_norm_elementwise_affine", True),
            tied=fields.flag("tie_word_embeddings", True),
        )


class OPTLayer(PlainLayer):
    """One decoder layer; `name` is its module in the checkpoint."""

    def __init__(self, name: str, config: OPTConfig, placement: Placement) -> None:
        super().__init__()
        hidden = config.hidden_size

        def outputs(modules: list[str], out_features: int, activation: ActivationKind | None = None) -> Linear:
            parts = [LinearPart(f"{name}.{module}", out_features) for module in modules]
            return Linear(
                parts, hidden, bias=config.bias, placement=placement, split=Split.OUTPUTS, activation=activation
            )

        def inputs(module: str, in_features: int) -> Linear:
            part = LinearPart(f"{name}.{module}", hidden)
            return Linear([part], in_features, bias=config.bias, placement=placement, split=Split.INPUTS)

        self.attention_norm = _norm(f"{name}.self_attn_layer_norm", config, placement)
        num_heads, _ = heads_of_rank(placement.ranks, config.num_heads, config.num_heads)
        self.qkv = outputs(["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"], hidden)
        self.attention = PagedAttention(num_heads, num_heads, config.head_dim, config.head_dim**-0.5)
        self.attention_output = inputs("self_attn.out_proj", hidden)
        self.mlp_norm = _norm(f"{name}.final_layer_norm", config, placement)
        self.up = outputs(["fc1"], config.ffn_size, ActivationKind(config.activation))
        self.down = inputs("fc2", config.ffn_size)


class OPTForCausalLM(NativeCausalLM):
    """Served from the tensors that transformers' model of the same name writes."""

    architecture = "OPTForCausalLM"
    base_prefix = "model."

    def __init__(self, config: OPTConfig, placement: Placement) -> None:
        shape = ModelShape(
            num_layers=config.num_layers,
            num_kv_heads=heads_of_rank(placement.ranks, config.num_heads, config.num_heads)[1],
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_model_len=config.max_positions,
        )
        super().__init__(shape, placement)
        decoder, hidden, width = "model.decoder", config.hidden_size, config.embedding_size
        self.embedding = Embedding(f"{decoder}.embed_tokens", config.vocab_size, width, placement=placement, split=True)
        self.position_embedding = Embedding(
            f"{decoder}.embed_positions", config.max_positions + POSITION_OFFSET, hidden, placement=placement
        )
        self.project_in = _projection(f"{decoder}.project_in", width, hidden, placement)
        layers = [OPTLayer(f"{decoder}.layers.{index}", config, placement) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.final_norm = _norm(f"{decoder}.final_layer_norm", config, placement) if config.final_norm else None
        self._norm_first = config.norm_first
        self._norms = [*(layer.attention_norm for layer in layers), self.final_norm]
        self.project_out = _projection(f"{decoder}.project_out", hidden, width, placement)
        self.head = make_head(self.embedding, width, config.vocab_size, tied=config.tied, placement=placement)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "OPTForCausalLM":
        return cls(OPTConfig.read(config), placement)

    def embed(self, inputs: ModelInput) -> torch.Tensor:
        x = self.project_in(self.embedding(inputs.token_ids))
        return x + self.position_embedding(inputs.positions + POSITION_OFFSET)

    def run_layers(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """Returns what the head takes, [T, word_embed_proj_dim]."""
        if self._norm_first:
            return self.project_out(run_norm_first(self.layers, self._norms, x, inputs))
        return self.project_out(self._run_norm_last(x, inputs))

    def _run_norm_last(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        for layer, kv_cache in zip(self.layers, inputs.kv_caches, strict=True):
            assert isinstance(layer, OPTLayer)
            x, _ = layer.attention_norm.add(layer.attend(x, kv_cache, inputs.attention), x)
            x, _ = layer.mlp_norm.add(layer.feed_forward(x), x)
        return x


def _norm(name: str, config: OPTConfig, placement: Placement) -> LayerNorm:
    return LayerNorm(name, config.hidden_size, LAYER_NORM_EPS, placement=placement, affine=config.affine_norms)


def _projection(name: str, in_features: int, out_features: int, placement: Placement) -> nn.Module:
    """Between embedding and hidden size; models in which they are equal have none."""
    if in_features == out_features:
        return nn.Identity()
    return Linear([LinearPart(name, out_features)], in_features, bias=False, placement=placement)
