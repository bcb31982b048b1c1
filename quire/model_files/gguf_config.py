"""Parts of the config.json of a GGUF file that families share: sizes, the rotation, windows and experts."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from quire.model_files.gguf_header import GgufFields, GgufTensor

Config = dict[str, Any]
Reader = Callable[[GgufFields, Config], Config]
"""Reads fields of config.json, given the fields before."""
Part = Config | Reader
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
_F32 = 0
RMS_EPS, LAYER_NORM_EPS = "attention.layer_norm_rms_epsilon", "attention.layer_norm_epsilon"
SOFTMAX, SIGMOID = 1, 2
"""Values of expert_gating_func."""


def row(
    model_type: str,
    *parts: Part,
    activation: tuple[str, str] = ("hidden_act", "silu"),
    eps: tuple[str, str] = ("rms_norm_eps", RMS_EPS),
    rotates_partly: bool = False,
    mlps_differ: bool = False,
) -> Callable[[GgufFields], Config]:
    """The configuration of a family with heads of key and value. Later parts replace fields of earlier ones.

    Args:
        activation: a field of config.json and its value.
        eps: a field of config.json, and the field of the file with its value.
        rotates_partly: whether the rotation may turn only a part of each head.
        mlps_differ: whether the inner size may differ by layer, so that config.json has a list of them.
    """

    def read(fields: GgufFields) -> Config:
        config = {"model_type": model_type, **_decoder(fields, rotates_partly, mlps_differ)}
        config |= {eps[0]: fields.positive(eps[1]), activation[0]: activation[1]}
        for part in parts:
            config |= part(fields, config) if callable(part) else part
        return config

    return read


def _decoder(fields: GgufFields, rotates_partly: bool, mlps_differ: bool) -> Config:
    heads, width = fields.size("attention.head_count"), fields.size("embedding_length")
    head_dim = fields.size("attention.key_length", max(width // heads, 1))
    # 0 is written for heads that rotate as a whole, too.
    given = fields.own("rope.dimension_count", (int, list), "a whole number", head_dim)
    rotated = fields.size("rope.dimension_count", head_dim) if given else head_dim
    is_partial = rotates_partly and rotated < head_dim
    if (rotated != head_dim and not is_partial) or fields.size("attention.value_length", head_dim) != head_dim:
        raise fields.error(f"heads of {head_dim} with {rotated} rotated dimensions are not read")
    # If the first layer has experts, a file may omit the width of other layers.
    width_of_experts = _width_of_experts(fields) if first_dense_layers(fields) == 0 else None
    name, count = "feed_forward_length", num_layers(fields)
    inner = fields.sizes(name, count) if mlps_differ else fields.size_of_some(name, width_of_experts)
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": count,
        "num_attention_heads": heads,
        "num_key_value_heads": fields.size_of_some("attention.head_count_kv", heads),
        "head_dim": head_dim,
        **({"partial_rotary_factor": rotated / head_dim} if rotates_partly else {}),
        "max_position_embeddings": fields.size("context_length"),
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
    """Whether a layer has biases in its tensor `name`."""
    return has(fields, f"{name}.bias")


def has(fields: GgufFields, name: str) -> bool:
    """Whether a layer has the tensor, of any number."""
    return any(each.endswith(f".{name}") for each in fields.header.tensors)


# Parts of rows


def biases(name: str, tensor: str) -> Reader:
    """Field `name`: whether a layer has biases in `tensor`."""
    return lambda fields, _: {name: has_bias(fields, tensor)}


def presence(name: str, tensor: str) -> Reader:
    """Field `name`: whether a layer has the tensor."""
    return lambda fields, _: {name: has(fields, tensor)}


def numbers(**names: str) -> Reader:
    """The numbers that the file has, by names in config.json, of fields by their names in the file."""
    return lambda fields, _: {name: fields.positive(key) for name, key in names.items() if fields.has(key)}


def renamed(name: str, other: str) -> Reader:
    """Field `name` in place of field `other`."""
    return lambda _, config: {name: config.pop(other)}


def windows(period: int, *, may_differ: bool = False) -> Reader:
    """The window, and the layers that have it: as the file says, or all but the last of each `period` layers; no
    layer if the file has no window.

    Args:
        may_differ: whether layers with a window may have another rotation.
    """

    def read(fields: GgufFields, config: Config) -> Config:
        count = config["num_hidden_layers"]
        if not fields.has("attention.sliding_window"):
            return {"sliding_window": None, "layer_types": [FULL] * count}
        slides = fields.own("attention.sliding_window_pattern", (int, list), "a whole number or a list", period)
        if not isinstance(slides, list):
            slides = [slides > 0 and (index + 1) % slides > 0 for index in range(count)]
        if len(slides) < count:
            raise fields.error(f"attention.sliding_window_pattern has {len(slides)} entries for {count} layers")
        theta = fields.positive("rope.freq_base", 10_000.0)
        if not may_differ and fields.positive("rope.freq_base_swa", theta) != theta:
            raise fields.error("rope.freq_base_swa differs from rope.freq_base, which is not read")
        types = [SLIDING if each else FULL for each in slides[:count]]
        return {"sliding_window": fields.size("attention.sliding_window"), "layer_types": types}

    return read


def layers_with_keys(fields: GgufFields) -> list[bool]:
    """For each layer, whether it attends: layers that keep a state have no heads of key."""
    heads = fields.sizes("attention.head_count_kv", fields.size("block_count"), minimum=0)
    return [each > 0 for each in heads[: num_layers(fields)]]


def delta_rule(fields: GgufFields, config: Config) -> Config:
    """The layers with delta rules and their sizes, by Qwen's names."""
    count, num_values = config["num_hidden_layers"], fields.size("ssm.time_step_rank")
    period = fields.size("full_attention_interval", 4)
    keeps_state = [(index + 1) % period > 0 for index in range(count)]
    if fields.has("attention.recurrent_layers"):
        keeps_state = fields.own("attention.recurrent_layers", list, "a list of true and false")
    if len(keeps_state) < count:
        raise fields.error(f"attention.recurrent_layers has {len(keeps_state)} entries for {count} layers")
    return {
        "layer_types": [LINEAR if each else FULL for each in keeps_state[:count]],
        "linear_conv_kernel_dim": fields.size("ssm.conv_kernel"),
        "linear_num_key_heads": fields.size("ssm.group_count"),
        "linear_num_value_heads": num_values,
        "linear_key_head_dim": fields.size("ssm.state_size"),
        "linear_value_head_dim": of_each_head(fields, num_values),
    }


def mamba_2(fields: GgufFields, config: Config) -> Config:
    """The sizes of layers of Mamba 2, by the names of Bamba."""
    heads, inner, width = fields.size("ssm.time_step_rank"), fields.size("ssm.inner_size"), config["hidden_size"]
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": of_each_head(fields, heads),
        "mamba_n_groups": fields.size("ssm.group_count"),
        "mamba_d_state": fields.size("ssm.state_size"),
        "mamba_d_conv": fields.size("ssm.conv_kernel"),
        "mamba_d_ssm": inner,
        "mamba_expand": max(inner // width, 1),
        "mamba_conv_bias": has_bias(fields, "ssm_conv1d"),
        "mamba_proj_bias": has_bias(fields, "ssm_in"),
    }


def of_each_head(fields: GgufFields, num_heads: int) -> int:
    """Numbers of each head of the results of layers that keep a state."""
    inner = fields.size("ssm.inner_size")
    if inner % num_heads:
        raise fields.error(f"ssm.inner_size is {inner}, no multiple of ssm.time_step_rank, which is {num_heads}")
    return inner // num_heads


def experts(
    count: str = "num_experts",
    *,
    chosen: str = "num_experts_per_tok",
    width: str = "intermediate_size",
    num_shared: str | None = None,
    shared_width: str | None = None,
    gating: int = SOFTMAX,
) -> Reader:
    """The numbers of experts, by their names in config.json: all experts, the chosen ones, the width of each, how many
    experts the one that all tokens have is as wide as, and its width, if the file has such an expert."""

    def read(fields: GgufFields, _: Config) -> Config:
        found = {count: fields.size("expert_count"), chosen: num_chosen_experts(fields, gating)}
        found[width] = own = _width_of_experts(fields)
        shared = _tensor_of_any_layer(fields, "ffn_down_shexp.weight")
        if num_shared is not None:
            found[num_shared] = 0 if shared is None else shared.shape[-1] // own
        if shared_width is not None and shared is not None:
            found[shared_width] = shared.shape[-1]
        return found

    return read


def deepseek_experts(
    count: str = "n_routed_experts",
    num_shared: str = "n_shared_experts",
    scale: str = "routed_scaling_factor",
    gating: int = SIGMOID,
) -> Reader:
    """The experts of DeepSeek V3, by the names that some numbers have in config.json."""
    sizes = experts(count, width="moe_intermediate_size", num_shared=num_shared, gating=gating)

    def read(fields: GgufFields, config: Config) -> Config:
        return {
            **sizes(fields, config),
            "first_k_dense_replace": first_dense_layers(fields),
            "norm_topk_prob": fields.flag(f"{fields.architecture}.expert_weights_norm", False),
            scale: fields.positive("expert_weights_scale", 1.0),
            "n_group": fields.size("expert_group_count", 1),
            "topk_group": fields.size("expert_group_used_count", 1),
        }

    return read


def first_dense_layers(fields: GgufFields) -> int:
    """Layers before the first one that has experts."""
    tensors, count = fields.header.tensors, num_layers(fields)
    return next((index for index in range(count) if f"blk.{index}.ffn_down_exps.weight" in tensors), count)


def _tensor_of_any_layer(fields: GgufFields, name: str) -> GgufTensor | None:
    return next((each for key, each in fields.header.tensors.items() if key.endswith(f".{name}")), None)


def _width_of_experts(fields: GgufFields) -> int:
    """From the shape of a tensor, so that a damaged field does not exhaust memory."""
    down = _tensor_of_any_layer(fields, "ffn_down_exps.weight")
    if down is None or len(down.shape) != 3:
        raise fields.error("tensor blk.0.ffn_down_exps.weight is missing, or has no three dimensions")
    return down.shape[2]


def num_chosen_experts(fields: GgufFields, gating: int = SOFTMAX) -> int:
    """Raises ConfigurationError if the scores of experts are not made by the function `gating`."""
    chosen, count = fields.size("expert_used_count"), fields.size("expert_count")
    if chosen > count:
        raise fields.error(f"expert_used_count is {chosen}, more than the {count} experts")
    if fields.own("expert_gating_func", int, "a whole number", gating) != gating:
        name = "softmax" if gating == SOFTMAX else "sigmoids"
        raise fields.error(f"its experts are not chosen by {name} (expert_gating_func); that is not read")
    return chosen


def rope_scaling(fields: GgufFields, head_dim: int) -> dict[str, Any] | None:
    if LONG_FACTORS in fields.header.tensors and fields.architecture not in ("phi3", "phimoe", "minicpm3"):
        raise fields.error(f"{LONG_FACTORS} is not read in models of {fields.architecture}")
    if ROPE_FACTORS in fields.header.tensors:
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
    stored = read_factors(fields, ROPE_FACTORS, head_dim // 2)
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


def read_factors(fields: GgufFields, name: str, count: int) -> Sequence[float]:
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
