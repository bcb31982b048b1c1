"""The table of the families with latent attention that `decoder` runs: what the config.json of each means."""

from dataclasses import replace

from worker_svc.layers.experts import Scoring
from worker_svc.layers.latent_attention import LatentConfig
from worker_svc.models.base import ConfigFields, head_dim_of
from worker_svc.models.decoder import DecoderConfig
from worker_svc.models.family_parts import Families, Values, by_layer_types, deepseek_experts

WITH_LATENTS = Families()

_DEEPSEEK_V3_DEFAULTS = {
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": 4096,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "n_group": 8,
    "topk_group": 4,
    "first_k_dense_replace": 3,
}


@WITH_LATENTS.add("DeepseekV3ForCausalLM", _DEEPSEEK_V3_DEFAULTS)
def _deepseek_v3(values: Values) -> DecoderConfig:
    """Latent attention, and experts that sigmoids choose: DeepSeek V3 and R1, Kimi K2."""
    config = _with_latents(values)
    return replace(config, experts=deepseek_experts(ConfigFields(values), config))


@WITH_LATENTS.add(
    "DeepseekV2ForCausalLM",
    vocab_size=102400,
    intermediate_size=11008,
    q_lora_rank=1536,
    n_routed_experts=64,
    n_shared_experts=2,
    moe_intermediate_size=1407,
    topk_method="greedy",
)
def _deepseek_v2(values: Values) -> DecoderConfig:
    """Latent attention, and experts that a softmax chooses, whose weights do not come to 1."""
    config, fields = _with_latents(values), ConfigFields(values)
    method = fields.text("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise fields.error("topk_method", method, "greedy or group_limited_greedy")
    grouped = values if method == "group_limited_greedy" else {**values, "n_group": 1, "topk_group": 1}
    experts = replace(
        deepseek_experts(ConfigFields(grouped), config),
        normalized=False,
        scoring=Scoring.SOFTMAX,
        correction=None,
        group_members=1,
    )
    return replace(config, experts=experts)


@WITH_LATENTS.add(
    "Glm4MoeLiteForCausalLM",
    _DEEPSEEK_V3_DEFAULTS,
    vocab_size=154880,
    hidden_size=2048,
    intermediate_size=10240,
    moe_intermediate_size=1536,
    num_hidden_layers=47,
    num_attention_heads=20,
    max_position_embeddings=202752,
    rms_norm_eps=1e-5,
    q_lora_rank=768,
    qk_nope_head_dim=192,
    v_head_dim=256,
    n_routed_experts=64,
    num_experts_per_tok=4,
    routed_scaling_factor=1.8,
    n_group=1,
    topk_group=1,
    first_k_dense_replace=1,
)
def _glm4_moe_lite(values: Values) -> DecoderConfig:
    """GLM-4.7-Flash: DeepSeek V3, whose layers with experts may be listed in `mlp_layer_types`."""
    config, fields = _with_latents(values), ConfigFields(values)
    return replace(config, experts=by_layer_types(deepseek_experts(fields, config), fields, config))


@WITH_LATENTS.add(
    "YoutuForCausalLM",
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=6144,
    num_attention_heads=16,
    q_lora_rank=1536,
    max_position_embeddings=131072,
    tie_word_embeddings=True,
)
def _youtu(values: Values) -> DecoderConfig:
    """LLaMA with latent attention."""
    return _with_latents(values)


@WITH_LATENTS.add(
    "MiniCPM3ForCausalLM",
    vocab_size=73448,
    hidden_size=2560,
    intermediate_size=6400,
    num_hidden_layers=62,
    num_attention_heads=40,
    max_position_embeddings=32768,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    q_lora_rank=768,
    kv_lora_rank=256,
    qk_nope_head_dim=64,
    qk_rope_head_dim=32,
    scale_emb=12,
    rope_interleave=False,
)
def _minicpm3(values: Values) -> DecoderConfig:
    """Latent attention, with factors on embeddings, on outputs of layers and on logits."""
    fields = ConfigFields(values)
    if values.get("v_head_dim") is None:
        head_dim = head_dim_of(fields.integer("hidden_size"), fields.integer("num_attention_heads"))
        values = {**values, "v_head_dim": head_dim}
    config = _with_latents(values)
    depth = fields.optional_number("scale_depth") if "scale_depth" in values else 1.4
    base = fields.optional_number("dim_model_base") if "dim_model_base" in values else 256.0
    return replace(
        config,
        embedding_scale=fields.number("scale_emb"),
        residual_scale=1.0 if depth is None else depth / config.num_layers**0.5,
        logit_scale=1.0 if base is None else base / config.hidden_size,
    )


def _with_latents(values: Values) -> DecoderConfig:
    """LLaMA with latent attention, by the fields that DeepSeek-V2 has for it."""
    fields = ConfigFields(values)
    rotated_dim = fields.integer("qk_rope_head_dim", 64)
    plain = {"num_key_value_heads": None, "mlp_bias": False, "head_dim": rotated_dim}
    config = DecoderConfig.read({**values, **plain})
    latent = LatentConfig(
        rank=fields.integer("kv_lora_rank", 512),
        query_rank=None if values.get("q_lora_rank") is None else fields.integer("q_lora_rank"),
        unrotated_dim=fields.integer("qk_nope_head_dim", 128),
        rotated_dim=rotated_dim,
        value_dim=fields.integer("v_head_dim", 128),
        bias=fields.flag("attention_bias", False),
        rotates_neighbours=fields.flag("rope_interleave", True),
    )
    return replace(
        config,
        latent=latent,
        num_kv_heads=1,
        head_dim=latent.line_dim,
        attention_scale=latent.query_dim**-0.5 * config.rope.score_factor,
    )
