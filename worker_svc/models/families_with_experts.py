"""The table of the families with experts that `decoder` runs, with rows as in `families`."""

from typing import Any

from worker_svc.layers.activations import CLAMPED_SWIGLU
from worker_svc.layers.embedding_norm import NormSpan
from worker_svc.layers.experts import ExpertsConfig, Scoring
from worker_svc.models.base import ConfigFields
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.families import EXAONE_4, GRANITE, HUNYUAN, OLMO_2
from worker_svc.models.family_parts import (
    HEAD_NORMS,
    LAYER_NORMS,
    NO_BIASES,
    NO_MLP_BIAS,
    Families,
    Values,
    deepseek_experts,
    dense_layers_by_types,
    experts,
    flag,
    if_flag,
    integer,
    mixtral_experts,
    optional_number,
    qwen_experts,
    upper_windows,
    used_window_of,
    window_everywhere,
    window_of,
    windows,
)

WITH_EXPERTS = Families()


# Experts in each layer, whose weights come to 1. Layers may see a sliding window.
WITH_EXPERTS.add(
    "MixtralForCausalLM",
    fixed=NO_BIASES,
    experts=mixtral_experts(8, 2, ("num_experts", "num_local_experts")),
    sliding_windows=window_everywhere,
)


def _lower_windows(fields: ConfigFields, config: DecoderConfig) -> tuple[int | None, ...]:
    end = fields.integer("max_window_layers", 28, minimum=0)
    return windows(lambda index: index % 2 == 0 and index < end, used_window_of)(fields, config)


# Biases on query, key and value, and experts, including one shared by all tokens. Every other one of the lower layers
# may see a sliding window.
WITH_EXPERTS.add(
    "Qwen2MoeForCausalLM",
    {"shared_expert_intermediate_size": 5632, "num_experts": 60},
    fixed=NO_BIASES,
    qkv_bias=flag("qkv_bias", True),
    experts=qwen_experts(
        shared_inner_size=integer("shared_expert_intermediate_size"), shared_gate="shared_expert_gate"
    ),
    sliding_windows=_lower_windows,
)

# Qwen3 with experts. Layers may see a sliding window.
WITH_EXPERTS.add(
    "Qwen3MoeForCausalLM",
    {"num_experts": 128},
    fixed=NO_MLP_BIAS,
    head_norms=HEAD_NORMS,
    experts=qwen_experts(),
    sliding_windows=lambda fields, config: (used_window_of(fields),) * config.num_layers,
)

# All experts of one layer are in one tensor of the checkpoint.
GRANITE_EXPERTS = experts(
    "num_local_experts",
    8,
    default_chosen=2,
    normalized=True,
    module="block_sparse_moe",
    router="router.layer",
    shared_inner_size=lambda fields, _: fields.integer("shared_intermediate_size", 0, minimum=0) or None,
    shared="shared_mlp",
    shared_names=("input_linear", "input_linear", "output_linear"),
)

# Granite with experts.
_GRANITE_MOE = WITH_EXPERTS.add("GraniteMoeForCausalLM", like=GRANITE, experts=GRANITE_EXPERTS)
WITH_EXPERTS.add("GraniteMoeSharedForCausalLM", like=_GRANITE_MOE)

# The experts of DeepSeek V3, and a rotation that turns a part of each head.
_GLM_4_MOE = WITH_EXPERTS.add(
    "Glm4MoeForCausalLM",
    {"n_routed_experts": 128, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    fixed=NO_MLP_BIAS,
    rotates_partly=True,
    attention_output_bias=False,
    head_norms=if_flag("use_qk_norm", HEAD_NORMS),
    experts=deepseek_experts(),
)
WITH_EXPERTS.add("SolarOpenForCausalLM", {"partial_rotary_factor": 1.0, "first_k_dense_replace": 0}, like=_GLM_4_MOE)

# GLM 4 with experts and a full rotation, and names of its own for tensors and fields.
WITH_EXPERTS.add(
    "SarvamMoEForCausalLM",
    {"use_qk_norm": True, "partial_rotary_factor": 1.0, "routed_scaling_factor": 2.5},
    like=_GLM_4_MOE,
    fixed={"attention_bias": lambda fields: fields.flag("use_qkv_bias", fields.flag("attention_bias", False))},
    renamed={
        "model.word_embeddings.": "model.embed_tokens.",
        ".attention.": ".self_attn.",
        ".query_key_value.": ".qkv_proj.",
        ".self_attn.dense.": ".self_attn.o_proj.",
        ".query_layernorm.": ".q_norm.",
        ".key_layernorm.": ".k_norm.",
        ".gate.expert_bias": ".gate.e_score_correction_bias",
    },
    merged_qkv=True,
    experts=lambda fields, config: deepseek_experts(
        *(
            own if own in fields.values else name
            for own, name in (("num_experts", "n_routed_experts"), ("num_shared_experts", "n_shared_experts"))
        )
    )(fields, config),
)

# DeepSeek's first model with experts, which a softmax chooses.
WITH_EXPERTS.add(
    "DeepseekForCausalLM",
    {"norm_topk_prob": False},
    only={"moe_layer_freq": 1},
    experts=deepseek_experts(scoring=Scoring.SOFTMAX, correction=None),
)

# EXAONE 4 with norms before attention and MLP, and the experts of DeepSeek V3.
_NUMBERED: Values = {"num_shared_experts": 1, "first_k_dense_replace": 1}
WITH_EXPERTS.add(
    "ExaoneMoeForCausalLM",
    {**_NUMBERED, "num_experts": 64, "routed_scaling_factor": 2.5},
    like=EXAONE_4,
    attention_norm="input_layernorm",
    attention_output_norm=None,
    mlp_norm="post_attention_layernorm",
    mlp_output_norm=None,
    experts=deepseek_experts(
        "num_experts", "num_shared_experts", dense_layers=dense_layers_by_types, correction="e_score_correction_bias"
    ),
)


def _shared_size(fields: ConfigFields, _: DecoderConfig) -> int:
    # transformers has another shared expert for 0.
    return fields.integer("num_shared_experts") * fields.integer("moe_intermediate_size")


# Norms on the heads of query and key, and the experts of DeepSeek V3.
WITH_EXPERTS.add(
    "HYV3ForCausalLM",
    {**_NUMBERED, "num_experts": 192, "router_scaling_factor": 2.826},
    only=NO_MLP_BIAS,
    head_norms=HEAD_NORMS,
    experts=deepseek_experts(
        "num_experts",
        "num_shared_experts",
        "router_scaling_factor",
        dense_layers=dense_layers_by_types,
        router="router.gate",
        correction="expert_bias",
        shared_inner_size=_shared_size,
        shared="mlp.shared_mlp",
    ),
)


def _rotated_part(fields: ConfigFields) -> Any:
    if fields.values.get("rotary_dim") is None:
        return fields.values.get("partial_rotary_factor")
    return fields.integer("rotary_dim") / fields.integer("head_dim")


# Experts that are chosen by sigmoids, and norms on all heads of query and key together. The rotation may turn a part of
# each head.
WITH_EXPERTS.add(
    "MiniMaxM2ForCausalLM",
    {"num_local_experts": 256},
    fixed={**NO_BIASES, "partial_rotary_factor": _rotated_part},
    rotates_partly=True,
    head_norms=HEAD_NORMS,
    head_norm_span=NormSpan.ALL_HEADS,
    experts=mixtral_experts(None, 8, scoring=Scoring.SIGMOID, correction="e_score_correction_bias"),
)


def _tolerance(fields: ConfigFields, _: DecoderConfig) -> float:
    return fields.number("router_jitter_noise", 0.01) if fields.values.get("router_jitter_noise") != 0 else 0.0


def _head_bias(fields: ConfigFields, config: DecoderConfig) -> bool:
    found = fields.flag("lm_head_bias", False)
    if found and config.tied:
        raise fields.error("tie_word_embeddings", True, "false if lm_head_bias is true")
    return found


# Mixtral with layer norms, biases, and another choice of experts: always two.
WITH_EXPERTS.add(
    "PhimoeForCausalLM",
    only={"num_experts_per_tok": 2},
    fixed=NO_MLP_BIAS,
    **LAYER_NORMS,
    head_bias=_head_bias,
    experts=mixtral_experts(16, 2, normalized=False, scoring=Scoring.SPARSE_MIXER, tolerance=_tolerance),
    sliding_windows=window_everywhere,
)

# Attention sinks, windows in every other layer, and experts with biases and clamped activations, all of one layer in
# one tensor of the checkpoint.
WITH_EXPERTS.add(
    "GptOssForCausalLM",
    {
        "attention_bias": True,
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 32.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "num_local_experts": 128,
    },
    only={"swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    fixed=NO_MLP_BIAS,
    activation=CLAMPED_SWIGLU,
    has_sinks=True,
    experts=experts("num_local_experts", default_chosen=4, normalized=True, bias=True, router="router"),
    sliding_windows=windows(lambda index: index % 2 == 0),
)

# Experts, and norms on all heads of query and key together, which may be clamped.
_PLAIN = experts(normalized=flag("norm_topk_prob"))
WITH_EXPERTS.add(
    "OlmoeForCausalLM",
    {"num_experts": 64},
    fixed=NO_MLP_BIAS,
    head_norms=HEAD_NORMS,
    head_norm_span=NormSpan.ALL_HEADS,
    qkv_limit=optional_number("clip_qkv"),
    experts=_PLAIN,
)

# OLMo 2 with experts.
WITH_EXPERTS.add("FlexOlmoForCausalLM", {"num_experts": 7}, like=OLMO_2, experts=_PLAIN)

# Qwen3 with the experts of DeepSeek V3.
WITH_EXPERTS.add(
    "Dots1ForCausalLM",
    {"norm_topk_prob": False, "max_window_layers": 62},
    fixed=NO_MLP_BIAS,
    head_norms=HEAD_NORMS,
    experts=deepseek_experts(),
    sliding_windows=upper_windows(None, window_of),
)


def _ernie_dense_layers(fields: ConfigFields, config: DecoderConfig) -> frozenset[int]:
    interval, start = fields.integer("moe_layer_interval", 1), fields.integer("moe_layer_start_index", 1, minimum=0)
    end = fields.integer("moe_layer_end_index", -1, minimum=-1)
    last = config.num_layers - 1 if end == -1 else end
    return frozenset(
        index for index in range(config.num_layers) if (index + 1) % interval or not start <= index <= last
    )


def _ernie_shared_size(fields: ConfigFields, _: DecoderConfig) -> int | None:
    num_shared = fields.integer("moe_num_shared_experts", 2, minimum=0)
    return num_shared * fields.integer("moe_intermediate_size", 1536) or None


# ERNIE 4.5 with experts whose choice is corrected, in some of the layers.
WITH_EXPERTS.add(
    "Ernie4_5_MoeForCausalLM",
    only={"use_bias": False, "moe_norm_min": 1e-12},
    fixed=NO_BIASES,
    rotates_neighbours=True,
    experts=experts(
        "moe_num_experts",
        64,
        "moe_k",
        6,
        inner_size=integer("moe_intermediate_size", 1536),
        normalized=True,
        dense_layers=_ernie_dense_layers,
        correction="moe_statics.e_score_correction_bias",
        correction_is_row=True,
        shared_inner_size=_ernie_shared_size,
        shared="mlp.shared_experts",
    ),
)


def _hunyuan_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig:
    """Their numbers are a list of a number for each layer, or one for all."""
    values = dict(fields.values)
    for name in ("num_experts", "moe_topk"):
        given = values.get(name)
        if isinstance(given, list) and given and given == given[:1] * len(given):
            values[name] = given[0]
    read = experts(
        *("num_experts", 1, "moe_topk", 1),
        normalized=True,
        router="gate.wg",
        shared_inner_size=config.intermediate_size,
        shared="mlp.shared_mlp",
    )
    return read(ConfigFields(values), config)


# HunYuan with experts, including one shared by all tokens.
WITH_EXPERTS.add("HunYuanMoEV1ForCausalLM", like=HUNYUAN, experts=_hunyuan_experts)
