"""The table of the families whose layers keep a state of fixed size instead of keys, with rows as in `families`."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from worker_svc.layers.delta_rule import DeltaInputs, DeltaRuleConfig
from worker_svc.layers.experts import ExpertsConfig, Scoring
from worker_svc.layers.kimi_delta import KimiDeltaConfig
from worker_svc.layers.mamba import MambaConfig, MambaNorms
from worker_svc.layers.mamba2 import Mamba2Config
from worker_svc.layers.shared_blocks import SharedBlocksConfig
from worker_svc.layers.short_convolution import ShortConvolutionConfig
from worker_svc.models.base import ConfigFields, head_dim_of
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.families import GRANITE, OLMO_2
from worker_svc.models.families_with_experts import GRANITE_EXPERTS
from worker_svc.models.families_with_latents import WITH_LATENTS
from worker_svc.models.family_parts import (
    HEAD_NORMS,
    MOE_WIDTH,
    NO_BIASES,
    NO_MLP_BIAS,
    WITHOUT_GATE,
    Families,
    Values,
    deepseek_experts,
    dense_layers_by_types,
    experts,
    flag,
    integer,
    mixtral_experts,
    number,
    qwen_experts,
    state_activation,
    two_rotations,
    windows,
    without_window,
)
from worker_svc.models.rope import rope_section

WITH_STATES = Families()
_STATES = ("linear_attention", "conv", "mamba")
_ATTENTION = ("full_attention", "attention")

_BACKBONE = {
    "backbone.embeddings.": "model.embed_tokens.",
    "backbone.norm_f.": "model.norm.",
    "backbone.": "model.",
}

IsState = Callable[[ConfigFields, DecoderConfig, int], bool]


def state_layers(is_state: IsState | None = None, attending: Sequence[str] = _ATTENTION) -> Any:
    """A reader of the layers that keep a state: by `layer_types`, with the names of transformers 4 and 5 and the types
    of layers that attend; without it, the layers that satisfy `is_state`.

    The reader raises ConfigurationError for an unknown type of layer, or if no layer attends.
    """

    def read(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
        types, count = fields.values.get("layer_types") or fields.values.get("layers_block_type"), config.num_layers
        if types is None and is_state is not None:
            found = frozenset(index for index in range(count) if is_state(fields, config, index))
        elif isinstance(types, list) and len(types) == count and all(each in (*_STATES, *attending) for each in types):
            found = frozenset(index for index, each in enumerate(types) if each in _STATES)
        else:
            raise fields.error("layer_types", types, f"{count} of {', '.join((*_STATES, *attending))}")
        if len(found) == count:
            raise fields.error("layer_types", types, f"at least one layer of {attending[0]}")
        return found

    return read


def _by_interval(fields: ConfigFields, _: DecoderConfig, index: int) -> bool:
    return (index + 1) % fields.integer("full_attention_interval", 4) > 0


def delta_rule(inputs: DeltaInputs) -> Any:
    """A reader of the sizes of delta rules by Qwen's names. It raises ConfigurationError for heads that do not fit."""

    def read(fields: ConfigFields, config: DecoderConfig) -> DeltaRuleConfig:
        num_keys, num_values = (
            fields.integer("linear_num_key_heads", 16),
            fields.integer("linear_num_value_heads", 32),
        )
        if num_values % num_keys:
            raise fields.error("linear_num_value_heads", num_values, f"a multiple of the {num_keys} heads of key")
        sizes = fields.integer("linear_key_head_dim", 128), fields.integer("linear_value_head_dim", 128)
        if sizes[0] % 16 or sizes[1] % 16:
            raise fields.error("linear_key_head_dim", sizes[0], "a multiple of 16, as linear_value_head_dim")
        return DeltaRuleConfig(
            num_keys,
            num_values,
            *sizes,
            num_taps=fields.integer("linear_conv_kernel_dim", 4, minimum=2),
            activation=state_activation()(fields, config),
            norm_eps=config.norm_eps,
            inputs=inputs,
        )

    return read


_PARTLY: Values = {"partial_rotary_factor": 0.25}

# Layers with delta rules; every few layers attend, with gates on the results. Norms add 1 to their weights, except for
# the norms of delta rules.
_QWEN_3_5 = WITH_STATES.add(
    "Qwen3_5ForCausalLM",
    _PARTLY,
    fixed=NO_MLP_BIAS,
    rotates_partly=True,
    norm_offset=1.0,
    head_norms=HEAD_NORMS,
    gates_attention=True,
    state=delta_rule(DeltaInputs.MERGED),
    state_layers=state_layers(_by_interval),
)


def _qwen_next_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig | None:
    shared = integer("shared_expert_intermediate_size")
    return qwen_experts(shared_inner_size=shared, shared_gate="shared_expert_gate")(fields, config)


# The same with experts.
WITH_STATES.add(
    "Qwen3_5MoeForCausalLM",
    {"num_experts": 256, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
    like=_QWEN_3_5,
    experts=_qwen_next_experts,
)
WITH_STATES.add(
    "Qwen3NextForCausalLM",
    {"num_experts": 512, "shared_expert_intermediate_size": 512, "norm_topk_prob": True},
    like=_QWEN_3_5,
    state=delta_rule(DeltaInputs.BY_KEY),
    experts=_qwen_next_experts,
)


# Delta rules of Qwen3.5, whose inputs are in one layer, and experts without a gate on the shared one. Layers with a
# window rotate, the others that attend do not.
_LARA_KINDS = ("linear_attention", "sliding_attention", "linear_attention", "full_attention", "sliding_attention")
WITH_STATES.add(
    "LaraMiniForCausalLM",
    {
        "num_experts": 128,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "linear_num_key_heads": 8,
        "linear_num_value_heads": 16,
    },
    fixed=NO_MLP_BIAS,
    renamed={".linear_attn.out_norm.": ".linear_attn.norm."},
    head_norms=HEAD_NORMS,
    sliding_windows=windows(lambda index: _LARA_KINDS[index % 5] == "sliding_attention", others=_STATES[:1]),
    unrotated_layers=without_window,
    state=delta_rule(DeltaInputs.TOGETHER),
    state_layers=state_layers(
        lambda fields, config, index: _LARA_KINDS[index % 5] in _STATES, ("full_attention", "sliding_attention")
    ),
    experts=lambda fields, config: qwen_experts(shared_inner_size=integer("shared_expert_intermediate_size"))(
        fields, config
    ),
)


def _olmo_rule(fields: ConfigFields, config: DecoderConfig) -> DeltaRuleConfig:
    num_keys = fields.integer("linear_num_key_heads", config.num_heads)
    key_dim = fields.integer("linear_key_head_dim", int(0.75 * config.hidden_size / num_keys))
    given = {
        "linear_num_key_heads": num_keys,
        "linear_num_value_heads": fields.integer("linear_num_value_heads", config.num_heads),
        "linear_key_head_dim": key_dim,
        "linear_value_head_dim": fields.integer("linear_value_head_dim", 2 * key_dim),
    }
    rule = delta_rule(DeltaInputs.APART)(ConfigFields({**fields.values, **given}), config)
    return replace(rule, norm_eps=1e-5, beta_scale=2.0 if fields.flag("linear_allow_neg_eigval", True) else 1.0)


def _olmo_unrotated(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
    """All layers, if the rotation has a base that is null."""
    section = fields.values.get("rope_parameters")
    is_rotated = not isinstance(section, dict) or section.get("rope_theta", 0) is not None
    return frozenset() if is_rotated else frozenset(range(config.num_layers))


# Layers with delta rules and norms before; layers of attention as OLMo 2 has them, with norms after.
WITH_STATES.add(
    "OlmoHybridForCausalLM",
    like=OLMO_2,
    renamed={
        ".attention_layer_norm.": ".input_layernorm.",
        ".feedforward_layer_norm.": ".post_attention_layernorm.",
        ".q_conv1d.": ".conv1d.",
        ".k_conv1d.": ".conv1d.",
        ".v_conv1d.": ".conv1d.",
    },
    unrotated_layers=_olmo_unrotated,
    state=_olmo_rule,
    state_layers=state_layers(_by_interval),
    state_norms=("input_layernorm", "post_attention_layernorm"),
)


def _linear_fields(fields: ConfigFields) -> ConfigFields:
    """The section about linear attention of published configurations."""
    section = fields.values.get("linear_attn_config") or {}
    if not isinstance(section, dict):
        raise fields.error("linear_attn_config", section, "a section")
    return ConfigFields(section, "linear_attn_config in config.json")


def _kimi_delta(fields: ConfigFields, config: DecoderConfig) -> KimiDeltaConfig:
    section = _linear_fields(fields)
    head_dim = section.integer("head_dim", fields.integer("linear_head_dim", 128))
    if head_dim % 16:
        raise fields.error("linear_head_dim", head_dim, "a multiple of 16")
    return KimiDeltaConfig(
        num_heads=section.integer("num_heads", fields.integer("linear_num_heads", 32)),
        head_dim=head_dim,
        num_taps=section.integer("short_conv_kernel_size", fields.integer("linear_conv_kernel_dim", 4, minimum=2)),
        activation=state_activation()(fields, config),
        norm_eps=config.norm_eps,
    )


def _is_kimi_delta(fields: ConfigFields, _: DecoderConfig, index: int) -> bool:
    """The section counts layers from 1."""
    section = _linear_fields(fields)
    attending = section.values.get("full_attn_layers")
    if attending is None:
        return index == 0 or index % 4 > 0
    if not isinstance(attending, list):
        raise section.error("full_attn_layers", attending, "a list of layers")
    return index + 1 not in attending


# Layers with delta rules, some with latent attention without rotation, and experts as DeepSeek V3 has them.
WITH_STATES.add(
    "KimiLinearForCausalLM",
    {
        "q_lora_rank": None,
        "rope_interleave": False,
        "num_experts": 256,
        "num_experts_per_token": 8,
        "routed_scaling_factor": 2.446,
        "first_k_dense_replace": 1,
    },
    like=WITH_LATENTS["YoutuForCausalLM"],
    fixed={
        "max_position_embeddings": lambda fields: fields.integer(
            "model_max_length", fields.integer("max_position_embeddings")
        ),
        "layer_types": None,
    },
    renamed={
        ".block_sparse_moe.": ".mlp.",
        ".q_conv1d.": ".conv1d.",
        ".k_conv1d.": ".conv1d.",
        ".v_conv1d.": ".conv1d.",
    },
    unrotated_layers=lambda _, config: frozenset(range(config.num_layers)),
    experts=deepseek_experts(
        "num_experts",
        "num_shared_experts",
        chosen="num_experts_per_token",
        names=("w1", "w3", "w2"),
        normalized=flag("moe_renormalize", True),
        num_groups=integer("num_expert_group", 1),
        dense_layers=dense_layers_by_types,
    ),
    state=_kimi_delta,
    state_layers=state_layers(_is_kimi_delta),
)


def _short_convolution(fields: ConfigFields, config: DecoderConfig) -> ShortConvolutionConfig:
    taps = fields.integer("conv_L_cache", 3, minimum=2)
    return ShortConvolutionConfig(config.hidden_size, taps, fields.flag("conv_bias", False))


def _no_attention(fields: ConfigFields, config: DecoderConfig, index: int) -> bool:
    attending = fields.values.get("full_attn_idxs")
    if attending is None:
        attending = range(config.num_layers)
    elif not isinstance(attending, list):
        raise fields.error("full_attn_idxs", attending, "a list of layers")
    return index not in attending


def _lfm_inner_size(fields: ConfigFields, config: DecoderConfig) -> int:
    """Two thirds of the field, times another one, in whole multiples of a third one."""
    given = fields.integer("block_ff_dim", config.intermediate_size)
    if not fields.flag("block_auto_adjust_ff_dim", True):
        return given
    given = 2 * given // 3
    if fields.values.get("block_ffn_dim_multiplier", 1.0) is None:
        return given
    given, multiple = (
        int(fields.number("block_ffn_dim_multiplier", 1.0) * given),
        fields.integer("block_multiple_of", 256),
    )
    return -(-given // multiple) * multiple


def _is_tied(fields: ConfigFields) -> bool:
    """By the older name of the field too."""
    return fields.flag("tie_embedding", fields.flag("tie_word_embeddings", True))


# Layers with short convolutions, and some with attention, whose query and key have norms of their heads.
_LFM_2 = WITH_STATES.add(
    "Lfm2ForCausalLM",
    fixed={**NO_BIASES, "tie_word_embeddings": _is_tied},
    norm_eps=number("norm_eps", 1e-5),
    attention_norm="operator_norm",
    mlp_norm="ffn_norm",
    final_norm="embedding_norm",
    mlp_module="feed_forward",
    mlp_names=("w1", "w3", "w2"),
    intermediate_sizes=lambda fields, config: (_lfm_inner_size(fields, config),) * config.num_layers,
    output_module="out_proj",
    head_norms=("q_layernorm", "k_layernorm"),
    state=_short_convolution,
    state_layers=state_layers(_no_attention),
)


def _first_dense(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
    return frozenset(range(min(fields.integer("num_dense_layers", 2, minimum=0), config.num_layers)))


# LFM2 with experts in all but the first layers.
WITH_STATES.add(
    "Lfm2MoeForCausalLM",
    like=_LFM_2,
    intermediate_sizes=None,
    experts=mixtral_experts(
        32,
        4,
        "num_experts",
        module="feed_forward",
        inner_size=MOE_WIDTH,
        normalized=flag("norm_topk_prob", True),
        dense_layers=_first_dense,
        scoring=Scoring.SIGMOID,
        correction=lambda fields, _: "expert_bias" if fields.flag("use_expert_bias", True) else None,
        scale=number("routed_scaling_factor", 1.0),
    ),
)


_LFM_3_ROTATIONS = two_rotations(1e6, "rope_local_base_freq", 1e4)


def _is_lfm3_convolution(_: ConfigFields, config: DecoderConfig, index: int) -> bool:
    return index == 0 or index % 2 > 0


def if_sandwich(norm: str) -> Any:
    """A reader of a norm after a half of a layer."""
    return lambda fields, _: norm if fields.flag("use_sandwich_norm", True) else None


# LFM2 with layers that read a window and rotate otherwise, with norms after each half of a layer, and with gates of
# heads.
WITH_STATES.add(
    "Lfm3ForCausalLM",
    {
        "sliding_window": 256,
        "conv_L_cache": 7,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.5, "rope_theta": 1e6},
        },
    },
    like=_LFM_2,
    fixed={**_LFM_3_ROTATIONS["fixed"], "attention_bias": lambda fields: fields.flag("attention_bias", False)},
    sliding_rope=_LFM_3_ROTATIONS["sliding_rope"],
    sliding_windows=windows(lambda index: index > 0 and index % 4 == 0, others=_STATES[1:2]),
    state_layers=state_layers(_is_lfm3_convolution, ("full_attention", "sliding_attention")),
    intermediate_sizes=None,
    attention_output_norm=if_sandwich("post_operator_norm"),
    mlp_output_norm=if_sandwich("post_ffn_norm"),
    output_module="o_proj",
    head_norms=HEAD_NORMS,
    head_gates=lambda fields, _: "gate_proj" if fields.flag("use_attention_gate", True) else None,
)


def mamba2(defaults: Values | None = None, **parts: Any) -> Any:
    """A reader of the sizes of Mamba 2's layers by the names of Bamba. `defaults` are of fields, `parts` of
    `Mamba2Config`. It raises ConfigurationError for heads that do not fit."""

    def read(fields: ConfigFields, config: DecoderConfig) -> Mamba2Config:
        given = ConfigFields({"mamba_n_heads": 128, "mamba_d_state": 256, **(defaults or {}), **fields.values})
        num_heads, inner = given.integer("mamba_n_heads"), given.integer("mamba_expand", 2) * config.hidden_size
        if given.values.get("mamba_d_ssm") is not None:
            inner = given.integer("mamba_d_ssm")
        is_auto = given.values.get("mamba_d_head", "auto") == "auto"
        head_dim = inner // num_heads if is_auto else given.integer("mamba_d_head")
        if num_heads * head_dim != inner:
            raise fields.error("mamba_n_heads", num_heads, f"a divisor of {inner}, for heads of {head_dim}")
        num_groups = given.integer("mamba_n_groups", 1)
        if num_heads % num_groups:
            raise fields.error("mamba_n_groups", num_groups, f"a divisor of the {num_heads} heads")
        named = {"activation": state_activation(), **parts}
        read = {name: part(given, config) if callable(part) else part for name, part in named.items()}
        sizes: dict[str, Any] = {
            "module": "mamba",
            "num_heads": num_heads,
            "head_dim": head_dim,
            "num_groups": num_groups,
            "state_dim": given.integer("mamba_d_state"),
            "num_taps": given.integer("mamba_d_conv", 4, minimum=2),
            "norm_eps": config.norm_eps,
            "taps_bias": given.flag("mamba_conv_bias", True),
            "bias": given.flag("mamba_proj_bias", False),
            "norm_group": inner // num_groups if given.flag("mamba_rms_norm", True) else None,
            **step_limits(given, "time_step_limit"),
            **read,
        }
        return Mamba2Config(**sizes)

    return read


def step_limits(fields: ConfigFields, name: str) -> Values:
    """The bounds of time steps. transformers writes infinity as an object with its name."""
    limits = fields.values.get(name)
    if limits is None:
        return {}
    is_pair = isinstance(limits, list | tuple) and len(limits) == 2
    try:
        plain: list[Any] = [each["__float__"] if isinstance(each, dict) else each for each in limits if is_pair]
        least, greatest = map(float, plain)
    except (TypeError, ValueError, KeyError):
        raise fields.error(name, limits, "two numbers") from None
    return {"least_step": least, "greatest_step": greatest}


def _nothing(fields: ConfigFields, config: DecoderConfig, index: int) -> bool:
    attending = fields.values.get("attn_layer_indices") or []
    if not isinstance(attending, list):
        raise fields.error("attn_layer_indices", attending, "a list of layers")
    return index not in attending


# Layers of Mamba 2, and some with attention, which rotates half of each head.
WITH_STATES.add(
    "BambaForCausalLM",
    fixed={"partial_rotary_factor": 0.5, "layer_types": None},
    rotates_partly=True,
    mlp_norm="pre_ff_layernorm",
    mlp_module="feed_forward",
    final_norm="final_layernorm",
    state=mamba2(),
    state_layers=lambda fields, config: state_layers(_nothing)(
        ConfigFields({"attn_layer_indices": fields.values.get("attn_layer_indices")}), config
    ),
)


def _granite_unrotated(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
    is_rotated = fields.values.get("position_embedding_type") == "rope"
    return frozenset() if is_rotated else frozenset(range(config.num_layers))


def _granite_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig | None:
    return GRANITE_EXPERTS(fields, config) if fields.integer("num_local_experts", 8, minimum=0) else None


def _granite_rotated_part(fields: ConfigFields) -> float:
    """The part of each head that is rotated. Only GGUF files name one, by `rotary_dim`; transformers rotates whole
    heads whatever config.json says."""
    if fields.values.get("rotary_dim") is not None:
        return fields.integer("rotary_dim") / fields.integer("head_dim")
    name = "partial_rotary_factor"
    if (part := rope_section(fields).number(name, fields.number(name, 1.0))) != 1:
        raise fields.error(name, part, "1, because transformers rotates whole heads of this architecture")
    return 1.0


# Granite with layers of Mamba 2. Layers may have experts in addition to an MLP that all tokens have.
WITH_STATES.add(
    "GraniteMoeHybridForCausalLM",
    {"shared_intermediate_size": 1024},
    like=GRANITE,
    fixed={**NO_MLP_BIAS, "partial_rotary_factor": _granite_rotated_part},
    rotates_partly=True,
    mlp_module="shared_mlp",
    mlp_names=("input_linear", "input_linear", "output_linear"),
    intermediate_sizes=lambda fields, config: (fields.integer("shared_intermediate_size"),) * config.num_layers,
    unrotated_layers=_granite_unrotated,
    experts=_granite_experts,
    state=mamba2(),
    state_layers=state_layers(),
)


def _factors(name: str, count: int) -> Any:
    """A reader of a list of factors; all are 1 without it."""

    def read(fields: ConfigFields, _: DecoderConfig) -> tuple[float, ...]:
        return (1.0,) * count if fields.values.get(name) is None else tuple(fields.numbers(name, count))

    return read


# Attention and Mamba 2 side by side in each layer, with factors on inputs and outputs of most layers.
WITH_STATES.add(
    "FalconH1ForCausalLM",
    attention_output_bias=flag("attention_bias"),
    mlp_norm="pre_ff_layernorm",
    mlp_module="feed_forward",
    final_norm="final_layernorm",
    embedding_scale=number("embedding_multiplier", 1.0),
    logit_scale=number("lm_head_multiplier", 1.0),
    qkv_scales=lambda fields, _: (
        fields.number("attention_in_multiplier", 1.0),
        fields.number("key_multiplier", 1.0),
    ),
    attention_output_scale=number("attention_out_multiplier", 1.0),
    mlp_scales=_factors("mlp_multipliers", 2),
    states_beside_attention=True,
    state_layers=lambda _, config: frozenset(range(config.num_layers)),
    state=mamba2(
        {"mamba_d_ssm": 1024, "mamba_rms_norm": False},
        norm_first=flag("mamba_norm_before_gate", True),
        output_bias=flag("projectors_bias"),
        input_scale=number("ssm_in_multiplier", 1.0),
        scales=_factors("ssm_multipliers", 5),
        output_scale=number("ssm_out_multiplier", 1.0),
    ),
)


_ZAMBA_HYBRIDS = (*range(6, 43, 6), 47, 51)


def _zamba_blocks(fields: ConfigFields, config: DecoderConfig) -> SharedBlocksConfig:
    types, count = fields.values.get("layers_block_type"), config.num_layers
    known = isinstance(types, list) and all(each in ("hybrid", *_STATES) for each in types)
    if not isinstance(types, list) or not known or len(types) != count or "hybrid" not in types:
        raise fields.error("layers_block_type", types, f"{count} of hybrid and {_STATES[0]}, with a layer of hybrid")
    adapts = fields.flag("use_shared_attention_adapter", False)
    if adapts and config.num_kv_heads != config.num_heads:
        raise fields.error("num_key_value_heads", config.num_kv_heads, f"{config.num_heads}, with adapters")
    return SharedBlocksConfig(
        layers=tuple(index for index, each in enumerate(types) if each == "hybrid"),
        num_blocks=fields.integer("num_mem_blocks", 1),
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        inner_size=config.intermediate_size,
        activation=config.activation,
        norm_eps=config.norm_eps,
        bias=fields.flag("add_bias_linear", False),
        adapter_rank=fields.integer("adapter_rank", 128),
        adapts_attention=adapts,
    )


def _zamba_mamba(fields: ConfigFields, config: DecoderConfig) -> Mamba2Config:
    named = {"mamba_n_heads": fields.integer("n_mamba_heads", 8), "mamba_n_groups": fields.integer("mamba_ngroups", 1)}
    fixed = {"mamba_d_state": fields.integer("mamba_d_state", 64), "mamba_d_head": "auto", "time_step_limit": None}
    steps, bias = fields.number("time_step_min", 0.001), fields.flag("add_bias_linear", False)
    read = mamba2(activation="silu", norm_eps=1e-5, least_step=steps, bias=bias)
    return read(ConfigFields({**fields.values, **named, **fixed}), config)


def _zamba_length(fields: ConfigFields) -> int:
    return 16384 if fields.flag("use_long_context", False) else fields.integer("max_position_embeddings")


# Layers of Mamba 2. Some add the output of a shared block of attention and an MLP to its input.
WITH_STATES.add(
    "Zamba2ForCausalLM",
    {
        "hidden_act": "gelu",
        "layers_block_type": ["hybrid" if index in _ZAMBA_HYBRIDS else "mamba" for index in range(54)],
    },
    # Else transformers does not share the blocks either.
    only={"tie_word_embeddings": True},
    fixed={
        **NO_BIASES,
        "head_dim": lambda fields: head_dim_of(
            2 * fields.integer("hidden_size"), fields.integer("num_attention_heads", 32)
        ),
        "intermediate_size": lambda fields: fields.integer("intermediate_size", 4 * fields.integer("hidden_size")),
        "max_position_embeddings": _zamba_length,
    },
    renamed={".mamba_decoder.": "."},
    final_norm="final_layernorm",
    layers_without_mlp=lambda _, config: frozenset(range(config.num_layers)),
    unrotated_layers=lambda fields, config: frozenset(
        () if fields.flag("use_mem_rope", False) else range(config.num_layers)
    ),
    shared=_zamba_blocks,
    state_layers=lambda _, config: frozenset(range(config.num_layers)),
    state=_zamba_mamba,
)


# The fields of the size of states, the taps, the rank of time steps, and the biases of convolution and other layers.
_MAMBA_FIELDS = ("state_size", "conv_kernel", "time_step_rank", "use_conv_bias", "use_bias")
_JAMBA_FIELDS = ("mamba_d_state", "mamba_d_conv", "mamba_dt_rank", "mamba_conv_bias", "mamba_proj_bias")


def mamba(module: str, names: Sequence[str], **parts: Any) -> Any:
    """A reader of the sizes of Mamba's layers by these names of fields. `parts` are of `MambaConfig`."""
    state_dim, taps, rank, taps_bias, bias = names

    def read(fields: ConfigFields, config: DecoderConfig) -> MambaConfig:
        is_auto = fields.values.get(rank, "auto") == "auto"
        named = {"activation": state_activation(), **parts}
        read = {name: part(fields, config) if callable(part) else part for name, part in named.items()}
        sizes: dict[str, Any] = {
            "module": module,
            "state_dim": fields.integer(state_dim, 16),
            "step_rank": -(-config.hidden_size // 16) if is_auto else fields.integer(rank),
            "num_taps": fields.integer(taps, 4, minimum=2),
            "norm_eps": config.norm_eps,
            "taps_bias": fields.flag(taps_bias, True),
            "bias": fields.flag(bias, False),
            **read,
        }
        return MambaConfig(**sizes)

    return read


def _in_period(name: str) -> Callable[[ConfigFields, DecoderConfig], frozenset[int]]:
    """A reader of the layers that the fields of a period and of an offset name."""

    def read(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
        period, offset = fields.integer(f"{name}_layer_period"), fields.integer(f"{name}_layer_offset", minimum=0)
        return frozenset(index for index in range(config.num_layers) if index % period == offset)

    return read


def _jamba_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig | None:
    sparse = _in_period("expert")(fields, config)
    if fields.integer("num_experts") == 1 or not sparse:
        return None
    dense = frozenset(range(config.num_layers)) - sparse
    return experts(module="feed_forward", router="router", normalized=False, dense_layers=dense)(fields, config)


# Layers of Mamba, some with attention without rotation, and experts in some.
WITH_STATES.add(
    "JambaForCausalLM",
    {
        "attn_layer_period": 8,
        "attn_layer_offset": 4,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "num_experts": 16,
        "num_experts_per_tok": 2,
    },
    fixed=NO_BIASES,
    mlp_norm="pre_ff_layernorm",
    mlp_module="feed_forward",
    final_norm="final_layernorm",
    unrotated_layers=lambda _, config: frozenset(range(config.num_layers)),
    experts=_jamba_experts,
    state=mamba(
        "mamba",
        _JAMBA_FIELDS,
        inner_size=lambda fields, config: fields.integer("mamba_expand", 2) * config.hidden_size,
        norms=MambaNorms.WITH_WEIGHTS,
    ),
    state_layers=state_layers(lambda fields, config, index: index not in _in_period("attn")(fields, config)),
)


def _all_layers(_: ConfigFields, config: DecoderConfig) -> frozenset[int]:
    return frozenset(range(config.num_layers))


def _mamba_inner_size(fields: ConfigFields, config: DecoderConfig) -> int:
    return fields.integer("intermediate_size", int(fields.number("expand", 2) * config.hidden_size))


# Layers of Mamba, without attention and without MLPs.
_MAMBA = WITH_STATES.add(
    "MambaForCausalLM",
    fixed={**NO_BIASES, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 2},
    renamed=_BACKBONE,
    norm_eps=number("layer_norm_epsilon", 1e-5),
    attention_norm="norm",
    layers_without_mlp=_all_layers,
    unrotated_layers=_all_layers,
    state=mamba("mixer", _MAMBA_FIELDS, inner_size=_mamba_inner_size),
    state_layers=_all_layers,
)

# Mamba with norms of time steps, B and C.
WITH_STATES.add(
    "FalconMambaForCausalLM",
    like=_MAMBA,
    state=mamba(
        "mixer",
        _MAMBA_FIELDS,
        inner_size=_mamba_inner_size,
        norms=MambaNorms.WITHOUT_WEIGHTS,
        norm_eps=number("mixer_rms_eps", 1e-6),
    ),
)


def _only_mamba2(fields: ConfigFields, config: DecoderConfig) -> Mamba2Config:
    num_heads, head_dim = fields.integer("num_heads", 128), fields.integer("head_dim", 64)
    num_groups = fields.integer("n_groups", 8)
    if num_heads % num_groups:
        raise fields.error("n_groups", num_groups, f"a divisor of the {num_heads} heads")
    return Mamba2Config(
        module="mixer",
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=fields.integer("state_size", 128),
        num_taps=fields.integer("conv_kernel", 4, minimum=2),
        activation=state_activation()(fields, config),
        norm_eps=config.norm_eps,
        taps_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
        norm_group=num_heads * head_dim // num_groups,
        **step_limits(fields, "time_step_limit"),
    )


# The same of Mamba 2.
WITH_STATES.add("Mamba2ForCausalLM", like=_MAMBA, state=_only_mamba2)

_BLOCKS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}


def _nemotron_types(fields: ConfigFields) -> list[str]:
    """The types of the layers, by the names of transformers 5, as a list or by a letter each."""
    given: Any = fields.values.get("layers_block_type") or fields.values.get("layer_types")
    if given is None:
        pattern = fields.text("hybrid_override_pattern", "ME*-")
        given = [_BLOCKS.get(letter, letter) for letter in pattern]
    elif isinstance(given, list):
        given = [{"mamba": "linear_attention", "attention": "full_attention"}.get(str(each), each) for each in given]
    if not isinstance(given, list) or not all(each in _BLOCKS.values() for each in given):
        raise fields.error("layers_block_type", given, f"a list of {', '.join(_BLOCKS.values())}")
    if "full_attention" not in given:
        raise fields.error("layers_block_type", given, "at least one layer of full_attention")
    return given


def _of_type(*types: str) -> Any:
    """A reader of the layers of these types."""
    return lambda fields, _: frozenset(index for index, each in enumerate(_nemotron_types(fields)) if each in types)


def _nemotron_mamba(fields: ConfigFields, config: DecoderConfig) -> Mamba2Config:
    num_heads, head_dim = fields.integer("mamba_num_heads", 128), fields.integer("mamba_head_dim", 64)
    num_groups = fields.integer("n_groups", fields.integer("mamba_n_groups", 8))
    if num_heads % num_groups:
        raise fields.error("n_groups", num_groups, f"a divisor of the {num_heads} heads")
    return Mamba2Config(
        module="mixer",
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=num_groups,
        state_dim=fields.integer("ssm_state_size", 128),
        num_taps=fields.integer("conv_kernel", 4, minimum=2),
        activation=state_activation("mamba_hidden_act")(fields, config),
        norm_eps=config.norm_eps,
        taps_bias=fields.flag("use_conv_bias", True),
        bias=fields.flag("use_bias", False),
        least_step=fields.number("time_step_min", 0.001),
        norm_group=num_heads * head_dim // num_groups,
    )


def _nemotron_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig | None:
    if "moe" not in _nemotron_types(fields):
        return None
    if fields.values.get("moe_latent_size") is not None:
        raise fields.error("moe_latent_size", fields.values["moe_latent_size"], "null, the only supported value")
    return deepseek_experts(
        module="mixer",
        names=WITHOUT_GATE,
        bias=config.mlp_bias,
        dense_layers=_of_type("mlp"),
        shared="mixer.shared_experts",
        shared_names=WITHOUT_GATE,
        shared_inner_size=integer("moe_shared_expert_intermediate_size", 7688),
    )(fields, config)


# Layers that are one of Mamba 2, attention without rotation, an MLP without a gate, and experts, each with one norm.
WITH_STATES.add(
    "NemotronHForCausalLM",
    {"n_routed_experts": 8, "moe_intermediate_size": 7688},
    fixed={
        "attention_bias": False,
        "num_hidden_layers": lambda fields: len(_nemotron_types(fields)),
        "hidden_act": lambda fields: fields.text("mlp_hidden_act", "relu2"),
        "layer_types": None,
    },
    renamed=_BACKBONE,
    norm_eps=number("layer_norm_epsilon", 1e-5),
    attention_norm="norm",
    mlp_norm="norm",
    attention_module="mixer",
    mlp_module="mixer",
    mlp_names=WITHOUT_GATE,
    unrotated_layers=lambda _, config: frozenset(range(config.num_layers)),
    mlp_layers=_of_type("mlp", "moe"),
    layers_without_mlp=_of_type("linear_attention", "full_attention"),
    state=_nemotron_mamba,
    state_layers=_of_type("linear_attention"),
    experts=_nemotron_experts,
)
