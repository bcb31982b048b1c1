"""The families of encoders, a row of a table each: what their layers have, and what their checkpoints call it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from worker_svc.layers.activations import ActivationKind
from worker_svc.models.base import ConfigFields, head_dim_of
from worker_svc.models.family_parts import rope_sections
from worker_svc.models.rope import RopeConfig

_FULL, _SLIDING = "full_attention", "sliding_attention"
_NTK = "ntk"
_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True)
class Names:
    """Modules of a checkpoint; None, or none of them, if the family has no such module.

    Attributes:
        norm: of the embeddings; if it begins with a dot, it is a module of the first layer, and the sum before it
            stays the residual.
        layer: of a layer, with {} for its number; the modules of a layer begin with a dot.
        qkv: one module for each, or one that has all.
        attention_norm, mlp_norm: of the sum after attention, and after the MLP. Where layers begin with norms, the
            latter is in the next layer, or `last_norm`.
        up: gates first, or one module that has gates, then ups.
        ups_first: the one module has ups, then gates.
    """

    words: str
    norm: str
    layer: str
    qkv: tuple[str, ...]
    attention_output: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    mlp_norm: str
    last_norm: str | None = None
    ups_first: bool = False
    positions: str | None = None
    types: str | None = None
    distances: str | None = None
    head_norms: tuple[str, ...] = ()
    output_norms: tuple[str, ...] = ()
    """Norms of the outputs of attention and MLP, before they are added."""


@dataclass(frozen=True, slots=True)
class Family:
    """A row of the table.

    Attributes:
        defaults: of config.json; names of other families are replaced by the names of BERT and Llama before
            (`encoder_fields`).
        only: fields that have one supported value.
        gated: activations multiply a gate with an up.
        begins_with_norms: the residual is the sum; otherwise it is the norm of the sum.
        rotates: positions turn queries and keys; otherwise they have vectors.
        has_root_norms: norms by the root mean square, with factors minus 1, and words times the root of the size.
        full_layer: the layer of each `sliding_window_pattern` layers that has no window.
        first_position: the row of the first token's position; None: behind that of the padding token, as in fairseq.
    """

    names: Names
    defaults: Mapping[str, Any]
    only: Mapping[str, Any] = field(default_factory=dict[str, Any])
    gated: bool = False
    begins_with_norms: bool = False
    rotates: bool = False
    has_root_norms: bool = False
    full_layer: int = -1
    first_position: int | None = 0


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """The tokens of a layer attend to keys at most `window` away, or to all; `rope` is how positions turn them."""

    window: int | None = None
    rope: RopeConfig | None = None


@dataclass(frozen=True, slots=True)
class EncoderConfig:
    """A family with the sizes of config.json.

    Attributes:
        max_tokens: of a text.
        num_positions: rows of the table of positions.
        first_position: the row of the first token.
        num_buckets: of distances that have a bias; 0 without.
        mlp_bias: of ups and gates; `down_bias` of the rest.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    inner_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[AttentionKind, ...]
    max_tokens: int
    num_positions: int
    first_position: int
    num_types: int
    num_buckets: int
    scale: float
    activation: ActivationKind
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    down_bias: bool

    @classmethod
    def read(cls, values: Mapping[str, Any], model_type: str) -> "EncoderConfig":
        """From `encoder_fields`. Raises ConfigurationError for a field of another type, out of range, or with a value
        that is not supported."""
        family = FAMILIES[model_type]
        given = {name: value for name, value in values.items() if value is not None}
        fields = ConfigFields({**family.defaults, **given})
        for name, only in family.only.items():
            if (found := fields.values.get(name, only)) != only:
                raise fields.error(name, found, f"{json.dumps(only)}, the only supported value")
        names, hidden, heads = family.names, fields.integer("hidden_size"), fields.integer("num_attention_heads")
        head_dim = fields.integer("head_dim", 0, minimum=0) or head_dim_of(hidden, heads)
        kv_heads = fields.integer("num_key_value_heads", heads)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", kv_heads, f"a divisor of {heads}, the number of heads")
        first = family.first_position
        first = fields.integer("pad_token_id", 1, minimum=0) + 1 if first is None else first
        num_positions = fields.integer("max_position_embeddings")
        if num_positions <= first:
            raise fields.error("max_position_embeddings", num_positions, f"at least {first + 1}")
        return cls(
            family=family,
            vocab_size=fields.integer("vocab_size"),
            hidden_size=hidden,
            inner_size=fields.integer("intermediate_size"),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            layers=_layers(fields, family, head_dim),
            max_tokens=num_positions - first,
            num_positions=0 if family.rotates else num_positions,
            first_position=first,
            num_types=fields.integer("type_vocab_size", minimum=0) if names.types else 0,
            num_buckets=fields.integer("relative_attention_num_buckets") if names.distances else 0,
            scale=fields.number("query_pre_attn_scalar", head_dim) ** -0.5,
            activation=ActivationKind(fields.text("hidden_act", "gelu"), gated=family.gated),
            norm_eps=fields.number("layer_norm_eps", 1e-12),
            norm_bias=fields.flag("norm_bias", True),
            attention_bias=fields.flag("attention_bias", True),
            mlp_bias=fields.flag("mlp_bias", True),
            down_bias=fields.flag("mlp_down_bias", fields.flag("mlp_bias", True)),
        )


def _layers(fields: ConfigFields, family: Family, head_dim: int) -> tuple[AttentionKind, ...]:
    count = fields.integer("num_hidden_layers")
    if not family.rotates:
        return (AttentionKind(),) * count
    if "sliding_window" not in fields.values:
        return (AttentionKind(None, _rope(_without_ntk(fields, head_dim), head_dim)),) * count
    # Both sides together, in all families that have windows.
    window = fields.integer("sliding_window") // 2
    sections = rope_sections(fields, fields.number("rope_theta"), "rope_local_base_freq", 1e4)
    full, sliding = (_rope(ConfigFields(each), head_dim) for each in sections)
    types, period = fields.values.get("layer_types"), fields.integer("sliding_window_pattern", 6)
    if types is None:
        types = [_FULL if (index - family.full_layer) % period == 0 else _SLIDING for index in range(count)]
    if not isinstance(types, list) or len(types) != count or any(each not in (_FULL, _SLIDING) for each in types):
        raise fields.error("layer_types", types, f"{count} of {_FULL} and {_SLIDING}")
    return tuple(AttentionKind(window, sliding) if each == _SLIDING else AttentionKind(None, full) for each in types)


def _rope(fields: ConfigFields, head_dim: int) -> RopeConfig:
    rope = RopeConfig.read(fields, head_dim)
    if rope.rope_type in _BY_LENGTH:
        raise rope.fields.error("rope_type", rope.rope_type, "one whose angles do not depend on the length of a text")
    return rope


def _without_ntk(fields: ConfigFields, head_dim: int) -> ConfigFields:
    """The same with the linear scaling that the fixed NTK scaling of GTE's own code amounts to."""
    rope = fields.values.get("rope_scaling")
    if not isinstance(rope, dict) or rope.get("type", rope.get("rope_type")) != _NTK:
        return fields
    factor = ConfigFields(rope, f"{fields.section}: rope_scaling").number("factor")
    linear = {"rope_type": "linear", "factor": factor ** (2 / head_dim)}
    return ConfigFields({**fields.values, "rope_theta": fields.number("rope_theta") * factor, "rope_scaling": linear})


_BERT = Names(
    words="embeddings.word_embeddings",
    positions="embeddings.position_embeddings",
    types="embeddings.token_type_embeddings",
    norm="embeddings.LayerNorm",
    layer="encoder.layer.{}",
    qkv=(".attention.self.query", ".attention.self.key", ".attention.self.value"),
    attention_output=".attention.output.dense",
    attention_norm=".attention.output.LayerNorm",
    up=(".intermediate.dense",),
    down=".output.dense",
    mlp_norm=".output.LayerNorm",
)
_MPNET = replace(
    _BERT,
    types=None,
    qkv=(".attention.attn.q", ".attention.attn.k", ".attention.attn.v"),
    attention_output=".attention.attn.o",
    attention_norm=".attention.LayerNorm",
    distances="encoder.relative_attention_bias",
)
_DISTILBERT = replace(
    _BERT,
    types=None,
    layer="transformer.layer.{}",
    qkv=(".attention.q_lin", ".attention.k_lin", ".attention.v_lin"),
    attention_output=".attention.out_lin",
    attention_norm=".sa_layer_norm",
    up=(".ffn.lin1",),
    down=".ffn.lin2",
    mlp_norm=".output_layer_norm",
)
_NOMIC = replace(
    _BERT,
    positions=None,
    norm="emb_ln",
    layer="encoder.layers.{}",
    qkv=(".attn.Wqkv",),
    attention_output=".attn.out_proj",
    attention_norm=".norm1",
    up=(".mlp.fc12", ".mlp.fc11"),
    down=".mlp.fc2",
    mlp_norm=".norm2",
)
_GTE = replace(
    _BERT,
    positions=None,
    qkv=(".attention.qkv_proj",),
    attention_output=".attention.o_proj",
    attention_norm=".attn_ln",
    up=(".mlp.up_gate_proj",),
    ups_first=True,
    down=".mlp.down_proj",
    mlp_norm=".mlp_ln",
)
_MODERNBERT = Names(
    words="embeddings.tok_embeddings",
    norm="embeddings.norm",
    layer="layers.{}",
    qkv=(".attn.Wqkv",),
    attention_output=".attn.Wo",
    attention_norm=".mlp_norm",
    up=(".mlp.Wi",),
    down=".mlp.Wo",
    mlp_norm=".attn_norm",
    last_norm="final_norm",
)
_GEMMA = Names(
    words="embed_tokens",
    norm=".input_layernorm",
    layer="layers.{}",
    qkv=(".self_attn.q_proj", ".self_attn.k_proj", ".self_attn.v_proj"),
    attention_output=".self_attn.o_proj",
    attention_norm=".pre_feedforward_layernorm",
    up=(".mlp.gate_proj", ".mlp.up_proj"),
    down=".mlp.down_proj",
    mlp_norm=".input_layernorm",
    last_norm="norm",
    head_norms=(".self_attn.q_norm", ".self_attn.k_norm"),
    output_norms=(".post_attention_layernorm", ".post_feedforward_layernorm"),
)
_NO_BIASES = {"attention_bias": False, "mlp_bias": False}
_ABSOLUTE = {"position_embedding_type": "absolute", "is_decoder": False}
_ROBERTA_FAMILY = Family(_BERT, {}, _ABSOLUTE, first_position=None)
_GTE_FAMILY = Family(
    _GTE,
    {"rope_theta": 1e4, "mlp_bias": False, "mlp_down_bias": True},
    {"position_embedding_type": "rope", "layer_norm_type": "layer_norm", "logn_attention_scale": False},
    gated=True,
    rotates=True,
)
FAMILIES: Mapping[str, Family] = {
    "bert": Family(_BERT, {}, _ABSOLUTE),
    **dict.fromkeys(("roberta", "xlm-roberta", "camembert"), _ROBERTA_FAMILY),
    # transformers has positions behind 1 and 32 buckets, whatever config.json says.
    "mpnet": Family(_MPNET, {}, {"relative_attention_num_buckets": 32}, first_position=2),
    "distilbert": Family(_DISTILBERT, {}),
    "nomic_bert": Family(
        _NOMIC,
        {"rope_theta": 1e3, "hidden_act": "silu", **_NO_BIASES},
        {
            **dict.fromkeys(("prenorm", "parallel_block", "use_rms_norm", "causal", "rotary_emb_interleaved"), False),
            **dict.fromkeys(("rotary_emb_scale_base", "rotary_scaling_factor"), None),
            "rotary_emb_fraction": 1.0,
            "moe_every_n_layers": 0,
        },
        gated=True,
        rotates=True,
    ),
    **dict.fromkeys(("gte", "new"), _GTE_FAMILY),
    "modernbert": Family(
        _MODERNBERT,
        {
            "rope_theta": 160_000.0,
            "sliding_window": 128,
            "sliding_window_pattern": 3,
            "layer_norm_eps": 1e-5,
            "norm_bias": False,
            **_NO_BIASES,
        },
        gated=True,
        begins_with_norms=True,
        rotates=True,
        full_layer=0,
    ),
    "gemma3_text": Family(
        _GEMMA,
        {
            "head_dim": 256,
            "hidden_act": "gelu_pytorch_tanh",
            "layer_norm_eps": 1e-6,
            "query_pre_attn_scalar": 256,
            "rope_theta": 1e6,
            "sliding_window": 4096,
            "use_bidirectional_attention": False,
            **_NO_BIASES,
        },
        {"use_bidirectional_attention": True, "attn_logit_softcapping": None},
        gated=True,
        begins_with_norms=True,
        rotates=True,
        has_root_norms=True,
    ),
}
"""By model_type of config.json."""
