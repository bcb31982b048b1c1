"""The config.json of a GGUF file of llama.cpp's first families, and the parts that all families share."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire.model_files.gguf_header import GgufFields

_ROPE_FACTORS = "rope_freqs.weight"
_LONG_FACTORS, _SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_F32 = 0
RMS_EPS, LAYER_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
RELU_2 = ("hidden_act", "relu2")
SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""


def decoder(
    fields: GgufFields,
    architecture: str,
    model_type: str,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    width_of_experts: int | None = None,
    *,
    eps: tuple[str, str] = ("rms_norm_eps", RMS_EPS),
    rotates_partly: bool = False,
) -> dict[str, Any]:
    """The configuration of families with heads of key and value.

    Args:
        activation: a field of config.json and its value.
        width_of_experts: If each layer has experts, a file may omit the width of other layers.
        eps: a field of config.json, and the field of the file with its value.
        rotates_partly: whether the rotation may turn only a part of each head.
    """
    heads, width = fields.size("attention.head_count"), fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", max(width // heads, 1))
    rotated = fields.size("rope.dimension_count", head_dim)
    is_partial = rotates_partly and rotated < head_dim
    if (rotated != head_dim and not is_partial) or fields.size("attention.value_length", head_dim) != head_dim:
        raise fields.error(f"heads of {head_dim} with {rotated} rotated dimensions are not read")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": width,
        "intermediate_size": fields.size("feed_forward_length", width_of_experts),
        "num_hidden_layers": num_layers(fields),
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        **({"partial_rotary_factor": rotated / head_dim} if rotates_partly else {}),
        "max_position_embeddings": fields.size("context_length"),
        eps[0]: fields.positive(eps[1]),
        activation[0]: activation[1],
        "rope_theta": fields.positive("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(fields, head_dim),
        "attention_bias": has_bias(fields, "attn_q") or has_bias(fields, "attn_qkv"),
    }


def num_layers(fields: GgufFields) -> int:
    """Layers of the model. The last ones of a file may be of a smaller model that drafts tokens."""
    count = fields.size("block_count")
    drafting = fields.own("nextn_predict_layers", int, "a whole number", 0)
    if not 0 <= drafting < count:
        raise fields.error(f"nextn_predict_layers is {drafting}, of {count} layers")
    return count - drafting


def has_bias(fields: GgufFields, name: str) -> bool:
    """Whether the first layer has biases in its tensor `name`."""
    return f"blk.0.{name}.bias" in fields.header.tensors


def _llama(fields: GgufFields) -> dict[str, Any]:
    """Llama, Mistral, and Mixtral, which is a Llama with experts here."""
    if fields.has("expert_count") and fields.own("expert_count", int, "a whole number"):
        return decoder(fields, "MixtralForCausalLM", "mixtral") | {
            "sliding_window": None,
            "num_local_experts": fields.size("expert_count"),
            "num_experts_per_tok": num_chosen_experts(fields),
        }
    config = decoder(fields, "LlamaForCausalLM", "llama")
    config["mlp_bias"] = has_bias(fields, "ffn_gate")
    if fields.has("attention.sliding_window"):
        window = fields.size("attention.sliding_window")
        return config | {"architectures": ["MistralForCausalLM"], "sliding_window": window}
    return config


def phi_3(
    fields: GgufFields,
    architecture: str = "Phi3ForCausalLM",
    model_type: str = "phi3",
    width_of_experts: int | None = None,
) -> dict[str, Any]:
    """Phi-3 and PhiMoE, whose rotations may have factors for short and for long texts."""
    config = decoder(fields, architecture, model_type, width_of_experts=width_of_experts, rotates_partly=True)
    length = fields.size("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = fields.own("attention.sliding_window", int, "a whole number", 0) or None
    config |= {"original_max_position_embeddings": length, "sliding_window": window}
    # Not the default of transformers, which small vocabularies do not have.
    config["pad_token_id"] = fields.token_id("padding")
    if _LONG_FACTORS not in fields.header.tensors:
        return config
    count = fields.size("rope.dimension_count", config["head_dim"]) // 2
    names = {"short_factor": _SHORT_FACTORS, "long_factor": _LONG_FACTORS}
    scaling: dict[str, object] = {"rope_type": "longrope"}
    scaling |= {key: list(_read_factors(fields, names[key], count)) for key in names}
    if fields.has("rope.scaling.attn_factor"):
        scaling["attention_factor"] = fields.positive("rope.scaling.attn_factor")
    return config | {"rope_scaling": scaling}


def num_chosen_experts(fields: GgufFields, gating: int = SOFTMAX) -> int:
    """Raises ConfigurationError if the scores of experts are not made by the function `gating`."""
    chosen, count = fields.size("expert_used_count"), fields.size("expert_count")
    if chosen > count:
        raise fields.error(f"expert_used_count is {chosen}, more than the {count} experts")
    if fields.own("expert_gating_func", int, "a whole number", gating) != gating:
        name = "softmax" if gating == SOFTMAX else "sigmoids"
        raise fields.error(f"its experts are not chosen by {name} (expert_gating_func); that is not read")
    return chosen


def _qwen(
    fields: GgufFields, architecture: str, model_type: str, width_of_experts: int | None = None
) -> dict[str, Any]:
    if fields.has("attention.sliding_window"):
        raise fields.error(f"sliding windows of {model_type} are not read")
    return decoder(fields, architecture, model_type, width_of_experts=width_of_experts)


def _qwen_with_experts(fields: GgufFields, architecture: str, model_type: str) -> dict[str, Any]:
    """Only Qwen 3 divides the weights of the chosen experts by their sum, as in llama.cpp; no field says so."""
    tensors = fields.header.tensors
    experts = tensors.get("blk.0.ffn_down_exps.weight")
    if experts is None or len(experts.shape) != 3:
        raise fields.error("tensor blk.0.ffn_down_exps.weight is missing, or has no three dimensions")
    width = experts.shape[2]
    config = _qwen(fields, architecture, model_type, width) | {
        "num_experts": fields.size("expert_count"),
        "num_experts_per_tok": num_chosen_experts(fields),
        "moe_intermediate_size": width,
        "norm_topk_prob": model_type == "qwen3_moe",
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    shared = tensors.get("blk.0.ffn_gate_shexp.weight")
    return config if shared is None else config | {"shared_expert_intermediate_size": shared.shape[0]}


GELU = "gelu_pytorch_tanh"


def _gemma_2(fields: GgufFields) -> dict[str, Any]:
    config = decoder(fields, "Gemma2ForCausalLM", "gemma2", ("hidden_activation", GELU))
    return config | {
        "query_pre_attn_scalar": _query_scale(config, layers_of_largest=46),
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "attn_logit_softcapping": fields.positive("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": fields.positive("final_logit_softcapping", 30.0),
    }


def _gemma_3(fields: GgufFields) -> dict[str, Any]:
    config = decoder(fields, "Gemma3ForCausalLM", "gemma3_text", ("hidden_activation", GELU))
    num_layers = config["num_hidden_layers"]
    # Without a window, all layers attend to all tokens.
    slides = [False] * num_layers
    if fields.has("attention.sliding_window"):
        pattern = fields.own("attention.sliding_window_pattern", (int, list), "a whole number or a list", 6)
        if isinstance(pattern, list):
            slides = [bool(each) for each in pattern]
        elif pattern > 0:
            slides = [(index + 1) % pattern > 0 for index in range(num_layers)]
    if len(slides) != num_layers:
        raise fields.error(f"attention.sliding_window_pattern has {len(slides)} entries for {num_layers} layers")
    del config["rope_theta"]
    scaling = config.pop("rope_scaling") or {"rope_type": "default"}
    theta_of_windows = fields.positive("rope.freq_base_swa", 10_000.0)
    config |= {
        "query_pre_attn_scalar": _query_scale(config, layers_of_largest=62),
        "sliding_window": fields.size("attention.sliding_window", 4096),
        "layer_types": ["sliding_attention" if each else "full_attention" for each in slides],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": theta_of_windows},
            "full_attention": scaling | {"rope_theta": fields.positive("rope.freq_base", 1_000_000.0)},
        },
    }
    if fields.has("final_logit_softcapping"):
        config["final_logit_softcapping"] = fields.positive("final_logit_softcapping")
    return config


def _query_scale(config: Mapping[str, Any], *, layers_of_largest: int) -> int:
    """No field has it; the models of 27B differ from the others, and llama.cpp knows them by their layers."""
    if config["num_hidden_layers"] == layers_of_largest:
        return config["hidden_size"] // config["num_attention_heads"]
    return config["head_dim"]


def _gpt2(fields: GgufFields) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": fields.size("embedding_length"),
        "n_inner": fields.size("feed_forward_length"),
        "n_layer": fields.size("block_count"),
        "n_head": fields.size("attention.head_count"),
        "n_positions": fields.size("context_length"),
        "layer_norm_epsilon": fields.positive("attention.layer_norm_epsilon"),
        "activation_function": "gelu_new",
    }


FIRST_CONFIGS: dict[str, Callable[[GgufFields], dict[str, Any]]] = {
    "llama": _llama,
    "mistral": _llama,
    "qwen2": lambda fields: _qwen(fields, "Qwen2ForCausalLM", "qwen2"),
    "qwen3": lambda fields: _qwen(fields, "Qwen3ForCausalLM", "qwen3"),
    # The language models of vision models: their rotation is the usual one in texts.
    "qwen2vl": lambda fields: _qwen(fields, "Qwen2ForCausalLM", "qwen2"),
    "qwen3vl": lambda fields: _qwen(fields, "Qwen3ForCausalLM", "qwen3"),
    "qwen2moe": lambda fields: _qwen_with_experts(fields, "Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": lambda fields: _qwen_with_experts(fields, "Qwen3MoeForCausalLM", "qwen3_moe"),
    "qwen3vlmoe": lambda fields: _qwen_with_experts(fields, "Qwen3MoeForCausalLM", "qwen3_moe"),
    "gemma": lambda fields: decoder(fields, "GemmaForCausalLM", "gemma", ("hidden_act", GELU)),
    "gemma2": _gemma_2,
    "gemma3": _gemma_3,
    "phi3": phi_3,
    "gpt2": _gpt2,
}


def rope_scaling(fields: GgufFields, head_dim: int) -> dict[str, Any] | None:
    if _LONG_FACTORS in fields.header.tensors and not fields.architecture.startswith("phi"):
        raise fields.error(f"{_LONG_FACTORS} is not read in models of {fields.architecture}")
    if _ROPE_FACTORS in fields.header.tensors:
        return _factors_of_rotation(fields, head_dim)
    # Files of before 2024 have another name for the factor. A factor without a type is linear.
    factor = "rope.scaling.factor" if fields.has("rope.scaling.factor") else "rope.scale_linear"
    kind = fields.own("rope.scaling.type", str, "a text", "linear" if fields.has(factor) else "none")
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise fields.error(f"rope.scaling.type is {kind!r:.80}; Quire reads none, linear and yarn")
    scaling = {"rope_type": kind, "factor": fields.positive(factor)}
    return scaling if kind == "linear" else scaling | _yarn_parameters(fields)


def _yarn_parameters(fields: GgufFields) -> dict[str, Any]:
    for name in ("yarn_ext_factor", "attn_factor"):
        if fields.number(f"rope.scaling.{name}", 1.0) != 1:
            raise fields.error(f"rope.scaling.{name} is not 1; that is not read")
    names = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    given = {name: f"rope.scaling.{key}" for key, name in names.items() if fields.has(f"rope.scaling.{key}")}
    return {
        "original_max_position_embeddings": fields.size("rope.scaling.original_context_length"),
        **{name: fields.positive(key) for name, key in given.items()},
    }


_LLAMA_3_LOW, _LLAMA_3_HIGH, _LLAMA_3_LENGTH = 1.0, 4.0, 8192


def _factors_of_rotation(fields: GgufFields, head_dim: int) -> dict[str, Any]:
    """The scaling that divides each frequency by a factor of its own.

    Llama 3.1 and later have such factors in place of their parameters; of these, only `factor`, the greatest factor,
    differs between the models. Other files with factors are a longrope with the same factors at all lengths.
    """
    stored = _read_factors(fields, _ROPE_FACTORS, head_dim // 2)
    factor, theta = max(stored, default=1.0), fields.positive("rope.freq_base", 10_000.0)
    if all(
        math.isclose(found, expected, rel_tol=1e-3)
        for found, expected in zip(stored, llama_3_factors(theta, head_dim, factor), strict=True)
    ):
        return {
            "rope_type": "llama3",
            "factor": factor,
            "low_freq_factor": _LLAMA_3_LOW,
            "high_freq_factor": _LLAMA_3_HIGH,
            "original_max_position_embeddings": _LLAMA_3_LENGTH,
        }
    return {
        "rope_type": "longrope",
        "short_factor": list(stored),
        "long_factor": list(stored),
        "attention_factor": 1.0,
        "original_max_position_embeddings": fields.size("context_length"),
    }


def llama_3_factors(
    theta: float,
    head_dim: int,
    factor: float,
    low: float = _LLAMA_3_LOW,
    high: float = _LLAMA_3_HIGH,
    length: float = _LLAMA_3_LENGTH,
) -> Iterator[float]:
    """The factors by which Llama 3.1 and later divide the frequencies."""
    for index in range(head_dim // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / head_dim)
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        yield 1 / ((1 - smooth) / factor + smooth)


def _read_factors(fields: GgufFields, name: str, count: int) -> Sequence[float]:
    tensor = fields.header.tensors.get(name)
    if tensor is None or tensor.ggml_type != _F32 or tensor.shape != (count,):
        raise fields.error(f"{name} is not {count} numbers in float32")
    with tensor.file.open("rb") as file:
        file.seek(tensor.start)
        content = file.read(4 * count)
    if len(content) < 4 * count:
        raise fields.error(f"tensor {name} ends after the file; it is cut short")
    factors = memoryview(content).cast("f").tolist()
    if not all(math.isfinite(each) and each > 0 for each in factors):
        raise fields.error(f"{name} has factors that are not above 0")
    return factors
