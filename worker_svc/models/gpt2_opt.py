"""GPT-2 and OPT: decoders with learned positions, layer norms, and an MLP without a gate.

Served from the checkpoints of transformers' classes of the same names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from worker_svc.layers.activations import ActivationKind
from worker_svc.layers.attention import AttentionMetadata, PagedAttention
from worker_svc.layers.embedding_norm import Embedding, LayerNorm
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.models.base import ConfigFields, ModelInput, NativeCausalLM, head_dim_of, make_head
from worker_svc.parallel.ranks import Segment, heads_of_rank
from worker_svc.weights import Placement

# OPT's position table starts with two rows that no token uses.
_POSITION_OFFSET = 2
_LAYER_NORM_EPS = 1e-5
# Names of other models that transformers takes in a GPT-2 configuration, instead of GPT-2's own.
_OTHER_NAMES = {
    "hidden_size": "n_embd",
    "max_position_embeddings": "n_positions",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


class PlainLayer(nn.Module):
    """A decoder layer. The families' classes make its modules; `qkv` computes query, key and value."""

    attention_norm: LayerNorm
    qkv: Linear
    attention: PagedAttention
    attention_output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear

    def attend(self, x: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        query, key, value = self.attention.split(self.qkv(x))
        return self.attention_output(self.attention(query, key, value, kv_cache, metadata))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def run_norm_first(
    layers: nn.ModuleList, norms: Sequence[LayerNorm | None], residual: torch.Tensor, inputs: ModelInput
) -> torch.Tensor:
    """Runs layers whose norms come before attention and MLP.

    Args:
        layers: `PlainLayer`s.
        norms: the attention norm of each, then the final norm, None if there is none.
        residual: [T, hidden], the input of the first layer. It may be overwritten.

    Returns:
        Hidden states after the final norm, [T, hidden].
    """
    first_norm, *next_norms = norms
    assert first_norm is not None
    x = first_norm(residual)
    # The norm that follows a layer, the next layer's or the final one, adds the layer's output to the residual.
    caches = zip(inputs.kv_caches, inputs.attention, strict=True)
    for layer, next_norm, (kv_cache, attention) in zip(layers, next_norms, caches, strict=True):
        assert isinstance(layer, PlainLayer)
        x, residual = layer.mlp_norm.add(layer.attend(x, kv_cache, attention), residual)
        output = layer.feed_forward(x)
        if next_norm is None:
            return residual + output
        x, residual = next_norm.add(output, residual)
    return x


@dataclass(frozen=True, slots=True)
class GPT2Config:
    """The fields of GPT-2's config.json, with the defaults of transformers."""

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
        renamed = {own: values[name] for name, own in _OTHER_NAMES.items() if values.get(name) is not None}
        fields = ConfigFields({**values, **renamed})
        if fields.flag("add_cross_attention", False):
            raise fields.error("add_cross_attention", True, "false: only decoders are served")
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
        self.qkv = linear(
            LinearPart(f"{name}.attn.c_attn", 3 * hidden, segments=(Segment(hidden),) * 3), hidden, Split.OUTPUTS
        )
        num_heads, _ = heads_of_rank(placement.ranks, config.num_heads, config.num_heads)
        self.attention = PagedAttention(num_heads, num_heads, config.head_dim, config.attention_scale(index))
        self.attention_output = linear(LinearPart(f"{name}.attn.c_proj", hidden), hidden, Split.INPUTS)
        self.mlp_norm = norm("ln_2")
        up, down = LinearPart(f"{name}.mlp.c_fc", config.inner_size), LinearPart(f"{name}.mlp.c_proj", hidden)
        self.up = linear(up, hidden, Split.OUTPUTS, ActivationKind(config.activation))
        self.down = linear(down, config.inner_size, Split.INPUTS)


class GPT2LMHeadModel(NativeCausalLM):
    """GPT-2: norms first, learned positions, and linear layers stored input-major (Conv1D)."""

    architecture = "GPT2LMHeadModel"
    base_prefix = "transformer."

    def __init__(self, config: GPT2Config, placement: Placement) -> None:
        super().__init__(
            placement,
            num_layers=config.num_layers,
            num_kv_heads=heads_of_rank(placement.ranks, config.num_heads, config.num_heads)[1],
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_model_len=config.max_positions,
        )
        hidden = config.hidden_size
        self.embedding = Embedding("transformer.wte", config.vocab_size, hidden, placement=placement, split=True)
        self.position_embedding = Embedding("transformer.wpe", config.max_positions, hidden, placement=placement)
        layers = [GPT2Layer(index, config, placement) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = LayerNorm("transformer.ln_f", hidden, config.layer_norm_eps, placement=placement)
        self._norms = [*(layer.attention_norm for layer in layers), self.norm]
        self.head = make_head(self.embedding, hidden, config.vocab_size, tied=config.tied, placement=placement)

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> GPT2Config:
        """Raises ConfigurationError for a field of another type or out of range."""
        return GPT2Config.read(values)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "GPT2LMHeadModel":
        return cls(cls.read_config(config), placement)

    def embed(self, inputs: ModelInput) -> torch.Tensor:
        return self.embedding(inputs.token_ids) + self.position_embedding(inputs.positions)

    def run_layers(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        return run_norm_first(self.layers, self._norms, x, inputs)


@dataclass(frozen=True, slots=True)
class OPTConfig:
    """The fields of OPT's config.json, with the defaults of transformers.

    Attributes:
        embedding_size: width of the token embedding; projections convert to `hidden_size` if they differ.
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
    """OPT: learned positions, norms before or after each block, and optional projections around the embedding."""

    architecture = "OPTForCausalLM"
    base_prefix = "model."

    def __init__(self, config: OPTConfig, placement: Placement) -> None:
        super().__init__(
            placement,
            num_layers=config.num_layers,
            num_kv_heads=heads_of_rank(placement.ranks, config.num_heads, config.num_heads)[1],
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_model_len=config.max_positions,
        )
        decoder, hidden, width = "model.decoder", config.hidden_size, config.embedding_size
        self.embedding = Embedding(f"{decoder}.embed_tokens", config.vocab_size, width, placement=placement, split=True)
        self.position_embedding = Embedding(
            f"{decoder}.embed_positions", config.max_positions + _POSITION_OFFSET, hidden, placement=placement
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
    def read_config(cls, values: Mapping[str, Any]) -> OPTConfig:
        """Raises ConfigurationError for a field of another type or out of range."""
        return OPTConfig.read(values)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "OPTForCausalLM":
        return cls(cls.read_config(config), placement)

    def embed(self, inputs: ModelInput) -> torch.Tensor:
        x = self.project_in(self.embedding(inputs.token_ids))
        return x + self.position_embedding(inputs.positions + _POSITION_OFFSET)

    def run_layers(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        """Returns the input of the head, [T, word_embed_proj_dim]."""
        if self._norm_first:
            return self.project_out(run_norm_first(self.layers, self._norms, x, inputs))
        return self.project_out(self._run_norm_last(x, inputs))

    def _run_norm_last(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        for layer, kv_cache, attention in zip(self.layers, inputs.kv_caches, inputs.attention, strict=True):
            assert isinstance(layer, OPTLayer)
            x, _ = layer.attention_norm.add(layer.attend(x, kv_cache, attention), x)
            x, _ = layer.mlp_norm.add(layer.feed_forward(x), x)
        return x


def _norm(name: str, config: OPTConfig, placement: Placement) -> LayerNorm:
    return LayerNorm(name, config.hidden_size, _LAYER_NORM_EPS, placement=placement, affine=config.affine_norms)


def _projection(name: str, in_features: int, out_features: int, placement: Placement) -> nn.Module:
    """Between embedding and hidden size; the identity if they are equal."""
    if in_features == out_features:
        return nn.Identity()
    return Linear([LinearPart(name, out_features)], in_features, bias=False, placement=placement)
