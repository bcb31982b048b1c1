"""The config.json of a GGUF file, by its architecture: a row for each family."""

from collections.abc import Callable, Mapping
from statistics import NormalDist

from quire.model_files.gguf_config import (
    FULL,
    LAYER_NORM_EPS,
    LONG_FACTORS,
    RMS_EPS,
    ROPE_FACTORS,
    SHORT_FACTORS,
    SIGMOID,
    SLIDING,
    SOFTMAX,
    Config,
    Part,
    Reader,
    biases,
    deepseek_experts,
    delta_rule,
    experts,
    first_dense_layers,
    has,
    has_bias,
    layers_with_keys,
    mamba_2,
    num_chosen_experts,
    num_layers,
    numbers,
    of_each_head,
    presence,
    read_factors,
    renamed,
    rope_scaling,
    row,
    windows,
)
from quire.model_files.gguf_header import GgufFields

_CENTERED_EPS = ("layer_norm_eps", LAYER_NORM_EPS)
_GELU, _RELU_2 = "gelu_pytorch_tanh", ("hidden_act", "relu2")
_NO_WINDOW: Config = {"sliding_window": None}
_GATE_BIAS, _UP_BIAS = biases("mlp_bias", "ffn_gate"), biases("mlp_bias", "ffn_up")
_HEAD_NORMS = presence("use_qk_norm", "attn_q_norm.weight")
_CLAMPED = numbers(clip_qkv="attention.clamp_kqv")
_PLAIN_LLAMA = row("llama", _GATE_BIAS)


def _llama(fields: GgufFields) -> Config:
    """Llama, Mistral, and Mixtral, which is a Llama with experts here."""
    if fields.has("expert_count") and fields.own("expert_count", int, "a whole number"):
        counts = {"num_local_experts": fields.size("expert_count"), "num_experts_per_tok": num_chosen_experts(fields)}
        return row("mixtral", _NO_WINDOW, counts)(fields)
    config = _PLAIN_LLAMA(fields)
    if fields.has("attention.sliding_window"):
        window = fields.size("attention.sliding_window")
        return config | {"model_type": "mistral", "sliding_window": window}
    return config


def _long_rope(fields: GgufFields, config: Config) -> Config:
    """Phi-3 and PhiMoE, whose rotations may have factors for short and for long texts."""
    length = fields.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = fields.own("attention.sliding_window", int, "a whole number", 0) or None
    # The padding is not the default of transformers, which small vocabularies do not have.
    found = {"original_max_position_embeddings": length, "sliding_window": window}
    found["pad_token_id"] = fields.token_id("padding")
    if LONG_FACTORS not in fields.header.tensors:
        return found
    count = fields.size("rope.dimension_count", config.get("head_dim")) // 2
    names = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    scaling: Config = {"rope_type": "longrope"}
    scaling |= {key: list(read_factors(fields, name, count)) for key, name in names.items()}
    if fields.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = fields.positive("rope.scaling.attn_factor")
    return found | {"rope_scaling": scaling}


def _no_windows(fields: GgufFields, config: Config) -> Config:
    if fields.has("attention.sliding_window"):
        raise fields.error(f"sliding windows of {config['model_type']} are not read")
    return {}


def _qwen_experts(*, normalized: bool) -> tuple[Part, ...]:
    """Only Qwen 3 divides the weights of the chosen experts by their sum, as in llama.cpp; no field says so."""
    fixed = {"norm_topk_prob": normalized, "decoder_sparse_step": 1, "mlp_only_layers": []}
    shared = "shared_expert_intermediate_size"
    return _no_windows, experts(width="moe_intermediate_size", shared_width=shared), fixed


def _query_scale(layers_of_largest: int) -> Reader:
    """No field has it; the models of 27B differ from the others, and llama.cpp knows them by their layers."""

    def read(_: GgufFields, config: Config) -> Config:
        is_largest = config["num_hidden_layers"] == layers_of_largest
        usual = config["hidden_size"] // config["num_attention_heads"] if is_largest else config["head_dim"]
        return {"query_pre_attn_scalar": usual}

    return read


def _gemma_2_windows(fields: GgufFields, _: Config) -> Config:
    return {
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": fields.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.positive("final_logit_softcapping", 30.0),
    }


def _gemma_3_rotations(fields: GgufFields, config: Config) -> Config:
    del config["rope_theta"]
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    theta_of_windows = fields.positive("rope.freq_base_swa", 10_000.0)
    return {
        "sliding_window": config["sliding_window"] or 4096,
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": theta_of_windows},
            FULL: scaling | {"rope_theta": fields.positive("rope.freq_base", 1_000_000.0)},
        },
    }


def _layer_inputs(fields: GgufFields, _: Config) -> Config:
    """Inputs of each layer of its own, and the last layers, which read the keys of earlier ones."""
    table = fields.header.tensors.get("per_layer_token_embd.weight")
    return {
        "num_kv_shared_layers": fields.own("attention.shared_kv_layers", int, "a whole number"),
        "hidden_size_per_layer_input": 0 if table is None else fields.size("embedding_length_per_layer_input"),
        **({} if table is None else {"vocab_size_per_layer_input": table.shape[0]}),
    }


def _gemma_3n_streams(fields: GgufFields, _: Config) -> Config:
    rank = fields.header.tensors.get("blk.0.laurel_l.weight")
    # In deviations from the mean, where config.json has shares. Layers without a share have minus infinity.
    scales = fields.own("activation_sparsity_scale", list, "a list of numbers")
    if rank is None or not all(isinstance(each, float) for each in scales):
        raise fields.error("blk.0.laurel_l.weight is missing, or activation_sparsity_scale is no list of numbers")
    return {
        "activation_sparsity_pattern": [round(NormalDist().cdf(each), 6) for each in scales],
        "altup_num_inputs": fields.size("altup.num_inputs"),
        "altup_active_idx": fields.own("altup.active_idx", int, "a whole number"),
        "altup_correct_scale": has(fields, "altup_correct_scale.weight"),
        "laurel_rank": rank.shape[0],
        "final_logit_softcapping": fields.positive("final_logit_softcapping", 30.0),
    }


def _gemma_4(fields: GgufFields) -> Config:
    """Layers without a window have other heads, whose values may be their keys. Sizes that differ among the layers of
    one kind are refused with the tensors that do not fit."""
    count = num_layers(fields)
    config: Config = {"model_type": "gemma4_text", "num_hidden_layers": count, "hidden_activation": _GELU}
    config |= windows(6, may_differ=True)(fields, config) | _layer_inputs(fields, config)
    sizes = {end: fields.size(f"attention.key_length{end}") for end in ("", "_swa")}
    for name in (f"{name}{end}" for name in ("attention.value_length", "rope.dimension_count") for end in sizes):
        if fields.size(name) != (size := sizes["_swa" if name.endswith("_swa") else ""]):
            raise fields.error(f"{name} is not {size}, the size of keys; that is not read")
    kv_heads = dict(zip(config["layer_types"], fields.sizes("attention.head_count_kv", count), strict=True))
    of_full = {"head_dim": sizes[""], "num_key_value_heads": kv_heads.get(FULL)}
    full = [index for index, kind in enumerate(config["layer_types"]) if kind == FULL]
    with_values = {
        name.split(".")[1] for name in fields.header.tensors if name.endswith((".attn_v.weight", "_qkv.weight"))
    }
    inner = fields.sizes("feed_forward_length", count)
    config |= {
        "hidden_size": fields.size("embedding_length"),
        "intermediate_size": inner[0],
        "use_double_wide_mlp": inner[-1] != inner[0],
        "num_attention_heads": fields.size("attention.head_count"),
        "num_key_value_heads": kv_heads.get(SLIDING, kv_heads.get(FULL)),
        "head_dim": sizes["_swa"],
        "per_layer_config": {str(index): of_full for index in full},
        # All layers without a window alike; the first has keys of its own.
        "attention_k_eq_v": bool(full) and str(full[0]) not in with_values,
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.positive(RMS_EPS),
        "final_logit_softcapping": None,
        **numbers(final_logit_softcapping="final_logit_softcapping")(fields, config),
        "rope_theta": None,
        "rope_scaling": _proportional(fields, sizes[""]),
        "enable_moe_block": has(fields, "ffn_gate_inp.weight"),
    }
    config |= _gemma_3_rotations(fields, config)
    return config | (_GEMMA_4_EXPERTS(fields, config) if config["enable_moe_block"] else {})


def _proportional(fields: GgufFields, head_dim: int) -> Config:
    """The rotation that turns only the first pairs of a head: the frequencies of the others have huge divisors."""
    if (kind := fields.own("rope.scaling.type", str, "a text", "none")) != "none":
        raise fields.error(f"rope.scaling.type is {kind!r:.80}, which is not read in models of {fields.architecture}")
    factors = read_factors(fields, ROPE_FACTORS, head_dim // 2)
    turned = sum(each == 1 for each in factors)
    if not all(each == 1 if index < turned else each > 1e29 for index, each in enumerate(factors)):
        raise fields.error(f"{ROPE_FACTORS} is not 1 for the first pairs of a head and 1e30 for others")
    return {"rope_type": "proportional", "partial_rotary_factor": 2 * turned / head_dim}


def _gpt2(fields: GgufFields) -> Config:
    return {
        "model_type": "gpt2",
        "n_embd": fields.size("embedding_length"),
        "n_inner": fields.size("feed_forward_length"),
        "n_layer": fields.size("block_count"),
        "n_head": fields.size("attention.head_count"),
        "n_positions": fields.size("context_length"),
        "layer_norm_epsilon": fields.positive("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


_GRANITE = {
    "attention_multiplier": "attention.scale",
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale",
}


def _granite_factors(fields: GgufFields, _: Config) -> Config:
    # The field says more in this architecture.
    if not fields.flag(f"{fields.architecture}.rope.scaling.finetuned", True):
        raise fields.error("it has no positions (rope.scaling.finetuned), which is not read")
    return {name: fields.positive(key) for name, key in _GRANITE.items() if fields.has(key)}


_granite = row("granite", _granite_factors, _GATE_BIAS)
_GRANITE_EXPERTS = experts("num_local_experts", shared_width="shared_intermediate_size")


def _granite_moe(fields: GgufFields) -> Config:
    model_type = "granitemoeshared" if has(fields, "ffn_down_shexp.weight") else "granitemoe"
    return row(model_type, _granite_factors, _GRANITE_EXPERTS)(fields)


def _minicpm(fields: GgufFields) -> Config:
    """Granite whose scores have the usual scale."""
    config = _granite(fields)
    if missing := [key for name, key in _GRANITE.items() if name not in config and key != "attention.scale"]:
        raise fields.error(f"{', '.join(missing)} are missing, as in old files of {fields.architecture}; convert again")
    return config | {"attention_multiplier": config["head_dim"] ** -0.5}


def _olmo_2(fields: GgufFields) -> Config:
    """OLMo 2, and OLMo 3, which has windows and scales the rotation only in the other layers."""
    if not fields.has("attention.sliding_window"):
        return row("olmo2")(fields)
    config = row("olmo3", windows(4))(fields)
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    plain = {"rope_type": "default", "rope_theta": theta}
    return config | {"rope_parameters": {SLIDING: plain, FULL: plain | (scaling or {})}}


def _mistral_3(fields: GgufFields) -> Config:
    """Ministral 3, whose queries grow, and the language models of Mistral 3, whose queries do not."""
    if not fields.has("attention.temperature_scale"):
        return row("mistral", _NO_WINDOW)(fields)
    config = row("ministral3", _NO_WINDOW)(fields)
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling")
    if scaling is None or scaling["rope_type"] != "yarn":
        raise fields.error("attention.temperature_scale is read only with a rotation of the type yarn")
    growth = {"llama_4_scaling_beta": fields.positive("attention.temperature_scale")}
    return config | {"rope_parameters": scaling | {"rope_theta": theta} | _magnitudes(fields, 1.0) | growth}


def _magnitudes(fields: GgufFields, unit: float) -> Config:
    """The parameters of YaRN's factor on scores. The file has `unit` times the one that all models have for both."""
    weight = fields.number("rope.scaling.yarn_log_multiplier", 0.0)
    return {"mscale": round(weight / unit, 6), "mscale_all_dim": round(weight / unit, 6)} if weight else {}


def _rotates(fields: GgufFields, config: Config) -> Config:
    """Only the model of 13B has no rotation; llama.cpp knows it by its layers."""
    if config["num_hidden_layers"] == 40:
        raise fields.error("Baichuan 13B has ALiBi in place of a rotation, which is not read")
    return {}


def _half_mlp(_: GgufFields, config: Config) -> Config:
    """The field counts gate and up."""
    return {"intermediate_size": config["intermediate_size"] // 2}


def _ntk_base(fields: GgufFields, config: Config) -> Config:
    head_dim, alpha = config["head_dim"], fields.positive("rope.scaling.alpha", 1.0)
    return {"rope_theta": config["rope_theta"] * alpha ** (head_dim / (head_dim - 2))}


def _no_sections(fields: GgufFields, _: Config) -> Config:
    if fields.has("rope.dimension_sections"):
        raise fields.error("the language model of a vision model (rope.dimension_sections) is not read")
    return {}


def _parallel_blocks(fields: GgufFields, _: Config) -> Config:
    return {"use_parallel_residual": not has(fields, "ffn_norm.weight")}


def _ernie_layers(fields: GgufFields, _: Config) -> Config:
    return {
        "moe_layer_start_index": first_dense_layers(fields),
        "moe_layer_interval": fields.size("interleave_moe_layer_step", 1),
    }


def _gpt_oss_rotation(_: GgufFields, config: Config) -> Config:
    theta, scaling = config.pop("rope_theta"), config.pop("rope_scaling") or {"rope_type": "default"}
    # No field says that the bounds of YaRN's ramp are not rounded.
    return {"rope_parameters": scaling | {"rope_theta": theta, "truncate": False}}


def _latent_attention(fields: GgufFields) -> Config:
    """The configuration of a model with latent attention, without its MLPs."""
    if not fields.has("attention.kv_lora_rank"):
        raise fields.error("attention.kv_lora_rank is missing; only models with latent attention are read")
    rotated = fields.size("rope.dimension_count")
    key = fields.size("attention.key_length_mla", fields.size("attention.key_length"))
    if rotated >= key:
        raise fields.error(f"rope.dimension_count is {rotated}, of keys of {key} dimensions")
    heads, width = fields.size("attention.head_count"), fields.size("embedding_length")
    scaling = rope_scaling(fields, rotated)
    if scaling is not None and scaling["rope_type"] == "yarn":
        # The weight of the logarithm has a factor of 0.1 in files of these architectures.
        scaling |= _magnitudes(fields, 0.1)
    return {
        "hidden_size": width,
        "num_hidden_layers": num_layers(fields),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "q_lora_rank": fields.size("attention.q_lora_rank") if fields.has("attention.q_lora_rank") else None,
        "kv_lora_rank": fields.size("attention.kv_lora_rank"),
        "qk_nope_head_dim": key - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": fields.size("attention.value_length_mla", fields.size("attention.value_length", width // heads)),
        "max_position_embeddings": fields.size("context_length"),
        "rms_norm_eps": fields.positive(RMS_EPS),
        "hidden_act": "silu",
        "rope_theta": fields.positive("rope.freq_base", 10_000.0),
        "rope_scaling": scaling,
        "attention_bias": has_bias(fields, "attn_kv_a_mqa"),
    }


def _deepseek_2(fields: GgufFields) -> Config:
    """DeepSeek V2, V3 and what has their latent attention: Kimi K2, GLM-4.7-Flash, Youtu."""
    config = _latent_attention(fields)
    if not has(fields, "ffn_down_exps.weight"):
        width = fields.size("feed_forward_length")
        return {"model_type": "youtu", "intermediate_size": width} | config
    # Files of before 2025 do not say how experts are chosen; in all of V2 that is a softmax.
    has_correction = has(fields, "exp_probs_b.bias") or has(fields, "exp_probs_b.weight")
    gating = fields.own("expert_gating_func", int, "a whole number", SIGMOID if has_correction else SOFTMAX)
    config |= deepseek_experts(gating=gating)(fields, config)
    config["intermediate_size"] = fields.size("feed_forward_length", config["moe_intermediate_size"])
    if gating == SIGMOID:
        return {"model_type": "deepseek_v3"} | config
    if gating != SOFTMAX or config["norm_topk_prob"]:
        raise fields.error(f"experts with expert_gating_func {gating} and normalized weights are not read")
    method = "group_limited_greedy" if config["n_group"] > 1 else "greedy"
    return {"model_type": "deepseek_v2", "topk_method": method} | config


def _minicpm_3(fields: GgufFields) -> Config:
    """The factors are in no field."""
    config = {"model_type": "minicpm3", **_latent_attention(fields), "scale_emb": 12}
    config |= {"scale_depth": 1.4, "dim_model_base": 256, "intermediate_size": fields.size("feed_forward_length")}
    return config | _long_rope(fields, config)


def _plm(fields: GgufFields) -> Config:
    activation = {"hidden_act": "relu2", "intermediate_size": fields.size("feed_forward_length")}
    return {"model_type": "plm", **_latent_attention(fields), **activation}


def _qwen_3_next(fields: GgufFields) -> Config:
    """Qwen3.5 by another name, since files have the layers' inputs apart as it has; old files have them together."""
    return _qwen_with_states("qwen3_next" if has(fields, "ssm_in.weight") else "qwen3_5_moe_text", *_QWEN_EXPERTS)(
        fields
    )


def _qwen_with_states(model_type: str, *parts: Part) -> Callable[[GgufFields], Config]:
    return row(model_type, delta_rule, *parts, rotates_partly=True)


def _short_convolutions(fields: GgufFields, config: Config) -> Config:
    """Layers without attention. The field has the inner size as it is."""
    return {
        "layer_types": [FULL if each else "conv" for each in layers_with_keys(fields)],
        "conv_L_cache": fields.size("shortconv.l_cache"),
        "conv_bias": False,
        "block_auto_adjust_ff_dim": False,
        **_no_windows(fields, config),
    }


def _lfm_2_experts(fields: GgufFields, config: Config) -> Config:
    return {
        **experts(width="moe_intermediate_size", gating=SIGMOID)(fields, config),
        "num_dense_layers": first_dense_layers(fields),
        "norm_topk_prob": True,
        "routed_scaling_factor": fields.positive("expert_weights_scale", 1.0),
        "use_expert_bias": has(fields, "exp_probs_b.bias"),
    }


def _granite_hybrid(fields: GgufFields) -> Config:
    """Granite with layers of Mamba 2; without experts, its MLP has the names of the one that all tokens have. Bamba is
    written as such a model without factors; half of each of its heads rotates, which not all files say."""
    config = row("granitemoehybrid", mamba_2, rotates_partly=True)(fields)
    part = config.pop("partial_rotary_factor")
    if not fields.has("attention.scale"):
        config |= {"attention_multiplier": config["head_dim"] ** -0.5}
        part = 0.5
    config["rotary_dim"] = int(config["head_dim"] * part)
    config |= {name: fields.positive(key) for name, key in _GRANITE.items() if fields.has(key)}
    config["layer_types"] = ["attention" if each else "mamba" for each in layers_with_keys(fields)]
    rotates = fields.flag(f"{fields.architecture}.rope.scaling.finetuned", True)
    config["position_embedding_type"] = "rope" if rotates else None
    if has(fields, "ffn_down_exps.weight"):
        return config | _GRANITE_EXPERTS(fields, config)
    inner = fields.size("expert_shared_feed_forward_length", config["intermediate_size"])
    return config | {"num_local_experts": 0, "shared_intermediate_size": inner}


def _falcon_h1(fields: GgufFields, config: Config) -> Config:
    """The weights of the file have all factors in them; the first norm is of the results with gates."""
    if "output.weight" not in fields.header.tensors:
        raise fields.error("it has no output.weight, so that the factor of the logits is not known")
    return {
        **mamba_2(fields, config),
        "mamba_rms_norm": has(fields, "ssm_norm.weight"),
        "mamba_norm_before_gate": False,
        "projectors_bias": has_bias(fields, "ssm_out"),
        "mlp_bias": has_bias(fields, "ffn_gate"),
    }


def _nemotron_h(fields: GgufFields) -> Config:
    """Layers of one part each, by the heads of key and the inner size that they have."""
    config = row("nemotron_h", activation=("mlp_hidden_act", "relu2"), eps=("layer_norm_epsilon", RMS_EPS))(fields)
    inner = fields.sizes("feed_forward_length", fields.size("block_count"), minimum=0)
    of_mlp = "moe" if has(fields, "ffn_down_exps.weight") else "mlp"
    parts = zip(layers_with_keys(fields), inner, strict=False)
    types = [FULL if attends else of_mlp if size else "mamba" for attends, size in parts]
    sizes = mamba_2(fields, config)
    config |= {
        "layers_block_type": types,
        "mamba_num_heads": sizes["mamba_n_heads"],
        "mamba_head_dim": sizes["mamba_d_head"],
        "n_groups": sizes["mamba_n_groups"],
        "ssm_state_size": sizes["mamba_d_state"],
        "conv_kernel": sizes["mamba_d_conv"],
        "use_conv_bias": sizes["mamba_conv_bias"],
        "use_bias": sizes["mamba_proj_bias"],
        "mlp_bias": has_bias(fields, "ffn_up"),
    }
    if of_mlp == "mlp":
        return config
    if has(fields, "ffn_latent_down.weight"):
        raise fields.error("experts that read latents (ffn_latent_down) are not read")
    config |= deepseek_experts()(fields, config)
    shared = fields.size("expert_shared_feed_forward_length", config["moe_intermediate_size"])
    return config | {"moe_shared_expert_intermediate_size": shared}


# The converter writes it for all models without attention.
_ANY_LENGTH = 1 << 20


def _only_states(model_type: str, fields: GgufFields) -> Config:
    length = fields.size("context_length")
    return {
        "model_type": model_type,
        "hidden_size": fields.size("embedding_length"),
        "num_hidden_layers": fields.size("block_count"),
        "layer_norm_epsilon": fields.positive(RMS_EPS),
        "intermediate_size": fields.size("ssm.inner_size"),
        "state_size": fields.size("ssm.state_size"),
        "conv_kernel": fields.size("ssm.conv_kernel"),
        "use_conv_bias": has_bias(fields, "ssm_conv1d"),
        "use_bias": has_bias(fields, "ssm_in"),
        **({} if length == _ANY_LENGTH else {"max_position_embeddings": length}),
    }


def _mamba(fields: GgufFields) -> Config:
    """Mamba, and Falcon Mamba, which has norms. Their epsilon is in no field."""
    normed = fields.flag(f"{fields.architecture}.ssm.dt_b_c_rms", False)
    sizes = _only_states("falcon_mamba" if normed else "mamba", fields)
    return sizes | {"time_step_rank": fields.size("ssm.time_step_rank")}


def _mamba_2(fields: GgufFields) -> Config:
    heads = fields.size("ssm.time_step_rank")
    sizes = {"num_heads": heads, "head_dim": of_each_head(fields, heads), "n_groups": fields.size("ssm.group_count")}
    return _only_states("mamba2", fields) | sizes


def _in_period(fields: GgufFields, name: str, found: list[int], count: int) -> Config:
    """The period and the offset of layers of a kind."""
    first, *others = found or [count]
    period = others[0] - first if others else count
    if not found or found != list(range(first, count, period)) or first >= period:
        raise fields.error(f"its layers of the kind {name} are {found}, which are not one in each period")
    return {f"{name}_layer_offset": first, f"{name}_layer_period": period}


def _jamba(fields: GgufFields) -> Config:
    config = row("jamba")(fields)
    count, width = config["num_hidden_layers"], config["hidden_size"]
    config |= {
        "mamba_expand": fields.size("ssm.inner_size") // width,
        "mamba_d_state": fields.size("ssm.state_size"),
        "mamba_d_conv": fields.size("ssm.conv_kernel"),
        "mamba_dt_rank": fields.size("ssm.time_step_rank"),
        "mamba_conv_bias": has_bias(fields, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(fields, "ssm_in"),
    }
    attending = [index for index, attends in enumerate(layers_with_keys(fields)) if attends]
    config |= _in_period(fields, "attn", attending, count)
    tensors = fields.header.tensors
    if not (sparse := [index for index in range(count) if f"blk.{index}.ffn_gate_inp.weight" in tensors]):
        return config | {"num_experts": 1}
    return config | experts()(fields, config) | _in_period(fields, "expert", sparse, count)


_QWEN_EXPERTS = _qwen_experts(normalized=True)
_qwen_2 = row("qwen2", _no_windows)
_qwen_3 = row("qwen3", _no_windows)
_glm_4_moe = row("glm4_moe", deepseek_experts(), _HEAD_NORMS, rotates_partly=True)
_deepseek = row("deepseek", deepseek_experts(gating=SOFTMAX))
_qwen_3_moe = row("qwen3_moe", *_QWEN_EXPERTS)
_LOCAL_EXPERTS = experts("num_local_experts")
_GEMMA_4_EXPERTS = experts(chosen="top_k_experts", width="moe_intermediate_size")
_NUMBERED = ("num_experts", "num_shared_experts")
# A file loses the window, if the model has one.
_starcoder_2 = row(
    "starcoder2",
    renamed("use_bias", "attention_bias"),
    _NO_WINDOW,
    activation=("hidden_act", _GELU),
    eps=("norm_epsilon", LAYER_NORM_EPS),
)
_NAMED_GELU = ("hidden_activation", _GELU)

CONFIGS: Mapping[str, Callable[[GgufFields], Config]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": _qwen_2,
    "qwen3": _qwen_3,
    # The language models of vision models: their rotation is the usual one in texts.
    "qwen2vl": _qwen_2,
    "qwen3vl": _qwen_3,
    "qwen2moe": row("qwen2_moe", *_qwen_experts(normalized=False)),
    "qwen3moe": _qwen_3_moe,
    "qwen3vlmoe": _qwen_3_moe,
    "gemma": row("gemma", activation=("hidden_act", _GELU)),
    "gemma2": row("gemma2", _query_scale(46), _gemma_2_windows, activation=_NAMED_GELU),
    "gemma3": row(
        "gemma3_text",
        _query_scale(62),
        windows(6, may_differ=True),
        _gemma_3_rotations,
        numbers(final_logit_softcapping="final_logit_softcapping"),
        activation=_NAMED_GELU,
    ),
    "gemma3n": row(
        "gemma3n_text",
        windows(5, may_differ=True),
        _gemma_3_rotations,
        _layer_inputs,
        _gemma_3n_streams,
        activation=_NAMED_GELU,
        mlps_differ=True,
    ),
    "gemma4": _gemma_4,
    "phi3": row("phi3", _long_rope, rotates_partly=True),
    "gpt2": _gpt2,
    "granite": _granite,
    "granitemoe": _granite_moe,
    "minicpm": _minicpm,
    # Norms have the same epsilon in all models.
    "olmo": row("olmo", _CLAMPED, eps=_CENTERED_EPS),
    "olmo2": _olmo_2,
    "olmoe": row("olmoe", _CLAMPED, experts(), {"norm_topk_prob": False}),
    # Each fourth layer has no rotation; no field says so.
    "smollm3": row("smollm3", {"no_rope_layer_interval": 4, "use_sliding_window": False, **_NO_WINDOW}, _GATE_BIAS),
    "seed_oss": row("seed_oss", biases("attention_out_bias", "attn_output"), _GATE_BIAS),
    # Positions in texts are the same in all sections of the rotation.
    "qwen35": _qwen_with_states("qwen3_5_text", _no_windows),
    "qwen35moe": _qwen_with_states("qwen3_5_moe_text", *_QWEN_EXPERTS),
    "qwen3next": _qwen_3_next,
    "lfm2": row("lfm2", _short_convolutions, eps=("norm_eps", RMS_EPS)),
    "lfm2moe": row("lfm2_moe", _short_convolutions, _lfm_2_experts, eps=("norm_eps", RMS_EPS)),
    "granitehybrid": _granite_hybrid,
    "falcon-h1": row("falcon_h1", _falcon_h1),
    "mamba": _mamba,
    "mamba2": _mamba_2,
    "jamba": _jamba,
    "nemotron_h": _nemotron_h,
    "nemotron_h_moe": _nemotron_h,
    "mistral3": _mistral_3,
    "chatglm": row("glm", rotates_partly=True),
    "glm4": row("glm4", _no_sections, rotates_partly=True),
    "glm4moe": _glm_4_moe,
    "bailingmoe2": _glm_4_moe,
    "exaone": _PLAIN_LLAMA,
    "exaone4": row("exaone4", windows(4)),
    "exaone-moe": row("exaone_moe", deepseek_experts(*_NUMBERED), windows(4)),
    "hy_v3": row("hy_v3", deepseek_experts(*_NUMBERED, "router_scaling_factor"), {"mlp_bias": False}),
    "command-r": row("cohere", numbers(logit_scale="logit_scale"), _HEAD_NORMS, eps=_CENTERED_EPS),
    "cohere2": row("cohere2", numbers(logit_scale="logit_scale"), windows(4), eps=_CENTERED_EPS),
    "starcoder2": _starcoder_2,
    "codeshell": _starcoder_2,
    "stablelm": row(
        "stablelm",
        renamed("use_qkv_bias", "attention_bias"),
        _parallel_blocks,
        presence("qk_layernorm", "attn_q_norm.weight"),
        eps=_CENTERED_EPS,
        rotates_partly=True,
    ),
    "ernie4_5": row("ernie4_5", renamed("use_bias", "attention_bias")),
    "ernie4_5-moe": row(
        "ernie4_5_moe",
        renamed("use_bias", "attention_bias"),
        experts("moe_num_experts", chosen="moe_k", width="moe_intermediate_size", num_shared="moe_num_shared_experts"),
        _ernie_layers,
    ),
    "hunyuan-dense": row("hunyuan_v1_dense"),
    "maincoder": row("hunyuan_v1_dense"),
    "hunyuan_vl": row("hunyuan_v1_dense", _ntk_base),
    "hunyuan-moe": row("hunyuan_v1_moe", experts(chosen="moe_topk")),
    "phimoe": row(
        "phimoe",
        _long_rope,
        _LOCAL_EXPERTS,
        lambda fields, _: {"lm_head_bias": "output.bias" in fields.header.tensors},
        rotates_partly=True,
    ),
    "gpt-oss": row("gpt_oss", windows(2), _LOCAL_EXPERTS, _gpt_oss_rotation),
    "deepseek": _deepseek,
    "bailingmoe": _deepseek,
    "deepseek2-ocr": _deepseek,
    "deepseek2": _deepseek_2,
    "minicpm3": _minicpm_3,
    "plm": _plm,
    "minimax-m2": row("minimax_m2", experts("num_local_experts", gating=SIGMOID), rotates_partly=True),
    "dots1": row("dots1", deepseek_experts(), _NO_WINDOW),
    "nemotron": row("nemotron", _UP_BIAS, activation=_RELU_2, eps=("norm_eps", LAYER_NORM_EPS), rotates_partly=True),
    "arcee": row("arcee", _UP_BIAS, activation=_RELU_2),
    "jais2": row("jais2", _UP_BIAS, activation=_RELU_2, eps=_CENTERED_EPS),
    "baichuan": row("llama", _rotates, _GATE_BIAS),
    # Qwen 1.
    "qwen": row("qwen2", _half_mlp, _no_windows),
    # LLaMA with layer norms.
    "orion": row(
        "stablelm",
        {"use_qkv_bias": False, "use_parallel_residual": False, "qk_layernorm": False},
        eps=_CENTERED_EPS,
        rotates_partly=True,
    ),
    "paddleocr": _PLAIN_LLAMA,
    "internlm2": _PLAIN_LLAMA,
    "pangu-embedded": _PLAIN_LLAMA,
    "xverse": _PLAIN_LLAMA,
}
"""The configuration of a file of each architecture; it raises ConfigurationError."""
WITHOUT_ATTENTION = ("mamba", "mamba2")
