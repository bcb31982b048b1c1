"""Qwen2: LLaMA with biases on query, key and value; the upper layers may see a sliding window."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker_svc.layers.loadable import Placement
from worker_svc.models.config_fields import ConfigFields
from worker_svc.models.llama import LlamaConfig, LlamaForCausalLM
from worker_svc.models.sliding_window import mixed_windows

# What transformers assumes where config.json is silent and LLaMA differs.
_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Raises ConfigurationError for a field of another type or out of range."""
    values = {**_DEFAULTS, **config, "attention_bias": False, "mlp_bias": False}
    llama = LlamaConfig.read(values)
    windows = mixed_windows(ConfigFields(values), llama.num_layers)
    return replace(llama, qkv_bias=True, sliding_windows=windows)


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Served from the tensors that transformers' model of the same name writes."""

    architecture = "Qwen2ForCausalLM"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "Qwen2ForCausalLM":
        return cls(read_config(config), placement)
