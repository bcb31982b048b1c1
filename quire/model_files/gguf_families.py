"""The config.json of a GGUF file, by its architecture: a row for each family.

Numbers of experts are taken from the shapes of their tensors, so that a damaged field does not exhaust memory.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire.model_files.gguf_config import (
    FIRST_CONFIGS,
    GELU,
    LAYER_NORM_EPS,
    RELU_2,
    RMS_EPS,
    SIGMOID,
    SOFTMAX,
    decoder,
    has_bias,
    num_chosen_experts,
    num_layers,
    phi_3,
    rope_scaling,
)
from quire.model_files.gguf_header import GgufFields

_Config = dict[str, Any]
_FULL, _SLIDING = "full_attention", "sliding_attention"
_CENTERED_EPS = ("layer_norm_eps", LAYER_NORM_EPS)
_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _numbers(fields: GgufFields, names: Mapping[str, str]) -> _Config:
    """The numbers that the file has, by names in config.json, of fields by their names in the file."""
    return {name: fields.positive(key) for name, key in names.items() if fields.has(key)}


def _has(fields: GgufFields, name: str) -> bool:
    """Whether a layer has the tensor, of any number."""
    return any(each.endswith(f".{name}") for each in fields.header.tensors)


def _layer_types(fields: GgufFields, period: int) -> _Config:
    """The window, and the layers that have it: as the file says, or all but the last of each `period` layers."""
    count = num_layers(fields)
    slides = fields.own("attention.sliding_window_pattern", (int, list), "a whole number or a list", period)
    if not isinstance(slides, list):
        slides = [slides > 0 and (index + 1) % slides > 0 for index in range(count)]
    if len(slides) < count:
        raise fields.error(f"attention.sliding_window_pattern has {len(slides)} entries for {count} layers")
    theta = fields.positive("rope.freq_base", 10_000.0)
    if fields.positive("rope.freq_base_swa", theta) != theta:
        raise fields.error("rope.freq_base_swa differs from rope.freq_base, which is not read")
    return {
        "sliding_window": fields.size("attention.sliding_window"),
        "layer_types": [_SLIDING if each else _FULL for each in slides[:count]],
    }


# Experts


@dataclass(frozen=True, slots=True)
class _Experts:
    """The numbers of experts.

    Attributes:
        width: of each expert.
        num_shared: How many experts the one that all tokens have is as wide as.
        shared_width: 0 without such an expert.
    """

    count: int
    num_chosen: int
    width: int
    num_shared: int
    shared_width: int


def _experts(fields: GgufFields, gating: int = SOFTMAX) -> _Experts:
    tensors = fields.header.tensors
    down = next((each for name, each in tensors.items() if name.endswith(".ffn_down_exps.weight")), None)
    if down is None or len(down.shape) != 3:
        raise fields.error("tensor blk.0.ffn_down_exps.weight is missing, or has no three dimensions")
    width = down.shape[2]
    shared = next((each for name, each in tensors.items() if name.endswith(".ffn_down_shexp.weight")), None)
    shared_width = 0 if shared is None else shared.shape[-1]
    return _Experts(
        fields.size("expert_count"), num_chosen_experts(fields, gating), width, shared_width // width, shared_width
    )


def _first_dense_layers(fields: GgufFields) -> int:
    """Layers before the first one that has experts."""
    tensors, count = fields.header.tensors, num_layers(fields)
    return next((index for index in range(count) if f"blk.{index}.ffn_down_exps.weight" in tensors), count)


def _deepseek_experts(fields: GgufFields, gating: int = SIGMOID) -> _Config:
    """The experts of DeepSeek V3, by the names that they have there."""
    experts = _experts(fields, gating)
    return {
        "n_routed_experts": experts.count,
        "num_experts_per_tok": experts.num_chosen,
        "moe_intermediate_size": experts.width,
        "n_shared_experts": experts.num_shared,
        "first_k_dense_replace": _first_dense_layers(fields),
        "norm_topk_prob": fields.flag(f"{fields.architecture}.expert_weights_norm", False),
        "routed_scaling_factor": fields.positive("expert_weights_scale", 1.0),
        "n_group": fields.size("expert_group_count", 1),
        "topk_group": fields.size("expert_group_used_count", 1),
    }


# Families


def _llama(fields: GgufFields) -> _Config:
    """Families that are LLaMA by another name."""
    return decoder(fields, "LlamaForCausalLM", "llama") | {"mlp_bias": has_bias(fields, "ffn_gate")}


def _granite(fields: GgufFields) -> _Config:
    config = decoder(fields, "GraniteForCausalLM", "granite") | _granite_factors(fields)
    return config | {"mlp_bias": has_bias(fields, "ffn_gate")}


def _granite_factors(fields: GgufFields) -> _Config:
    # The field says more in this architecture.
    if not fields.flag(f"{fields.architecture}.rope.scaling.finetuned", True):
        raise fields.error("it has no positions (rope.scaling.finetuned), which is not read")
    return _numbers(fields, _GRANITE)


def _granite_moe(fields: GgufFields) -> _Config:
    experts = _experts(fields)
    shared = {"shared_intermediate_size": experts.shared_width} if experts.shared_width else {}
    name, model_type = ("GraniteMoeShared", "granitemoeshared") if shared else ("GraniteMoe", "granitemoe")
    config = decoder(fields, f"{name}ForCausalLM", model_type, width_of_experts=experts.width)
    return {
        **config,
        **_granite_factors(fields),
        **shared,
        "intermediate_size": experts.width,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.num_chosen,
    }


def _minicpm(fields: GgufFields) -> _Config:
    """Granite whose scores have the usual scale."""
    config = _granite(fields)
    if missing := [key for name, key in _GRANITE.items() if name not in config and key != "attention.scale"]:
        raise fields.error(f"{', '.join(missing)} are missing, as in old files of {fields.architecture}; convert again")
    return config | {"attention_multiplier": config["head_dim"] ** -0.5}


def _olmo(fields: GgufFields) -> _Config:
    """Norms have the same epsilon in all models."""
    config = decoder(fields, "OlmoForCausalLM", "olmo", eps=("layer_norm_eps", LAYER_NORM_EPS))
    return config | _numbers(fields, {"clip_qkv": "attention.clamp_kqv"})


def _olmo_2(fields: GgufFields) -> _Config:
    """OLMo 2, and OLMo 3, which has windows and scales the rotation only in the other layers."""
    if not fields.has("attention.sliding_window"):
        return decoder(fields, "Olmo2ForCausalLM", "olmo2")
    config = decoder(fields, "Olmo3ForCausalLM", "olmo3") | _layer_types(fields, 4)
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    plain = {"rope_type": "default", "rope_theta": theta}
    return config | {"rope_parameters": {_SLIDING: plain, _FULL: plain | (scaling or {})}}


def _olmoe(fields: GgufFields) -> _Config:
    experts = _experts(fields)
    return {
        **decoder(fields, "OlmoeForCausalLM", "olmoe", width_of_experts=experts.width),
        **_numbers(fields, {"clip_qkv": "attention.clamp_kqv"}),
        "intermediate_size": experts.width,
        "num_experts": experts.count,
        "num_experts_per_tok": experts.num_chosen,
        "norm_topk_prob": False,
    }


def _smollm_3(fields: GgufFields) -> _Config:
    """Each fourth layer has no rotation; no field says so."""
    config = decoder(fields, "SmolLM3ForCausalLM", "smollm3")
    return config | {
        "no_rope_layer_interval": 4,
        "use_sliding_window": False,
        "sliding_window": None,
        "mlp_bias": has_bias(fields, "ffn_gate"),
    }


def _seed_oss(fields: GgufFields) -> _Config:
    config = decoder(fields, "SeedOssForCausalLM", "seed_oss")
    return config | {"attention_out_bias": has_bias(fields, "attn_output"), "mlp_bias": has_bias(fields, "ffn_gate")}


def _mistral_3(fields: GgufFields) -> _Config:
    """Ministral 3, whose queries grow, and the language models of Mistral 3, whose queries do not."""
    if not fields.has("attention.temperature_scale"):
        return decoder(fields, "MistralForCausalLM", "mistral") | {"sliding_window": None}
    config = decoder(fields, "Ministral3ForCausalLM", "ministral3") | {"sliding_window": None}
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    if scaling is None or scaling["rope_type"] != "yarn":
        raise fields.error("attention.temperature_scale is read only with a rotation of the type yarn")
    growth = _numbers(fields, {"llama_4_scaling_beta": "attention.temperature_scale"})
    return config | {"rope_parameters": scaling | {"rope_theta": theta} | _magnitudes(fields, 1.0) | growth}


def _magnitudes(fields: GgufFields, unit: float) -> _Config:
    """The parameters of YaRN's factor on scores. The file has `unit` times the one that all models have for both."""
    weight = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    return {"mscale": round(weight / unit, 6), "mscale_all_dim": round(weight / unit, 6)} if weight else {}


def _glm_4(fields: GgufFields) -> _Config:
    if fields.has("rope.dimension_sections"):
        raise fields.error("the language model of a vision model (rope.dimension_sections) is not read")
    return decoder(fields, "Glm4ForCausalLM", "glm4", rotates_partly=True)


def _glm_4_moe(fields: GgufFields) -> _Config:
    config = decoder(fields, "Glm4MoeForCausalLM", "glm4_moe", rotates_partly=True)
    return config | _deepseek_experts(fields) | {"use_qk_norm": _has(fields, "attn_q_norm.weight")}


def _exaone_4(fields: GgufFields) -> _Config:
    config = decoder(fields, "Exaone4ForCausalLM", "exaone4")
    if fields.has("attention.sliding_window"):
        return config | _layer_types(fields, 4)
    return config | {"sliding_window": None, "layer_types": [_FULL] * config["num_hidden_layers"]}


def _numbered(experts: _Config) -> _Config:
    """The experts of DeepSeek V3 by the names of other families."""
    names = {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"}
    return experts | {name: experts[other] for name, other in names.items()}


def _exaone_moe(fields: GgufFields) -> _Config:
    config = decoder(fields, "ExaoneMoeForCausalLM", "exaone_moe")
    return config | _numbered(_deepseek_experts(fields)) | _layer_types(fields, 4)


def _hy_v3(fields: GgufFields) -> _Config:
    config = decoder(fields, "HYV3ForCausalLM", "hy_v3") | _numbered(_deepseek_experts(fields))
    return config | {"router_scaling_factor": config["routed_scaling_factor"], "mlp_bias": False}


def _command_r(fields: GgufFields) -> _Config:
    config = decoder(fields, "CohereForCausalLM", "cohere", eps=_CENTERED_EPS)
    config |= _numbers(fields, {"logit_scale": "logit_scale"})
    return config | {"use_qk_norm": _has(fields, "attn_q_norm.weight")}


def _cohere_2(fields: GgufFields) -> _Config:
    config = decoder(fields, "Cohere2ForCausalLM", "cohere2", eps=_CENTERED_EPS)
    return config | _numbers(fields, {"logit_scale": "logit_scale"}) | _layer_types(fields, 4)


def _starcoder_2(fields: GgufFields) -> _Config:
    """A file loses the window, if the model has one."""
    eps = ("norm_epsilon", LAYER_NORM_EPS)
    config = decoder(fields, "Starcoder2ForCausalLM", "starcoder2", ("hidden_act", GELU), eps=eps)
    return config | {"use_bias": config.pop("attention_bias"), "sliding_window": None}


def _stable_lm(fields: GgufFields) -> _Config:
    config = decoder(fields, "StableLmForCausalLM", "stablelm", eps=_CENTERED_EPS, rotates_partly=True)
    return config | {
        "use_qkv_bias": config.pop("attention_bias"),
        "use_parallel_residual": not _has(fields, "ffn_norm.weight"),
        "qk_layernorm": _has(fields, "attn_q_norm.weight"),
    }


def _ernie_4_5(fields: GgufFields) -> _Config:
    config = decoder(fields, "Ernie4_5ForCausalLM", "ernie4_5")
    return config | {"use_bias": config.pop("attention_bias")}


def _ernie_4_5_moe(fields: GgufFields) -> _Config:
    config, experts = decoder(fields, "Ernie4_5_MoeForCausalLM", "ernie4_5_moe"), _experts(fields)
    return config | {
        "use_bias": config.pop("attention_bias"),
        "moe_num_experts": experts.count,
        "moe_k": experts.num_chosen,
        "moe_intermediate_size": experts.width,
        "moe_num_shared_experts": experts.num_shared,
        "moe_layer_start_index": _first_dense_layers(fields),
        "moe_layer_interval": fields.size("interleave_moe_layer_step", 1),
    }


def _hunyuan_moe(fields: GgufFields) -> _Config:
    experts = _experts(fields)
    return {
        **decoder(fields, "HunYuanMoEV1ForCausalLM", "hunyuan_v1_moe", width_of_experts=experts.width),
        "intermediate_size": experts.width,
        "num_experts": experts.count,
        "moe_topk": experts.num_chosen,
    }


def _phi_moe(fields: GgufFields) -> _Config:
    experts = _experts(fields)
    return {
        **phi_3(fields, "PhimoeForCausalLM", "phimoe", experts.width),
        "intermediate_size": experts.width,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.num_chosen,
        "lm_head_bias": "output.bias" in fields.header.tensors,
    }


def _gpt_oss(fields: GgufFields) -> _Config:
    experts = _experts(fields)
    config = decoder(fields, "GptOssForCausalLM", "gpt_oss", width_of_experts=experts.width) | _layer_types(fields, 2)
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {"rope_type": "default"}
    return config | {
        "intermediate_size": experts.width,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.num_chosen,
        # No field says that the bounds of YaRN's ramp are not rounded.
        "rope_parameters": scaling | {"rope_theta": theta, "truncate": False},
    }


def _minimax_m2(fields: GgufFields) -> _Config:
    experts = _experts(fields, SIGMOID)
    config = decoder(fields, "MiniMaxM2ForCausalLM", "minimax_m2", width_of_experts=experts.width, rotates_partly=True)
    return config | {
        "intermediate_size": experts.width,
        "num_local_experts": experts.count,
        "num_experts_per_tok": experts.num_chosen,
    }


def _dots_1(fields: GgufFields) -> _Config:
    config = decoder(fields, "Dots1ForCausalLM", "dots1")
    return config | _deepseek_experts(fields) | {"sliding_window": None}


def _nemotron(fields: GgufFields) -> _Config:
    eps = ("norm_eps", LAYER_NORM_EPS)
    config = decoder(fields, "NemotronForCausalLM", "nemotron", RELU_2, eps=eps, rotates_partly=True)
    return config | {"mlp_bias": has_bias(fields, "ffn_up")}


def _arcee(fields: GgufFields) -> _Config:
    return decoder(fields, "ArceeForCausalLM", "arcee", RELU_2) | {"mlp_bias": has_bias(fields, "ffn_up")}


def _jais_2(fields: GgufFields) -> _Config:
    config = decoder(fields, "Jais2ForCausalLM", "jais2", RELU_2, eps=_CENTERED_EPS)
    return config | {"mlp_bias": has_bias(fields, "ffn_up")}


def _deepseek_2(fields: GgufFields) -> _Config:
    """DeepSeek V2, V3 and what has their latent attention: Kimi K2, GLM-4.7-Flash, Youtu."""
    if not fields.has("attention.kv_lora_rank"):
        raise fields.error("attention.kv_lora_rank is missing; only models with latent attention are read")
    rotated = fields.size("rope.dimension_count")
    key = fields.size("attention.key_length_mla", fields.size("attention.key_length"))
    if rotated >= key:
        raise fields.error(f"rope.dimension_count is {rotated}, of keys of {key} dimensions")
    heads = fields.size("attention.head_count")
    scaling = rope_scaling(fields, rotated)
    if scaling is not None and scaling["rope_type"] == "yarn":
        # The weight of the logarithm has a factor of 0.1 in files of this architecture.
        scaling |= _magnitudes(fields, 0.1)
    config: _Config = {
        "hidden_size": fields.size("embedding_length"),
        "num_hidden_layers": num_layers(fields),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": fields.size("attention.q_lora_rank") if fields.has("attention.q_lora_rank") else None,
        "kv_lora_rank": fields.size("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": fields.size("attention.value_length_mla", fields.size("attention.value_length")),
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.positive(RMS_EPS),
        "hidden_act": "silu",
        "rope_theta": fields.positive("rope.freq_base", 10_000.0),
        "rope_scaling": scaling,
        "attention_bias": has_bias(fields, "attn_kv_a_mqa"),
    }
    if not _has(fields, "ffn_down_exps.weight"):
        width = fields.size("feed_forward_length")
        return {"architectures": ["YoutuForCausalLM"], "model_type": "youtu", "intermediate_size": width} | config
    # Files of before 2025 do not say how experts are chosen; in all of V2 that is a softmax.
    has_correction = _has(fields, "exp_probs_b.bias") or _has(fields, "exp_probs_b.weight")
    gating = fields.own("expert_gating_func", int, "a whole number", SIGMOID if has_correction else SOFTMAX)
    experts = _deepseek_experts(fields, gating)
    config |= experts | {"intermediate_size": fields.size("feed_forward_length", experts["moe_intermediate_size"])}
    if gating == SIGMOID:
        return {"architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3"} | config
    if gating != SOFTMAX or experts["norm_topk_prob"]:
        raise fields.error(f"experts with expert_gating_func {gating} and normalized weights are not read")
    method = "group_limited_greedy" if experts["n_group"] > 1 else "greedy"
    return {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "topk_method": method} | config


CONFIGS: dict[str, Callable[[GgufFields], _Config]] = {
    **FIRST_CONFIGS,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "minicpm": _minicpm,
    "olmo": _olmo,
    "olmo2": _olmo_2,
    "olmoe": _olmoe,
    "smollm3": _smollm_3,
    "seed_oss": _seed_oss,
    "mistral3": _mistral_3,
    "chatglm": lambda fields: decoder(fields, "GlmForCausalLM", "glm", rotates_partly=True),
    "glm4": _glm_4,
    "glm4moe": _glm_4_moe,
    "exaone": _llama,
    "exaone4": _exaone_4,
    "exaone-moe": _exaone_moe,
    "hy_v3": _hy_v3,
    "command-r": _command_r,
    "cohere2": _cohere_2,
    "starcoder2": _starcoder_2,
    "stablelm": _stable_lm,
    "ernie4_5": _ernie_4_5,
    "ernie4_5-moe": _ernie_4_5_moe,
    "hunyuan-dense": lambda fields: decoder(fields, "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense"),
    "hunyuan-moe": _hunyuan_moe,
    "phimoe": _phi_moe,
    "gpt-oss": _gpt_oss,
    "deepseek2": _deepseek_2,
    "minimax-m2": _minimax_m2,
    "dots1": _dots_1,
    "nemotron": _nemotron,
    "arcee": _arcee,
    "jais2": _jais_2,
    "internlm2": _llama,
    "pangu-embedded": _llama,
    "xverse": _llama,
}
"""The configuration of a file of each architecture; it raises ConfigurationError."""
