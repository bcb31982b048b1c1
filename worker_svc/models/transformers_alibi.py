"""Models whose positions are ALiBi alone: a bias on the scores, by head and distance, which paged attention adds.

Their attention in transformers is beside the attention interface, and their models make the bias for keys from 0 on.
"""

from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast

from worker_svc.models.transformers_attention import attend_by_hook


def adapt_bloom(model: PreTrainedModel) -> None:
    """Puts calls of the hook into a Bloom."""
    base: Any = model.base_model
    # The bias of the key at position 1.
    slopes = base.build_alibi_tensor(torch.ones(1, 2), base.num_heads, torch.float32)[:, 0, 1].tolist()
    for block in base.h:
        _replace_forward(block.self_attention, _bloom_attention, slopes)


def adapt_mpt(model: PreTrainedModel) -> None:
    """Puts calls of the hook into an MPT, which uses ALiBi whatever its configuration says of it."""
    base: Any = model.base_model
    # The bias of the second but last key.
    slopes = (-base.build_mpt_alibi_tensor(base.num_heads, 2)[:, 0, 0]).tolist()
    for block in base.blocks:
        _replace_forward(block.attn, _mpt_attention, slopes)
    # Its own makes a mask and a bias of all positions that it knows, in each step.
    base.forward = MethodType(_mpt_base, base)


def _replace_forward(module: nn.Module, forward: Any, slopes: list[float]) -> None:
    def with_slopes(module: nn.Module, *inputs: Any, **options: Any) -> tuple[torch.Tensor, None]:
        return forward(module, slopes, *inputs, **options)

    module.forward = MethodType(with_slopes, module)


def _bloom_attention(
    module: Any,
    slopes: list[float],
    hidden_states: torch.Tensor,
    residual: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """hidden_states and residual [1, T, hidden]; returns the same shape, the residual added."""
    query, key, value = module._reshape(module.query_key_value(hidden_states))
    attended, _weights = attend_by_hook(
        module, query, key, value, attention_mask, scaling=module.inv_norm_factor, alibi_slopes=slopes
    )
    return module.dense(attended.flatten(2)) + residual, None


def _mpt_attention(
    module: Any, slopes: list[float], hidden_states: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, None]:
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
