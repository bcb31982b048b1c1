"""Qwen3: LLaMA that normalises each head of query and key; the upper layers may see a sliding window."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from worker_svc.layers.loadable import Placement
from worker_svc.layers.norm import RmsNorm
from worker_svc.models.config_fields import ConfigFields
from worker_svc.models.llama import LlamaConfig, LlamaForCausalLM, LlamaLayer
from worker_svc.models.sliding_window import mixed_windows

# What transformers assumes where config.json is silent and LLaMA differs.
_DEFAULTS = {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "head_dim": 128,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
}


def read_config(config: Mapping[str, Any]) -> LlamaConfig:
    """Raises ConfigurationError for a field of another type or out of range."""
    values = {**_DEFAULTS, **config, "mlp_bias": False}
    llama = LlamaConfig.read(values)
    return replace(llama, sliding_windows=mixed_windows(ConfigFields(values), llama.num_layers))


class Qwen3Layer(LlamaLayer):
    """One decoder layer, number `index`."""

    def __init__(self, index: int, config: LlamaConfig, placement: Placement) -> None:
        super().__init__(index, config, placement)
        name, eps = f"model.layers.{index}.self_attn", config.rms_norm_eps
        self.query_norm = RmsNorm(f"{name}.q_norm", config.head_dim, eps, placement=placement)
        self.key_norm = RmsNorm(f"{name}.k_norm", config.head_dim, eps, placement=placement)

    def project(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = super().project(x)
        return self.query_norm(query), self.key_norm(key), value


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Served from the tensors that transformers' model of the same name writes."""

    architecture = "Qwen3ForCausalLM"
    layer_class = Qwen3Layer

    @classmethod
    def from_config(cls, config: Mapping[str, Any], placement: Placement) -> "Qwen3ForCausalLM":
        return cls(read_config(config), placement)
