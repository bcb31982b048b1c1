"""LLaMA's families with experts: Mixtral, Qwen2-MoE and Qwen3-MoE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker_svc.layers.experts import ExpertsConfig
from worker_svc.models.base import ConfigFields
from worker_svc.models.llama import LlamaConfig, LlamaForCausalLM, Qwen3Layer, window_of, windows_of_layers

# Defaults of transformers for fields that config.json lacks and that differ from LLaMA's.
_MIXTRAL_DEFAULTS = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
}
_QWEN_2_DEFAULTS = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "num_experts_per_tok": 4,
    "num_experts": 60,
}
_QWEN_3_DEFAULTS = _QWEN_2_DEFAULTS | {
    "intermediate_size": 6144,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "num_experts": 128,
}


# More than any model has, in all layers. It bounds what a wrong configuration can allocate.
_MAX_EXPERTS = 1 << 16


class MixtralForCausalLM(LlamaForCausalLM):
    """LLaMA with experts in each layer, whose weights come to 1. Layers may see a sliding window."""

    architecture = "MixtralForCausalLM"
    waits_for_device = True

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_MIXTRAL_DEFAULTS, **values, "attention_bias": False, "mlp_bias": False}
        llama, fields = LlamaConfig.read(values), ConfigFields(values)
        count = fields.integer("num_experts" if "num_experts" in values else "num_local_experts", 8)
        experts = ExpertsConfig(
            count=count,
            num_chosen=_num_chosen(fields, llama, count, 2),
            inner_size=llama.intermediate_size,
            normalized=True,
            module="block_sparse_moe",
            names=("w1", "w3", "w2"),
        )
        return replace(llama, experts=experts, sliding_windows=(window_of(fields),) * llama.num_layers)


class Qwen2MoeForCausalLM(LlamaForCausalLM):
    """LLaMA with biases on query, key and value, and with experts, including one shared by all tokens. Every other one
    of the lower layers may see a sliding window."""

    architecture = "Qwen2MoeForCausalLM"
    waits_for_device = True

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_QWEN_2_DEFAULTS, **values, "attention_bias": False, "mlp_bias": False}
        llama, fields = LlamaConfig.read(values), ConfigFields(values)
        window = window_of(fields) if fields.flag("use_sliding_window", False) else None
        end = fields.integer("max_window_layers", 28, minimum=0)
        return replace(
            llama,
            qkv_bias=fields.flag("qkv_bias", True),
            experts=_qwen_experts(fields, llama, fields.integer("shared_expert_intermediate_size")),
            sliding_windows=windows_of_layers(
                fields, llama.num_layers, window, lambda index: index % 2 == 0 and index < end
            ),
        )


class Qwen3MoeForCausalLM(LlamaForCausalLM):
    """Qwen3 with experts. Layers may see a sliding window."""

    architecture = "Qwen3MoeForCausalLM"
    layer_class = Qwen3Layer
    waits_for_device = True

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_QWEN_3_DEFAULTS, **values, "mlp_bias": False}
        llama, fields = LlamaConfig.read(values), ConfigFields(values)
        window = window_of(fields) if fields.flag("use_sliding_window", False) else None
        return replace(llama, experts=_qwen_experts(fields, llama, None), sliding_windows=(window,) * llama.num_layers)


def _qwen_experts(fields: ConfigFields, llama: LlamaConfig, shared_inner_size: int | None) -> ExpertsConfig | None:
    """None if no layer has experts."""
    # transformers 5 writes Qwen3's number by Mixtral's name.
    count = fields.integer("num_local_experts" if "num_local_experts" in fields.values else "num_experts", minimum=0)
    if not count:
        return None
    step, dense = fields.integer("decoder_sparse_step", 1), fields.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(isinstance(each, int) for each in dense):
        raise fields.error("mlp_only_layers", dense, "a list of layers")
    return ExpertsConfig(
        count=count,
        num_chosen=_num_chosen(fields, llama, count, None),
        inner_size=fields.integer("moe_intermediate_size"),
        normalized=fields.flag("norm_topk_prob", False),
        shared_inner_size=shared_inner_size,
        dense_layers=frozenset(dense) | {index for index in range(llama.num_layers) if (index + 1) % step},
    )


def _num_chosen(fields: ConfigFields, llama: LlamaConfig, count: int, default: int | None) -> int:
    if count * llama.num_layers > _MAX_EXPERTS:
        raise fields.error("num_experts", count, f"at most {_MAX_EXPERTS} in {llama.num_layers} layers together")
    chosen = fields.integer("num_experts_per_tok", default)
    if chosen > count:
        raise fields.error("num_experts_per_tok", chosen, f"at most {count}, the number of experts")
    return chosen
