"""Models whose attention in transformers is beside its attention interface: what is put in the place of it.

An adapter replaces the one method of the attention modules that attends, by a function that asks the hook. What is
around it stays the model's own code. Some adapters only take out what goes by a token's place in the batch.
"""

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from transformers import PreTrainedModel

from worker_svc.models.transformers_alibi import adapt_bloom, adapt_mpt
from worker_svc.models.transformers_attention import PAGED, PAGED_WITH_MASKS, attend_by_hook
from worker_svc.models.transformers_falcon import adapt_falcon

Attended = tuple[torch.Tensor, None]
"""What attends returns the weights too, which nobody asks for."""


def adapt(model: PreTrainedModel, architecture: str) -> None:
    """Puts calls of the hook into a model of this architecture, if it makes none by itself that can be answered."""
    if architecture in _ADAPTERS:
        _ADAPTERS[architecture](model)


def served_attention(architecture: str) -> str:
    """The name of the attention function that serves it, see `choose_attention`."""
    return PAGED_WITH_MASKS if architecture in _SPARSE else PAGED


def _replacing(class_name: str, method_name: str, method: Callable[..., Any]) -> Callable[[PreTrainedModel], None]:
    """An adapter that gives all modules of a class a method."""

    def adapter(model: PreTrainedModel) -> None:
        for module in model.modules():
            if type(module).__name__ == class_name:
                setattr(module, method_name, MethodType(method, module))

    return adapter


def _scaled(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> Attended:
    """GPT-J and CodeGen. query, key, value [1, H, T, D]; returns the same shape."""
    attended, _weights = attend_by_hook(module, query, key, value, mask, scaling=1 / module.scale_attn)
    return attended.transpose(1, 2), None


def _scaled_by_norm(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
) -> Attended:
    """GPT-NeoX Japanese."""
    attended, _weights = attend_by_hook(module, query, key, value, mask, scaling=1 / module.norm_factor)
    return attended.transpose(1, 2), None


def _windowed(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: torch.Tensor | None = None
) -> Attended:
    """GPT-Neo, which does not scale. Its mask is causal; what local layers see, they say themselves."""
    window = module.config.window_size if module.attention_type == "local" else None
    attended, _weights = attend_by_hook(module, query, key, value, None, scaling=1.0, sliding_window=window)
    return attended.transpose(1, 2), None


def _first_gpt(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    _output_attentions: bool = False,
) -> list[torch.Tensor]:
    """GPT, whose keys come transposed, [1, H, D, T]."""
    scaling = value.shape[-1] ** -0.5 if module.scale else 1.0
    attended, _weights = attend_by_hook(module, query, key.transpose(2, 3), value, mask, scaling=scaling)
    return [attended.transpose(1, 2)]


def _xglm(
    module: Any, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **_rest: Any
) -> Attended:
    """All of XGLM's attention. hidden_states [1, T, hidden]; returns the same shape."""
    heads = (*hidden_states.shape[:2], -1, module.head_dim)
    query, key, value = (
        project(hidden_states).view(heads).transpose(1, 2) for project in (module.q_proj, module.k_proj, module.v_proj)
    )
    attended, _weights = attend_by_hook(module, query, key, value, attention_mask, scaling=module.scaling)
    return module.out_proj(attended.flatten(2)), None


def _keep_temperature(model: PreTrainedModel) -> None:
    """Llama 4, which takes the place of a token in the batch for its position when it sets a temperature.

    Within the length that it is served up to, the temperature is 1.
    """
    attention: Any
    for attention in model.modules():
        if hasattr(attention, "attn_temperature_tuning"):
            attention.attn_temperature_tuning = False


def _no_indices(_indexer: Any, hidden_states: torch.Tensor, *_inputs: Any, **_options: Any) -> torch.Tensor:
    """hidden_states [1, T, hidden]; returns no index for any token, which to paged attention is all before it."""
    return hidden_states.new_empty(*hidden_states.shape[:2], 0, dtype=torch.int32)


def _without_indexers(model: PreTrainedModel) -> None:
    """Attention to the `index_topk` best tokens: within the length that such a model is served up to, to all."""
    for name, module in model.named_modules():
        if name.endswith(".indexer"):
            module.forward = MethodType(_no_indices, module)


_SPARSE = (
    *("AXK2ForCausalLM", "DeepseekV32ForCausalLM", "Dots3NoteForCausalLM", "GlmMoeDsaForCausalLM"),
    "HYV4ForCausalLM",
)

_ADAPTERS: dict[str, Callable[[PreTrainedModel], None]] = {
    "BloomForCausalLM": adapt_bloom,
    "CodeGenForCausalLM": _replacing("CodeGenAttention", "_attn", _scaled),
    "FalconForCausalLM": adapt_falcon,
    "GPTJForCausalLM": _replacing("GPTJAttention", "_attn", _scaled),
    "GPTNeoForCausalLM": _replacing("GPTNeoSelfAttention", "_attn", _windowed),
    "GPTNeoXJapaneseForCausalLM": _replacing("GPTNeoXJapaneseAttention", "_attn", _scaled_by_norm),
    "Llama4ForCausalLM": _keep_temperature,
    "MptForCausalLM": adapt_mpt,
    "OpenAIGPTLMHeadModel": _replacing("Attention", "_attn", _first_gpt),
    "XGLMForCausalLM": _replacing("XGLMAttention", "forward", _xglm),
    **dict.fromkeys(_SPARSE, _without_indexers),
}
"""By architecture, what must be done to a model before its attention can be hooked."""
