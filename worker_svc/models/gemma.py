"""Gemma, Gemma 2 and Gemma 3 (text): LLaMA with scaled embeddings, norms whose factors differ from 1 by their weights,
and MLPs gated by GELU. Gemma 2 and 3 have norms after attention and MLP too, and windows in some layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch

from worker_svc.layers.attention import AttentionMetadata
from worker_svc.models.base import ConfigFields, ModelInput
from worker_svc.models.llama import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaLayer,
    Qwen3Layer,
    window_of,
    windows_of_layers,
)
from worker_svc.models.rope import RopeConfig
from worker_svc.weights import Placement

# Defaults of transformers for fields that config.json lacks.
_GEMMA_DEFAULTS = {
    "vocab_size": 256000,
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}
_GEMMA_2_DEFAULTS = _GEMMA_DEFAULTS | {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}
_GEMMA_3_DEFAULTS = _GEMMA_2_DEFAULTS | {
    "vocab_size": 262208,
    "max_position_embeddings": 131072,
    "final_logit_softcapping": None,
}
_FULL, _SLIDING = "full_attention", "sliding_attention"


class Gemma2Layer(LlamaLayer):
    """A layer that normalises the outputs of attention and MLP before they are added to the residual stream."""

    mlp_norm_name: ClassVar[str] = "pre_feedforward_layernorm"

    def __init__(self, index: int, config: LlamaConfig, placement: Placement) -> None:
        super().__init__(index, config, placement)
        self.after_attention = self._norm(index, "post_attention_layernorm", config, placement)
        self.after_mlp = self._norm(index, "post_feedforward_layernorm", config, placement)

    def attend(
        self,
        x: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_table: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        return self.after_attention(super().attend(x, positions, cos_sin_table, kv_cache, metadata))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.after_mlp(super().feed_forward(x))


class Gemma3Layer(Gemma2Layer, Qwen3Layer):
    """The same, with norms on each head of query and key."""


class GemmaForCausalLM(LlamaForCausalLM):
    """Gemma."""

    architecture = "GemmaForCausalLM"

    def __init__(self, config: LlamaConfig, placement: Placement) -> None:
        super().__init__(config, placement)
        # Rounded, as the embedding is.
        self._embedding_scale = torch.tensor(config.hidden_size**0.5, dtype=placement.dtype).item()
        self._logit_cap = config.logit_cap

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_GEMMA_DEFAULTS, **values}
        # An old name of the same function.
        return _read(values, None if values["hidden_act"] == "gelu" else values["hidden_act"])

    def embed(self, inputs: ModelInput) -> torch.Tensor:
        return super().embed(inputs) * self._embedding_scale

    def finish(self, outputs: torch.Tensor) -> torch.Tensor:
        cap = self._logit_cap
        logits = super().finish(outputs)
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


class Gemma2ForCausalLM(GemmaForCausalLM):
    """Gemma 2: soft caps on scores and logits; every other layer has a window."""

    architecture = "Gemma2ForCausalLM"
    layer_class = Gemma2Layer

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_GEMMA_2_DEFAULTS, **values}
        gemma, fields = _read(values, values["hidden_activation"]), ConfigFields(values)
        return replace(
            gemma,
            attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
            soft_cap=fields.optional_number("attn_logit_softcapping"),
            logit_cap=fields.optional_number("final_logit_softcapping"),
            sliding_windows=windows_of_layers(
                fields, gemma.num_layers, window_of(fields), lambda index: index % 2 == 0
            ),
        )


class Gemma3ForCausalLM(GemmaForCausalLM):
    """Gemma 3 (text): layers with a window have a rotation of their own."""

    architecture = "Gemma3ForCausalLM"
    layer_class = Gemma3Layer

    @classmethod
    def read_config(cls, values: Mapping[str, Any]) -> LlamaConfig:
        values = {**_GEMMA_3_DEFAULTS, **values}
        fields = ConfigFields(values)
        rotations = _rotations(fields)
        full = {**values, "rope_scaling": None, "rope_parameters": rotations[_FULL]}
        gemma = _read(full, values["hidden_activation"])
        pattern = fields.integer("sliding_window_pattern", 6)
        sliding = ConfigFields({**full, "rope_parameters": rotations[_SLIDING]})
        return replace(
            gemma,
            attention_scale=fields.number("query_pre_attn_scalar") ** -0.5,
            logit_cap=fields.optional_number("final_logit_softcapping"),
            sliding_windows=windows_of_layers(
                fields, gemma.num_layers, window_of(fields), lambda index: (index + 1) % pattern > 0
            ),
            sliding_rope=RopeConfig.read(sliding, gemma.head_dim),
            # The positions that the scaled rotation reaches already.
            max_model_len=gemma.rope.max_positions,
        )


def _rotations(fields: ConfigFields) -> dict[str, Mapping[str, Any]]:
    """The rope sections of layers without and with a window: as transformers 5 or 4 write them."""
    values = fields.values
    given = values.get("rope_parameters") or {_FULL: values.get("rope_scaling") or {}}
    if not isinstance(given, dict) or not given.keys() <= {_FULL, _SLIDING}:
        raise fields.error("rope_parameters", given, f"sections for {_FULL} and {_SLIDING}")
    sections = {kind: given.get(kind) or {} for kind in (_FULL, _SLIDING)}
    if not all(isinstance(section, dict) for section in sections.values()):
        raise fields.error("rope_parameters", given, "a section for each kind of layer")
    bases = {_FULL: fields.number("rope_theta", 1e6), _SLIDING: fields.number("rope_local_base_freq", 1e4)}
    return {kind: {"rope_theta": bases[kind], **section} for kind, section in sections.items()}


def _read(values: Mapping[str, Any], activation: str | None) -> LlamaConfig:
    if values.get("use_bidirectional_attention"):
        raise ConfigFields(values).error("use_bidirectional_attention", True, "false: tokens attend to earlier ones")
    return replace(
        LlamaConfig.read({**values, "hidden_act": activation or "gelu_pytorch_tanh", "mlp_bias": False}),
        norm_offset=1.0,
    )
