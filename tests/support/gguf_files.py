"""GGUF files of small models, written with the package `gguf` by its own table of names."""

import functools
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
import torch
from safetensors.torch import load_file

_NUMBERS = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "embedding_length": ("hidden_size", "n_embd"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "attention.key_length": ("head_dim",),
    "attention.sliding_window": ("sliding_window",),
    "attention.q_lora_rank": ("q_lora_rank",),
    "attention.kv_lora_rank": ("kv_lora_rank",),
    "expert_count": ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"),
    "expert_used_count": ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace", "moe_layer_start_index"),
    "interleave_moe_layer_step": ("moe_layer_interval",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "altup.num_inputs": ("altup_num_inputs",),
    "ssm.conv_kernel": ("linear_conv_kernel_dim", "mamba_d_conv", "conv_kernel"),
    "ssm.state_size": ("linear_key_head_dim", "mamba_d_state", "ssm_state_size", "state_size"),
    "ssm.group_count": ("linear_num_key_heads", "mamba_n_groups", "n_groups"),
    "ssm.time_step_rank": (
        "linear_num_value_heads",
        "mamba_n_heads",
        "mamba_num_heads",
        "mamba_dt_rank",
        "time_step_rank",
    ),
    "shortconv.l_cache": ("conv_L_cache",),
    "altup.active_idx": ("altup_active_idx",),
}
_FACTORS = {
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "attention.scale": ("attention_multiplier",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "attention.clamp_kqv": ("clip_qkv",),
    "expert_weights_scale": ("routed_scaling_factor",),
}
_ARCHITECTURES = {
    "mixtral": "llama",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "gemma3_text": "gemma3",
    "gemma3n_text": "gemma3n",
    "gemma4_text": "gemma4",
    "ministral3": "mistral3",
    "granitemoeshared": "granitemoe",
    "olmo3": "olmo2",
    "glm": "chatglm",
    "glm4_moe": "glm4moe",
    "solar_open": "glm4moe",
    "cohere": "command-r",
    "ernie4_5_moe": "ernie4_5-moe",
    "hunyuan_v1_dense": "hunyuan-dense",
    "hunyuan_v1_moe": "hunyuan-moe",
    "gpt_oss": "gpt-oss",
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"), "deepseek2"),
    "minimax_m2": "minimax-m2",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "lfm2_moe": "lfm2moe",
    "granitemoehybrid": "granitehybrid",
    "falcon_h1": "falcon-h1",
    "falcon_mamba": "mamba",
    "bamba": "granitehybrid",
    "exaone_moe": "exaone-moe",
}
"""Architectures whose name is not the type of the model."""
_PERMUTED = (
    *("llama", "mistral3", "granite", "granitemoe", "granitehybrid", "olmo", "smollm3", "arcee", "internlm2"),
    *("xverse", "baichuan", "maincoder", "deepseek", "bailingmoe"),
)
_SIGMOIDS = (
    "bailingmoe2",
    "deepseek_v3",
    "glm4_moe_lite",
    "glm4_moe",
    "solar_open",
    "dots1",
    "minimax_m2",
    "exaone_moe",
    "lfm2_moe",
    "nemotron_h_moe",
)
_NEMOTRON = ("nemotron_h", "nemotron_h_moe")
_ONLY_STATES = ("mamba", "mamba2")
_DELTA_RULES = ("qwen35", "qwen35moe", "qwen3next")
_WITH_STATES = (
    *("lfm2", "lfm2moe", "granitehybrid", "falcon-h1", "jamba"),
    *(*_DELTA_RULES, *_NEMOTRON, *_ONLY_STATES),
)
_MOST_LAYERS = 8
_EXPERT = re.compile(r"(.*(?:experts|layernorm\.norms|altup_\w+))\.\d+\.(.*)")
_WITHOUT_KIND = ("correct_output_scale", "layer_scalar", ".experts.down_proj", ".experts.gate_up_proj")
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")


_Stored = tuple[np.ndarray, gguf.GGMLQuantizationType | None]
Quantize = Callable[[str, np.ndarray], _Stored]


def write_gguf(
    file: Path,
    directory: Path,
    *,
    quantization: gguf.GGMLQuantizationType | Quantize = gguf.GGMLQuantizationType.F32,
    pre: str = "gpt-2",
    further: dict[str, Any] | None = None,
    template: str | None = None,
    tensors_per_part: int = 0,
    fused: bool = False,
    merged_latents: bool = False,
    joined_inputs: bool = False,
) -> Path:
    """Writes the model of a directory to `file` as llama.cpp would; returns the file, or the first of its parts.

    Args:
        quantization: type of matrices, or a function of a matrix's name in the file; vectors stay float32.
        further: additional or changed metadata, by whole keys, None for none; "rope" are the factors of rotations.
        fused: joins tensors as the converter's --fuse-qkv and --fuse-gate-up-exps do.
        merged_latents: writes latent attention as the converter did before 2025: the layer that makes keys and values
            in one tensor, and sizes of heads.
        joined_inputs: writes all inputs of delta rules in one tensor, as the converter did before 2026.
    """
    config = json.loads((directory / "config.json").read_text())
    model_type: str = config["model_type"]
    architecture = _ARCHITECTURES.get(model_type, model_type)
    further = dict(further or {})
    factors = further.pop("rope", None)
    writer = gguf.GGUFWriter(file, architecture, split_max_tensors=tensors_per_part)
    writer.add_name(directory.name)
    if config.get("use_sliding_window") is False:
        config["sliding_window"] = None
    numbers = numbers_of(config)
    if "feed_forward_length" not in numbers:
        numbers["feed_forward_length"] = 4 * config["n_embd"]
    set_fields(writer, numbers, f"{architecture}.")
    if "rms_norm_eps" in config:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    else:
        names = ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps")
        writer.add_layer_norm_eps(next((config[name] for name in names if name in config), 1e-5))
    if architecture not in ("gpt2", "jamba", *_NEMOTRON, *_ONLY_STATES):
        rope = config.get("rope_parameters") or config
        writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    _add_rotation(writer, architecture, config)
    factors_in_config = numbers_of(config, _FACTORS)
    set_fields(writer, {key: float(value) for key, value in factors_in_config.items()}, f"{architecture}.")
    if model_type in _SIGMOIDS:
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if config.get("norm_topk_prob") and model_type not in ("deepseek_v2", "qwen3_moe"):
        writer.add_expert_weights_norm(True)
    has_windows = "sliding_attention" in (config.get("layer_types") or ())
    if has_windows and architecture in ("olmo2", "exaone4", "exaone-moe"):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config["layer_types"]])
    if architecture in _WITH_STATES:
        _add_states(writer, architecture, config)
    if architecture in ("gemma3n", "gemma4"):
        _add_shared_keys(writer, architecture, config)
    if architecture in ("deepseek2", "minicpm3", "plm"):
        _add_latents(writer, architecture, config, merged_latents)
    _add_tokenizer(writer, directory, pre)
    if template is not None:
        writer.add_chat_template(template)
    set_fields(writer, further)
    if architecture == "gemma4" and factors is None:
        size = writer.kv_data[0]["gemma4.rope.dimension_count"].value
        turned = int(size * config["rope_parameters"]["full_attention"]["partial_rotary_factor"] / 2)
        factors = [1.0] * turned + [1e30] * (size // 2 - turned)
    if factors is not None:
        writer.add_tensor("rope_freqs.weight", np.array(factors, np.float32))
    config |= {"merged_latents": merged_latents, "joined_inputs": joined_inputs}
    tensors = dict(_stored_tensors(architecture, directory, config, quantization))
    for name, (data, raw) in (_fuse(tensors) if fused else tensors).items():
        writer.add_tensor(name, np.ascontiguousarray(data), raw_dtype=raw)
    write_and_close(writer)
    return next(iter(sorted(file.parent.glob(f"{file.stem}-00001-of-*.gguf"))), file)


def numbers_of(config: Mapping[str, Any], table: Mapping[str, Sequence[str]] = _NUMBERS) -> dict[str, Any]:
    """The values of a configuration that are not None, by the names in files."""
    found = ((key, [config[name] for name in names if config.get(name) is not None]) for key, names in table.items())
    return {key: values[0] for key, values in found if values}


def write_and_close(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def set_fields(writer: gguf.GGUFWriter, values: Mapping[str, Any], prefix: str = "") -> None:
    """Adds fields or replaces them; None removes one."""
    kinds = {
        bool: writer.add_bool,
        str: writer.add_string,
        int: writer.add_uint32,
        float: writer.add_float32,
        list: writer.add_array,
    }
    for key, value in values.items():
        # The writer takes each key once.
        writer.kv_data[0].pop(f"{prefix}{key}", None)
        if value is not None:
            kinds[type(value)](f"{prefix}{key}", value)


def _add_rotation(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """The part of each head that turns, YaRN, and Phi-3's factors for short and long texts."""
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    share = rope.get("partial_rotary_factor")
    if share is not None or config.get("rotary_dim") is not None:
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        writer.add_rope_dimension_count(config["rotary_dim"] if share is None else int(head_dim * share))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        if "mscale_all_dim" in rope:
            unit = 0.1 if architecture == "deepseek2" else 1.0
            writer.add_rope_scaling_yarn_log_mul(unit * rope["mscale_all_dim"])
        if "llama_4_scaling_beta" in rope:
            writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])
    if rope.get("rope_type") != "longrope":
        return
    length, original = config["max_position_embeddings"], rope["original_max_position_embeddings"]
    writer.add_rope_scaling_orig_ctx_len(original)
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(length / original) / math.log(original)))
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], np.float32))


def _add_shared_keys(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """The fields of Gemma 3n and 4, whose layers may differ."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_sliding_window_pattern(slides)
    writer.add_rope_freq_base_swa(config["rope_parameters"]["sliding_attention"]["rope_theta"])
    if architecture == "gemma3n":
        shares = torch.tensor(config["activation_sparsity_pattern"])
        writer.add_activation_sparsity_scale(torch.distributions.Normal(0, 1).icdf(shares).tolist())
        return
    own, (full, *_) = config["head_dim"], config["per_layer_config"].values()
    size, count, inner = full["head_dim"], len(slides) - config["num_kv_shared_layers"], config["intermediate_size"]
    fields: dict[str, Any] = {f"attention.{name}_length": size for name in ("key", "value")} | {
        "rope.dimension_count": size
    }
    fields |= {f"{name}_swa": own for name in fields}
    if of_full := full.get("num_key_value_heads"):
        fields["attention.head_count_kv"] = [config["num_key_value_heads"] if each else of_full for each in slides]
    if config["use_double_wide_mlp"]:
        fields["feed_forward_length"] = [inner * (1 + (index >= count)) for index in range(len(slides))]
    set_fields(writer, fields, f"{architecture}.")


def _add_states(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """The layers that keep a state, and sizes of their parts."""
    types = config.get("layer_types") or config.get("layers_block_type")
    count = len(types) if types else config["num_hidden_layers"]
    types = types or ["full_attention"] * count
    if (given := config.get("attn_layer_indices")) is not None:
        types = ["attention" if index in given else "mamba" for index in range(count)]
    if architecture == "jamba":
        offset, period = config["attn_layer_offset"], config["attn_layer_period"]
        types = ["attention" if index % period == offset else "mamba" for index in range(count)]
    attends = [kind in ("full_attention", "attention") for kind in types]
    fields: dict[str, Any] = {}
    if architecture in _DELTA_RULES:
        fields["attention.recurrent_layers"] = [not each for each in attends]
        fields["ssm.inner_size"] = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    else:
        fields["attention.head_count_kv"] = [config["num_key_value_heads"] * each for each in attends]
    if architecture in ("lfm2", "lfm2moe"):
        inner = config.get("block_ff_dim", config["intermediate_size"])
        fields["feed_forward_length"] = inner if architecture == "lfm2moe" else -(-2 * inner // 3 // 256) * 256
        fields["attention.layer_norm_rms_epsilon"] = config["norm_eps"]
    if "mamba_d_conv" in config:
        fields["ssm.inner_size"] = config.get("mamba_d_ssm") or config["mamba_expand"] * config["hidden_size"]
        if "shared_intermediate_size" in config:
            fields["expert_shared_feed_forward_length"] = config["shared_intermediate_size"]
        fields["rope.scaling.finetuned"] = config.get("position_embedding_type", "rope") == "rope"
    if architecture in _NEMOTRON:
        fields["block_count"] = len(types)
        fields["ssm.inner_size"] = config["mamba_num_heads"] * config["mamba_head_dim"]
        inner = config["moe_intermediate_size"] if "moe" in types else config["intermediate_size"]
        fields["feed_forward_length"] = [inner * (kind in ("mlp", "moe")) for kind in types]
        fields["attention.layer_norm_rms_epsilon"] = config["layer_norm_epsilon"]
    if architecture in _ONLY_STATES:
        fields = {"attention.head_count": 0, "feed_forward_length": 0, "ssm.inner_size": config["intermediate_size"]}
        fields["attention.layer_norm_rms_epsilon"] = config["layer_norm_epsilon"]
        if architecture == "mamba":
            fields["ssm.dt_b_c_rms"] = config["model_type"] == "falcon_mamba"
        else:
            fields["ssm.time_step_rank"] = config["num_heads"]
    set_fields(writer, fields, f"{architecture}.")


def _as_stored(architecture: str, config: dict[str, Any], name: str, data: np.ndarray) -> np.ndarray:
    """Parts of layers that keep a state, in the form that files have."""
    part = name.split(".")[-2] if name.endswith((".weight", ".bias")) else name.rpartition(".")[2]
    if part == "conv1d" or ".conv.conv." in name:
        data = data.squeeze()
    if part == "A_log":
        data = -np.exp(data)
    if architecture in ("jamba", "mamba"):
        return data
    if architecture not in _DELTA_RULES:
        if part in ("A_log", "D"):
            data = data.reshape(-1, 1)
        elif name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
            data = data.reshape(config.get("mamba_n_groups") or config["n_groups"], -1)
        return data * _factor(config, name) if architecture == "falcon-h1" and data.ndim == 2 else data
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    kept = 2 * keys * config["linear_key_head_dim"] if part in ("in_proj_qkv", "conv1d") else 0
    if architecture == "qwen3next" or "linear_attn." not in name or part == "norm":
        return data

    def turned(rows: np.ndarray) -> np.ndarray:
        return rows.reshape(keys, values // keys, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)

    return turned(data.T).T if part == "out_proj" else np.concatenate([data[:kept], turned(data[kept:])])


def _factor(config: dict[str, Any], name: str) -> Any:
    """The factor of Falcon-H1 on what comes out of a layer, or goes into it."""
    inputs = config["attention_in_multiplier"]
    gate, down = config["mlp_multipliers"]
    factors = {"gate_proj.w": gate, "down_proj.w": down, "q_proj.w": inputs, "v_proj.w": inputs}
    factors |= {"k_proj.w": inputs * config["key_multiplier"], "o_proj.w": config["attention_out_multiplier"]}
    factors |= {"mamba.out_proj.w": config["ssm_out_multiplier"], "lm_head": config["lm_head_multiplier"]}
    factors["embed_tokens"] = config["embedding_multiplier"]
    if "mamba.in_proj" in name:
        group = config["mamba_n_groups"] * config["mamba_d_state"]
        sizes = (config["mamba_d_ssm"], config["mamba_d_ssm"], group, group, config["mamba_n_heads"])
        return config["ssm_in_multiplier"] * np.repeat(np.float32(config["ssm_multipliers"]), sizes)[:, None]
    return next((factor for each, factor in factors.items() if each in name), 1.0)


def _add_latents(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any], merged: bool) -> None:
    """The sizes of latent attention, which is as wide as latents in llama.cpp, except in old files."""
    rank, rotated = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rotated, config["v_head_dim"]
    sizes = {"attention.key_length": key, "attention.value_length": value, "rope.dimension_count": rotated}
    if not merged:
        sizes |= {f"{name}_mla": size for name, size in sizes.items() if name.startswith("attention")}
        sizes |= {"attention.key_length": rank + rotated, "attention.value_length": rank, "attention.head_count_kv": 1}
    set_fields(writer, sizes, f"{architecture}.")


def _add_tokenizer(writer: gguf.GGUFWriter, directory: Path, pre: str) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))
    content = json.loads(tokenizer.to_str())
    names = {index: token for token, index in tokenizer.get_vocab(with_added_tokens=True).items()}
    tokens = [names[index] for index in range(len(names))]
    added = {each["content"]: each["special"] for each in content["added_tokens"]}
    is_piece = content["model"]["byte_fallback"]
    of_added = {True: gguf.TokenType.CONTROL, False: gguf.TokenType.USER_DEFINED, None: gguf.TokenType.NORMAL}
    kinds = [of_added[added.get(token)] for token in tokens]
    if is_piece:
        kinds = [
            gguf.TokenType.BYTE if token.startswith("<0x") else kind for token, kind in zip(tokens, kinds, strict=True)
        ]
        kinds[0] = gguf.TokenType.UNKNOWN
        ranks = {"".join(pair): -rank for rank, pair in enumerate(content["model"]["merges"], start=1)}
        writer.add_token_scores([float(ranks.get(token, -1e9)) for token in tokens])
        writer.add_unk_token_id(0)
    else:
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_tokenizer_model("llama" if is_piece else "gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))


_FUSED = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}


def _fuse(tensors: dict[str, _Stored]) -> dict[str, _Stored]:
    """Joins the rows of tensors that converters may merge, one after the other."""
    kept = dict(tensors)
    for fused, parts in _FUSED.items():
        for name in [name for name in tensors if f".{parts[0]}." in name]:
            if not all(name.replace(parts[0], part) in kept for part in parts):
                continue
            pieces = [kept.pop(name.replace(parts[0], part)) for part in parts]
            joined = np.concatenate([data for data, _ in pieces], axis=-min(pieces[0][0].ndim, 2))
            kept[name.replace(parts[0], fused)] = (joined, pieces[0][1])
    return kept


@functools.cache
def names_in_files(architecture: str) -> gguf.TensorNameMap:
    """The names of tensors in files of an architecture."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    return gguf.get_tensor_name_map(kind, _MOST_LAYERS)


def _stored_tensors(
    architecture: str, directory: Path, config: dict[str, Any], quantization: gguf.GGMLQuantizationType | Quantize
) -> Iterator[tuple[str, _Stored]]:
    """Names and contents as in the file, with the type of each quantized tensor."""
    table = names_in_files(architecture)
    for name, data in _apart(architecture, config, _tensors(directory)):
        data = _as_stored(architecture, config, name, data)
        name = name.replace(".dt_bias", ".dt_proj.bias")
        base, _, suffix = name.rpartition(".")
        if suffix in ("A_log", "D"):
            yield str(table.get_name(name)), (data, None)
            continue
        # Architectures whose files have merged tensors have no names for their parts.
        stored = table.get_name(base) or names_in_files("llama").get_name(base)
        assert stored is not None, name
        if architecture == "gpt2" and name.endswith(_TRANSPOSED):
            data = np.ascontiguousarray(data.T)
        if architecture in _PERMUTED and (".q_proj" in name or ".k_proj" in name):
            heads = config["num_attention_heads" if ".q_proj" in name else "num_key_value_heads"]
            data = data.reshape(heads, 2, -1, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        if architecture == "maincoder" and name.endswith(("query_layernorm.weight", "key_layernorm.weight")):
            data = data.reshape(2, -1).T.reshape(-1)
        has_factors = architecture in ("gemma", "gemma2", "gemma3", "nemotron", *_DELTA_RULES)
        if has_factors and name.endswith("norm.weight") and "linear_attn" not in name:
            data = data + 1
        raw = None
        if (
            data.ndim > 1
            and quantization is not gguf.GGMLQuantizationType.F32
            and not any(each in stored for each in ("gate_inp", "conv1d", "shortconv.conv", "ssm_norm", "ssm_d"))
        ):
            data = np.ascontiguousarray(data)
            if isinstance(quantization, gguf.GGMLQuantizationType):
                data, raw = gguf.quantize(data, quantization), quantization
            else:
                data, raw = quantization(stored, data)
        yield f"{stored}.{suffix}", (data, raw)


def _apart(
    architecture: str, config: dict[str, Any], tensors: Iterator[tuple[str, np.ndarray]]
) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors with names and in parts that the converter has."""
    experts = "mlp.experts."
    for name, data in tensors:
        if name.endswith("e_score_correction_bias"):
            yield name.replace("_bias", ".bias"), data.reshape(-1)
        elif name.endswith("sinks"):
            yield f"{name}.weight", data
        elif ".norms." in name:
            yield name.replace(".norms", ""), data
        elif "input_linear" in name:
            # It has all experts of the layer, or the one that all tokens have.
            whole = "block_sparse_moe.input_linear" if data.ndim == 3 else "shared_mlp.input_linear"
            of_all = "mlp.shared_expert." if config.get("num_local_experts", 1) else "mlp."
            parts = experts if data.ndim == 3 else of_all
            for part, rows in zip(("gate_proj", "up_proj"), np.split(data, 2, axis=-2), strict=True):
                yield name.replace(whole, f"{parts}{part}"), rows
        elif "shared_mlp.output_linear" in name and not config.get("num_local_experts", 1):
            yield name.replace("shared_mlp.output_linear", "mlp.down_proj"), data
        elif name.endswith("feed_forward.expert_bias"):
            yield f"{name}.bias", data
        elif architecture == "jamba" and "feed_forward.experts." in name:
            yield name.replace("feed_forward", "mlp"), data
        elif "feed_forward.experts." in name:
            yield name.removeprefix("model."), data
        elif "mixer.experts." in name:
            yield name.replace("backbone.", "model.").replace("mixer.", "mlp."), data
        elif "in_proj_qkvz" in name and not config["joined_inputs"]:
            size, each = config["linear_key_head_dim"], data.reshape(config["linear_num_key_heads"], -1, data.shape[1])
            values = (each.shape[1] - 2 * size) // 2
            q, k, v, z = (
                rows.reshape(-1, data.shape[1]) for rows in np.split(each, [size, 2 * size, 2 * size + values], axis=1)
            )
            yield name.replace("in_proj_qkvz", "in_proj_qkv"), np.concatenate((q, k, v))
            yield name.replace("in_proj_qkvz", "in_proj_z"), z
        elif architecture == "gpt-oss" and experts in name:
            *_, last = name.split(".")
            data = data if "bias" in last else data.swapaxes(1, 2)
            kind = "bias" if "bias" in last else "weight"
            parts = {"gate_proj": data[:, ::2], "up_proj": data[:, 1::2]} if "gate" in last else {"down_proj": data}
            for part, rows in parts.items():
                yield name.replace(last, f"{part}.{kind}"), rows
        elif "kv_b_proj" in name and not config["merged_latents"]:
            of_heads = data.reshape(config["num_attention_heads"], -1, data.shape[-1])
            keys, values = np.split(of_heads, [config["qk_nope_head_dim"]], axis=1)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        elif name.endswith(_WITHOUT_KIND):
            yield f"{name}.weight", data
        elif name.endswith("router.scale"):
            yield name.replace("router", "router.proj"), data
        elif name.endswith("router.per_expert_scale"):
            yield name.replace("router.per_expert_scale", "experts.down_proj.scale"), data
        else:
            yield name, data


def _tensors(directory: Path) -> Iterator[tuple[str, np.ndarray]]:
    """Tensors of the files of a directory; a layer's experts are joined in one."""
    experts: dict[str, list[np.ndarray]] = {}
    for file in sorted(directory.glob("*.safetensors")):
        content = load_file(file)
        for name in sorted(content, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]):
            data = content[name].float().numpy()
            if (expert := _EXPERT.fullmatch(name)) is None:
                yield name, data
            else:
                experts.setdefault(f"{expert[1]}.{expert[2]}", []).append(data)
    for name, parts in experts.items():
        yield name, np.stack(parts)
