"""Models whose attention in transformers does not go through its attention interface.

An adapter replaces the attending method of the attention modules with a function that calls the hook; all other code
stays the model's own. Some adapters only remove computations that depend on a token's place in the batch.
"""

from collections.abc import Callable
from functools import partial
from types import MethodType
from typing import Any

import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb, build_alibi_tensor

from worker_svc.models.transformers.paged import PAGED, PAGED_WITH_MASKS, attend_by_hook

Attended = tuple[torch.Tensor, None]
"""The attended values, and no attention weights."""


def adapt(model: PreTrainedModel, architecture: str) -> None:
    """Makes a model of this architecture call the hook, if it does not by itself."""
    if architecture in _ADAPTERS:
        _ADAPTERS[architecture](model)


def served_attention(architecture: str) -> str:
    """The name of the attention function of an architecture, see `choose_attention`."""
    return PAGED_WITH_MASKS if architecture in _SPARSE else PAGED


def _replacing(class_name: str, method_name: str, method: Callable[..., Any]) -> Callable[[PreTrainedModel], None]:
    """An adapter that gives all modules of a class a method."""

    def adapter(model: PreTrainedModel) -> None:
        for module in model.modules():
            if type(module).__name__ == class_name:
                setattr(module, method_name, MethodType(method, module))

    return adapter


def _attending(divisor: str | None, window: Callable[[Any], int | None] | None = None) -> Callable[..., Attended]:
    """The attending method of GPT-J and similar models. `divisor`: the module's attribute that divides the scores.
    `window`: the window of modules that name it themselves, whose masks are causal."""

    def attend(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None
    ) -> Attended:
        """query, key, value [1, H, T, D]; returns the same shape."""
        options = {} if window is None else {"sliding_window": window(module)}
        mask = mask if window is None else None
        scaling = 1.0 if divisor is None else 1 / getattr(module, divisor)
        attended, _weights = attend_by_hook(module, query, key, value, mask, scaling=scaling, **options)
        return attended.transpose(1, 2), None

    return attend


def _window_of_gpt_neo(module: Any) -> int | None:
    return module.config.window_size if module.attention_type == "local" else None


def _first_gpt(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None = None, *_: Any
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
    """Llama 4, whose attention temperature depends on the place of a token in the batch instead of its position.

    The temperature is 1 up to the length that it is served with.
    """
    attention: Any
    for attention in model.modules():
        if hasattr(attention, "attn_temperature_tuning"):
            attention.attn_temperature_tuning = False


def _no_indices(_indexer: Any, hidden_states: torch.Tensor, *_inputs: Any, **_options: Any) -> torch.Tensor:
    """hidden_states [1, T, hidden]; returns no index for any token: paged attention attends to all before it."""
    return hidden_states.new_empty(*hidden_states.shape[:2], 0, dtype=torch.int32)


def _without_indexers(model: PreTrainedModel) -> None:
    """Replaces attention to the `index_topk` best tokens: these are all tokens within the served length."""
    for name, module in model.named_modules():
        if name.endswith(".indexer"):
            module.forward = MethodType(_no_indices, module)


def adapt_bloom(model: PreTrainedModel) -> None:
    """Bloom. It has only ALiBi positions: a bias on the scores, by head and distance, which paged attention adds."""
    base: Any = model.base_model
    # The bias of the key at position 1.
    slopes = base.build_alibi_tensor(torch.ones(1, 2), base.num_heads, torch.float32)[:, 0, 1].tolist()
    for block in base.h:
        block.self_attention.forward = partial(_bloom_attention, block.self_attention, slopes)


def adapt_mpt(model: PreTrainedModel) -> None:
    """MPT, which always uses ALiBi, even if its configuration says otherwise."""
    base: Any = model.base_model
    # The bias of the second but last key.
    slopes = (-base.build_mpt_alibi_tensor(base.num_heads, 2)[:, 0, 0]).tolist()
    for block in base.blocks:
        block.attn.forward = partial(_mpt_attention, block.attn, slopes)
    # Its own forward makes a mask and a bias for all positions in each step.
    base.forward = MethodType(_mpt_base, base)


def _bloom_attention(
    module: Any,
    slopes: list[float],
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> Attended:
    """hidden_states and residual [1, T, hidden]; returns the same shape, the residual added."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    attended, _weights = attend_by_hook(
        module, query, key, value, attention_mask, scaling=module.inv_norm_factor, alibi_slopes=slopes
    )
    return module.dense(attended.flatten(2)) + residual, None


def _mpt_attention(module: Any, slopes: list[float], hidden_states: torch.Tensor, **_: Any) -> Attended:
    """hidden_states [1, T, hidden]; returns the same shape."""
    fused = module.Wqkv(hidden_states)
    if module.clip_qkv:
        fused = fused.clamp(min=-module.clip_qkv, max=module.clip_qkv)
    query, key, value = fused.view(*fused.shape[:2], 3, module.n_heads, module.head_dim).permute(2, 0, 3, 1, 4)
    attended, _weights = attend_by_hook(
        module, query, key, value, None, scaling=module.softmax_scale, alibi_slopes=slopes
    )
    return module.out_proj(attended.flatten(2)), None


def _mpt_base(base: Any, input_ids: torch.Tensor, **_: Any) -> BaseModelOutputWithPast:
    """input_ids [1, T]."""
    hidden_states = base.wte(input_ids)
    for block in base.blocks:
        hidden_states, _weights = block(hidden_states, position_bias=None, attention_mask=None)
    return BaseModelOutputWithPast(last_hidden_state=base.norm_f(hidden_states))


def adapt_falcon(model: PreTrainedModel) -> None:
    """Falcon, whose attention is older than the attention interface."""
    base: Any = model.base_model
    for block in base.h:
        attention = block.self_attention
        # The bias of the key at position 1, by head.
        ones = torch.ones(1, 2, dtype=torch.long, device=attention.dense.weight.device)
        slopes = build_alibi_tensor(ones, attention.num_heads, torch.bfloat16)[:, :, 1]
        attention.forward = partial(_falcon_attention, attention, slopes)


def _falcon_attention(
    module: Any,
    slopes: torch.Tensor,
    hidden_states: torch.Tensor,
    *,
    position_ids: torch.Tensor,
    position_embeddings: tuple[torch.Tensor, torch.Tensor],
    alibi: torch.Tensor | None,
    **_: Any,
) -> Attended:
    """hidden_states [1, T, hidden]; returns the same shape.

    ALiBi is one more element of each key, by which a 1 in each query is multiplied: Falcon rounds the bias of each key
    position to bfloat16, so it is no product of a slope and a distance. Each query head needs a key of its own then.
    """
    fused = module.query_key_value(hidden_states)
    if not module.new_decoder_architecture:
        query, key, value = module._split_heads(fused)
    else:
        # Groups of queries are stored next to the key and value that they share.
        groups = fused.view(*fused.shape[:2], module.num_kv_heads, -1, module.head_dim)
        query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
    query, key, value = (each.transpose(1, 2) for each in (query, key, value))
    if alibi is None:
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
    else:
        bias = (slopes * position_ids).to(key.dtype)[None, :, :, None]
        key, value = (each.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for each in (key, value))
        query, key = functional.pad(query, (0, 1), value=1.0), torch.cat((key, bias), dim=-1)
    attended, _weights = attend_by_hook(
        module, query, key, value, scaling=module.inv_norm_factor, needs_exact_keys=alibi is not None
    )
    return module.dense(attended.flatten(2)), None


_SPARSE = (
    *("AXK2ForCausalLM", "DeepseekV32ForCausalLM", "Dots3NoteForCausalLM", "GlmMoeDsaForCausalLM"),
    "HYV4ForCausalLM",
)

_ADAPTERS: dict[str, Callable[[PreTrainedModel], None]] = {
    "BloomForCausalLM": adapt_bloom,
    "CodeGenForCausalLM": _replacing("CodeGenAttention", "_attn", _attending("scale_attn")),
    "FalconForCausalLM": adapt_falcon,
    "GPTJForCausalLM": _replacing("GPTJAttention", "_attn", _attending("scale_attn")),
    "GPTNeoForCausalLM": _replacing("GPTNeoSelfAttention", "_attn", _attending(None, _window_of_gpt_neo)),
    "GPTNeoXJapaneseForCausalLM": _replacing("GPTNeoXJapaneseAttention", "_attn", _attending("norm_factor")),
    "Llama4ForCausalLM": _keep_temperature,
    "MptForCausalLM": adapt_mpt,
    "OpenAIGPTLMHeadModel": _replacing("Attention", "_attn", _first_gpt),
    "XGLMForCausalLM": _replacing("XGLMAttention", "forward", _xglm),
    **dict.fromkeys(_SPARSE, _without_indexers),
}
"""The functions that make a model call the hook, by architecture."""
