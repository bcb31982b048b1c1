"""Mistral: LLaMA whose layers may see a sliding window of the context."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from worker_svc.layers.loadable import Placement
from worker_svc.models.config_fields import ConfigFields
from worker_svc.models.llama import LlamaConfig, LlamaForCausalLM
from worker_svc.models.sliding_window import uniform_windows

# What transformers assumes where config.json is silent and LLaMA differs.
_DEFAULTS = {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "sliding_window": 4096,
}


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Raises ConfigurationError for a field of another type or out of range."""
    values = {**_DEFAULTS, **config, "attention_bias": False, "mlp_bias": False}
    llama = LlamaConfig.read(values)
    return replace(llama, sliding_windows=uniform_windows(ConfigFields(values), llama.num_layers))


class MistralForCausalLM(LlamaForCausalLM):
    """Served from the tensors that transformers' model of the same name writes."""

    architecture = "MistralForCausalLM"

    @classmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "MistralForCausalLM":
        return cls(read_config(config), placement)
