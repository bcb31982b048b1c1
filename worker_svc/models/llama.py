"""LLaMA and the families that differ from it by little: Mistral, Qwen2, Qwen3 and Phi-3.

All are pre-norm decoders with rotary embeddings, grouped-query attention and a gated MLP.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import nn

from kernels import ops
from worker_svc.layers.attention import AttentionMetadata, PagedAttention
from worker_svc.layers.embedding_norm import Embedding, RmsNorm
from worker_svc.layers.experts import GATE_UP_DOWN, Experts, ExpertsConfig, GatedMlp
from worker_svc.layers.linear import Linear, LinearPart, Split
from worker_svc.models.base import ConfigFields, ModelInput, NativeCausalLM, RotationByLength, head_dim_of, make_head
from worker_svc.models.rope import RopeConfig
from worker_svc.parallel.ranks import heads_of_rank
from worker_svc.weights import Placement

# Defaults of transformers for fields that config.json lacks and that differ from LLaMA's.
_MISTRAL_DEFAULTS = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}
_QWEN_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}
_PHI_3_DEFAULTS = {
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "original_max_position_embeddings": 4096,
}
_MERGED_MLP = ("gate_up_proj", "gate_up_proj", "down_proj")
_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """The fields of config.json, with the defaults of transformers' LLaMA."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    activation: str
    rms_norm_eps: float
    qkv_bias: bool
    attention_output_bias: bool
    mlp_bias: bool
    tied: bool
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    """The window of each layer; None for the whole context."""
    max_model_len: int
    experts: ExpertsConfig | None = None
    norm_offset: float = 0.0
    """Number that norms add to their weights."""
    attention_scale: float | None = None
    """Factor on the scores; None for the default of the head size."""
    soft_cap: float | None = None
    """Cap of the scores, as in `ops.paged_attention`."""
    logit_cap: float | None = None
    """Logits are `cap * tanh(logit / cap)`."""
    merged: bool = False
    """Whether the checkpoint has query, key and value in one layer, and gate and up in another."""
    sliding_rope: RopeConfig | None = None
    """The rotation of layers with a window, if it differs."""

    def rotation_for(self, max_positions: int | None) -> RotationByLength | None:
        """The rotation of a server whose sequences have this length, see `served_len`."""
        length = self.served_len(max_positions)
        found = [each for rope in self._ropes if (each := rope.rotation_for(length, self.max_model_len)) is not None]
        if not found:
            return None
        return replace(min(found, key=lambda each: each.original), name=", ".join(each.name for each in found))

    def served_len(self, max_positions: int | None) -> int:
        """The length of the longest sequence: as it is asked for, else up to where a rotation would change."""
        if max_positions is not None:
            return min(max_positions, self.max_model_len)
        return min([self.max_model_len, *(rope.changes_beyond for rope in self._ropes if rope.changes_beyond)])

    @property
    def _ropes(self) -> tuple[RopeConfig, ...]:
        return (self.rope,) if self.sliding_rope is None else (self.rope, self.sliding_rope)

    @classmethod
    def read(cls, values: Mapping[str, Any], *, rotates_partly: bool = False) -> "LlamaConfig":
        fields = ConfigFields(values)
        hidden_size = fields.integer("hidden_size", 4096)
        num_heads = fields.integer("num_attention_heads", 32)
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise fields.error("num_key_value_heads", num_kv_heads, f"a divisor of num_attention_heads, {num_heads}")
        given = values.get("head_dim")
        head_dim = head_dim_of(hidden_size, num_heads) if given is None else fields.integer("head_dim")
        if head_dim % 2:
            raise fields.error("head_dim", head_dim, "an even number: rotary embeddings rotate pairs")
        attention_bias = fields.flag("attention_bias", False)
        num_layers = fields.integer("num_hidden_layers", 32)
        rope = RopeConfig.read(fields, head_dim, may_be_partial=rotates_partly)
        return cls(
            vocab_size=fields.integer("vocab_size", 32000),
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size", 11008),
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            activation=fields.text("hidden_act", "silu"),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
            qkv_bias=attention_bias,
            attention_output_bias=attention_bias,
            mlp_bias=fields.flag("mlp_bias", False),
            tied=fields.flag("tie_word_embeddings", False),
            rope=rope,
            sliding_windows=(None,) * num_layers,
            max_model_len=rope.max_model_len,
        )


class LlamaLayer(nn.Module):
    """One decoder layer, number `index`."""

    mlp_norm_name: ClassVar[str] = "post_attention_layernorm"

    def __init__(self, index: int, config: LlamaConfig, placement: Placement) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        hidden = config.hidden_size
        num_heads, num_kv_heads = heads_of_rank(placement.ranks, config.num_heads, config.num_kv_heads)
        self.input_norm = self._norm(index, "input_layernorm", config, placement)
        self.qkv = Linear(
            self._parts_of_heads(f"{name}.self_attn", config, placement),
            hidden,
            bias=config.qkv_bias,
            placement=placement,
            split=Split.OUTPUTS,
        )
        self.attention = PagedAttention(
            num_heads,
            num_kv_heads,
            config.head_dim,
            config.head_dim**-0.5 if config.attention_scale is None else config.attention_scale,
            sliding_window=config.sliding_windows[index],
            soft_cap=config.soft_cap,
        )
        self.attention_output = Linear(
            [LinearPart(f"{name}.self_attn.o_proj", hidden)],
            config.num_heads * config.head_dim,
            bias=config.attention_output_bias,
            placement=placement,
            split=Split.INPUTS,
        )
        self.mlp_norm = self._norm(index, self.mlp_norm_name, config, placement)
        self.mlp = self._make_mlp(index, name, config, placement)

    @staticmethod
    def _norm(index: int, module: str, config: LlamaConfig, placement: Placement, dim: int | None = None) -> RmsNorm:
        """A norm of the layer over the hidden size, or over `dim`."""
        name, dim = f"model.layers.{index}.{module}", dim or config.hidden_size
        return RmsNorm(name, dim, config.rms_norm_eps, placement=placement, offset=config.norm_offset)

    @staticmethod
    def _parts_of_heads(name: str, config: LlamaConfig, placement: Placement) -> list[LinearPart]:
        """Query, key and value."""
        query, key = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        kv_shards = min(placement.ranks.size, config.num_kv_heads)
        is_partial = config.rope.rotated_dim < config.head_dim
        rotated = (config.head_dim, config.rope.rotated_dim) if is_partial else None
        parts = [
            LinearPart(f"{name}.q_proj", query, rotated=rotated),
            LinearPart(f"{name}.k_proj", key, num_shards=kv_shards, rotated=rotated),
            LinearPart(f"{name}.v_proj", key, num_shards=kv_shards),
        ]
        if not config.merged:
            return parts
        firsts = (0, query, query + key)
        return [
            replace(part, name=f"{name}.qkv_proj", first=first, of=query + 2 * key, apart=part.name)
            for part, first in zip(parts, firsts, strict=True)
        ]

    def _make_mlp(self, index: int, name: str, config: LlamaConfig, placement: Placement) -> nn.Module:
        """[T, hidden] -> [T, hidden]; `name` is the name of the layer."""
        experts = config.experts
        if experts is None or index in experts.dense_layers:
            return GatedMlp(
                f"{name}.mlp",
                config.hidden_size,
                config.intermediate_size,
                config.activation,
                placement=placement,
                bias=config.mlp_bias,
                names=_MERGED_MLP if config.merged else GATE_UP_DOWN,
            )
        return Experts(name, experts, config.hidden_size, config.activation, placement)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, hidden] -> query [T, Hq, D], key and value [T, Hkv, D], before rotation."""
        return self.attention.split(self.qkv(x))

    def attend(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_table: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        query, key, value = self.project(x)
        query = ops.rotary_and_cache(query, key, value, positions, cos_sin_table, kv_cache, metadata.slot_mapping)
        return self.attention_output(self.attention.attend(query, kv_cache, metadata))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


class LlamaForCausalLM(NativeCausalLM):
    """LLaMA, from the checkpoints of transformers' class of the same name, as all families below."""

    architecture = "LlamaForCausalLM"
    base_prefix = "model."
    layer_class: ClassVar[type[LlamaLayer]] = LlamaLayer

    def __init__(self, config: LlamaConfig, placement: Placement) -> None:
        super().__init__(
            placement,
            num_layers=config.num_layers,
            num_kv_heads=heads_of_rank(placement.ranks, config.num_heads, config.num_kv_heads)[1],
            head_dim=config.head_dim,
            vocab_size=config.vocab_size,
            max_model_len=config.max_model_len if placement.max_positions else config.served_len(None),
        )
        self.rotation = config.rotation_for(placement.max_positions)
        hidden = config.hidden_size
        self.embedding = Embedding("model.embed_tokens", config.vocab_size, hidden, placement=placement, split=True)
        num_positions = config.served_len(placement.max_positions)
        table = config.rope.cos_sin_table(placement.device, num_positions)
        other = config.sliding_rope
        sliding = table if other is None else other.cos_sin_table(placement.device, num_positions)
        self._cos_sin_tables = [table if window is None else sliding for window in config.sliding_windows]
        layers = [self.layer_class(index, config, placement) for index in range(config.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = RmsNorm("model.norm", hidden, config.rms_norm_eps, placement=placement, offset=config.norm_offset)
        self._norms = [*(layer.input_norm for layer in layers), self.norm]
        self.head = make_head(self.embedding, hidden, config.vocab_size, tied=config.tied, placement=placement)

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        """Raises ConfigurationError for a field of another type or out of range."""
        return LlamaConfig.read(values)

    @classmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "LlamaForCausalLM":
        return cls(cls.read_config(config), placement)

    def embed(self, inputs: ModelInput) -> torch.Tensor:
        return self.embedding(inputs.token_ids)

    def run_layers(self, x: torch.Tensor, inputs: ModelInput) -> torch.Tensor:
        x, residual = self._norms[0](x), x
        # The norm that follows a layer, the next layer's or the final one, adds the layer's output to the residual.
        for layer, next_norm, table, kv_cache in zip(
            self.layers, self._norms[1:], self._cos_sin_tables, inputs.kv_caches, strict=True
        ):
            assert isinstance(layer, LlamaLayer)
            output = layer.attend(x, inputs.positions, table, kv_cache, inputs.attention)
            x, residual = layer.mlp_norm.add(output, residual)
            x, residual = next_norm.add(layer.feed_forward(x), residual)
        return x


class MistralForCausalLM(LlamaForCausalLM):
    """LLaMA whose layers may see a sliding window: all layers, or the sliding ones of `layer_types` (Ministral)."""

    architecture = "MistralForCausalLM"

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_MISTRAL_DEFAULTS, **values, "attention_bias": False, "mlp_bias": False}
        llama, fields = LlamaConfig.read(values), ConfigFields(values)
        windows = windows_of_layers(fields, llama.num_layers, window_of(fields), lambda _: True)
        return replace(llama, sliding_windows=windows)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """LLaMA with biases on query, key and value. The upper layers may see a sliding window."""

    architecture = "Qwen2ForCausalLM"

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_QWEN_DEFAULTS, **values, "attention_bias": False, "mlp_bias": False}
        llama = LlamaConfig.read(values)
        windows = _mixed_windows(ConfigFields(values), llama.num_layers)
        return replace(llama, qkv_bias=True, sliding_windows=windows)


class Qwen3Layer(LlamaLayer):
    """A layer that normalises each head of query and key."""

    def __init__(self, index: int, config: LlamaConfig, placement: Placement) -> None:
        super().__init__(index, config, placement)
        self.query_norm = self._norm(index, "self_attn.q_norm", config, placement, config.head_dim)
        self.key_norm = self._norm(index, "self_attn.k_norm", config, placement, config.head_dim)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = super().project(x)
        return self.query_norm(query), self.key_norm(key), value


class Qwen3ForCausalLM(LlamaForCausalLM):
    """LLaMA with `Qwen3Layer`s. The upper layers may see a sliding window."""

    architecture = "Qwen3ForCausalLM"
    layer_class = Qwen3Layer

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_QWEN_DEFAULTS, "head_dim": 128, **values, "mlp_bias": False}
        llama = LlamaConfig.read(values)
        return replace(llama, sliding_windows=_mixed_windows(ConfigFields(values), llama.num_layers))


class Phi3ForCausalLM(LlamaForCausalLM):
    """LLaMA with merged weights, whose rotation may turn a part of each head. Layers may see a sliding window."""

    architecture = "Phi3ForCausalLM"

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_PHI_3_DEFAULTS, **values, "attention_bias": False, "mlp_bias": False}
        llama = LlamaConfig.read(values, rotates_partly=True)
        if (kind := llama.rope.rope_type) not in ("default", "longrope"):
            raise llama.rope.fields.error("rope_type", kind, "default or longrope")
        return replace(llama, merged=True, sliding_windows=(window_of(ConfigFields(values)),) * llama.num_layers)


def _mixed_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """`sliding_window` in the sliding layers of `layer_types`; without `layer_types`, from `max_window_layers` on."""
    window = window_of(fields) if fields.flag("use_sliding_window", False) else None
    first = fields.integer("max_window_layers", 28, minimum=0)
    return windows_of_layers(fields, num_layers, window, lambda index: index >= first)


def windows_of_layers(
    fields: ConfigFields, num_layers: int, window: int | None, is_sliding: Callable[[int], bool]
) -> tuple[int | None, ...]:
    """`window` in the sliding layers of `layer_types`; without `layer_types`, in layers that satisfy `is_sliding`.

    Raises:
        ConfigurationError: an unknown type of layer, or a sliding layer without a window.
    """
    types = fields.values.get("layer_types")
    if types is None:
        return tuple(window if is_sliding(index) else None for index in range(num_layers))
    if not isinstance(types, list) or len(types) != num_layers or not all(each in (_FULL, _SLIDING) for each in types):
        raise fields.error("layer_types", types, f"{num_layers} of {_FULL} and {_SLIDING}")
    if window is None and _SLIDING in types:
        raise fields.error("layer_types", types, f"only {_FULL} if no sliding window is used")
    return tuple(window if each == _SLIDING else None for each in types)


def window_of(fields: ConfigFields) -> int | None:
    """The field `sliding_window`."""
    return None if fields.values.get("sliding_window") is None else fields.integer("sliding_window")
