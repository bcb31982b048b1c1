"""Falcon: its attention in transformers predates their attention interface, so it is put before it here."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import FalconAttention, FalconForCausalLM, apply_rotary_pos_emb

from worker_svc.models.transformers_attention import attend_by_hook
from worker_svc.models.transformers_refusals import UnsupportedModelError


class PagedFalconAttention(nn.Module):
    """Stands in for a FalconAttention, whose weights it uses."""

    def __init__(self, original: FalconAttention) -> None:
        super().__init__()
        assert original.num_kv_heads is not None, "its configuration fills it in"
        self.original = original
        self._num_kv_heads = original.num_kv_heads

    def forward(
        self, hidden_states: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_rest: Any
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, hidden]; returns the same shape."""
        original = self.original
        query, key, value = self._split(original.query_key_value(hidden_states))
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        attended, _ = attend_by_hook(self, query, key, value, scaling=original.inv_norm_factor)
        return original.dense(attended.flatten(2)), None

    def _split(self, fused: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """fused [1, T, *] -> [1, H, T, D] each. Groups of queries lie beside the key and value that they share."""
        original = self.original
        if not original.new_decoder_architecture:
            query, key, value = original._split_heads(fused)
        else:
            groups = fused.view(*fused.shape[:2], self._num_kv_heads, -1, original.head_dim)
            query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)


def adapt_falcon(model: PreTrainedModel) -> None:
    """Puts paged attention into a Falcon.

    Raises:
        UnsupportedModelError: it uses ALiBi, which transformers computes in bfloat16, rounded by position.
    """
    assert isinstance(model, FalconForCausalLM)
    if model.config.alibi:
        raise UnsupportedModelError("it uses ALiBi")
    for block in model.transformer.h:
        original = block.self_attention
        assert isinstance(original, FalconAttention)
        block.self_attention = PagedFalconAttention(original)


ADAPTERS: dict[str, Callable[[PreTrainedModel], None]] = {"FalconForCausalLM": adapt_falcon}
"""By architecture, what must be done to a model before its attention can be hooked."""
