"""The table of the families with latent attention that `decoder` runs, with rows as in `families`."""

from typing import Any

from worker_svc.layers.experts import ExpertsConfig, Scoring
from worker_svc.layers.latent_attention import LatentConfig
from worker_svc.models.base import ConfigFields, head_dim_of
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.family_parts import (
    NO_MLP_BIAS,
    WITHOUT_GATE,
    Families,
    deepseek_experts,
    dense_layers_by_types,
    number,
)

WITH_LATENTS = Families()


def _latent(fields: ConfigFields, config: DecoderConfig, default: int = 128) -> LatentConfig:
    """The sizes, by the fields that DeepSeek-V2 has for them. `default` is that of `v_head_dim`."""
    return LatentConfig(
        rank=fields.integer("kv_lora_rank", 512),
        query_rank=None if fields.values.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        unrotated_dim=fields.integer("qk_nope_head_dim", 128),
        rotated_dim=config.rope.head_dim,
        value_dim=fields.integer("v_head_dim", default),
        bias=fields.flag("attention_bias", False),
        rotates_neighbours=fields.flag("rope_interleave", True),
    )


# LLaMA with latent attention.
_YOUTU = WITH_LATENTS.add(
    "YoutuForCausalLM",
    {"q_lora_rank": 1536},
    fixed={
        **NO_MLP_BIAS,
        "num_key_value_heads": None,
        "head_dim": lambda fields: fields.integer("qk_rope_head_dim", 64),
    },
    latent=_latent,
    num_kv_heads=1,
    head_dim=lambda _, config: config.latent.line_dim,
    attention_scale=lambda _, config: config.latent.query_dim**-0.5 * config.rope.score_factor,
)

# An MLP without a gate.
WITH_LATENTS.add("PLMForCausalLM", {"q_lora_rank": None, "hidden_act": "relu2"}, like=_YOUTU, mlp_names=WITHOUT_GATE)

# Experts that sigmoids choose: DeepSeek V3 and R1, Kimi K2.
_DEEPSEEK_V3 = WITH_LATENTS.add(
    "DeepseekV3ForCausalLM",
    {"n_routed_experts": 256, "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3},
    like=_YOUTU,
    experts=deepseek_experts(),
)


def _deepseek_v2_experts(fields: ConfigFields, config: DecoderConfig) -> ExpertsConfig:
    method = fields.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", method, "greedy or group_limited_greedy")
    groups: dict[str, Any] = {} if method == "group_limited_greedy" else {"num_groups": 1, "num_chosen_groups": 1}
    read = deepseek_experts(normalized=False, scoring=Scoring.SOFTMAX, correction=None, group_members=1, **groups)
    return read(fields, config)


# Experts that a softmax chooses, whose weights do not come to 1.
WITH_LATENTS.add(
    "DeepseekV2ForCausalLM",
    {"n_routed_experts": 64, "n_shared_experts": 2, "topk_method": "greedy"},
    like=_YOUTU,
    only=NO_MLP_BIAS,
    experts=_deepseek_v2_experts,
)

# GLM-4.7-Flash: DeepSeek V3, whose layers with experts may be listed in `mlp_layer_types`.
WITH_LATENTS.add(
    "Glm4MoeLiteForCausalLM",
    {
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "n_routed_experts": 64,
        "routed_scaling_factor": 1.8,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
    like=_DEEPSEEK_V3,
    experts=deepseek_experts(dense_layers=dense_layers_by_types),
)


def _minicpm_latent(fields: ConfigFields, config: DecoderConfig) -> LatentConfig:
    given = fields.values.get("v_head_dim") is not None
    return _latent(fields, config, 128 if given else head_dim_of(config.hidden_size, config.num_heads))


def _residual_scale(fields: ConfigFields, config: DecoderConfig) -> float:
    depth = fields.optional_number("scale_depth")
    return 1.0 if depth is None else depth / config.num_layers**0.5


def _logit_scale(fields: ConfigFields, config: DecoderConfig) -> float:
    base = fields.optional_number("dim_model_base")
    return 1.0 if base is None else base / config.hidden_size


# Factors on embeddings, on outputs of layers and on logits.
WITH_LATENTS.add(
    "MiniCPM3ForCausalLM",
    {
        "q_lora_rank": 768,
        "kv_lora_rank": 256,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256.0,
        "rope_interleave": False,
    },
    like=_YOUTU,
    fixed={"mlp_bias": lambda fields: fields.flag("mlp_bias", False)},
    latent=_minicpm_latent,
    embedding_scale=number("scale_emb"),
    residual_scale=_residual_scale,
    logit_scale=_logit_scale,
)
