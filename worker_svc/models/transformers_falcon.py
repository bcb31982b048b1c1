"""Falcon: its attention in transformers predates their attention interface, so it is put before it here."""

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers import PreTrainedModel
from transformers.models.falcon.modeling_falcon import (
    FalconAttention,
    FalconForCausalLM,
    apply_rotary_pos_emb,
    build_alibi_tensor,
)

from worker_svc.models.transformers_attention import attend_by_hook

_Heads = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""query [1, Hq, T, D], key and value [1, Hkv, T, D]."""


class PagedFalconAttention(nn.Module):
    """Stands in for a FalconAttention, whose weights it uses."""

    def __init__(self, original: FalconAttention) -> None:
        super().__init__()
        assert original.num_kv_heads is not None, "its configuration fills it in"
        self.original = original
        self._num_kv_heads = original.num_kv_heads
        # The bias of the key at position 1, by head.
        ones = torch.ones(1, 2, dtype=torch.long, device=original.dense.weight.device)
        self._slopes = build_alibi_tensor(ones, original.num_heads, torch.bfloat16)[:, :, 1]

    def forward(
        self,
        hidden_states: torch.Tensor,
        *,
        position_ids: torch.Tensor,
        position_embeddings: tuple[torch.Tensor, torch.Tensor],
        alibi: torch.Tensor | None,
        **_rest: Any,
    ) -> tuple[torch.Tensor, None]:
        """hidden_states [1, T, hidden]; returns the same shape."""
        original = self.original
        query, key, value = self._split(original.query_key_value(hidden_states))
        if alibi is None:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        else:
            query, key, value = self._with_bias(query, key, value, position_ids)
        attended, _ = attend_by_hook(
            self, query, key, value, scaling=original.inv_norm_factor, needs_exact_keys=alibi is not None
        )
        return original.dense(attended.flatten(2)), None

    def _split(self, fused: torch.Tensor) -> _Heads:
        """fused [1, T, *]. Groups of queries lie beside the key and value that they share."""
        original = self.original
        if not original.new_decoder_architecture:
            query, key, value = original._split_heads(fused)
        else:
            groups = fused.view(*fused.shape[:2], self._num_kv_heads, -1, original.head_dim)
            query, key, value = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        return query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)

    def _with_bias(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, position_ids: torch.Tensor
    ) -> _Heads:
        """ALiBi as one more number of each key, which a query takes once, for heads of their own.

        Falcon's bias is rounded to bfloat16 at each position of a key, so it is no product of a slope and a distance.
        """
        bias = (self._slopes * position_ids).to(key.dtype)[None, :, :, None]
        key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
        return functional.pad(query, (0, 1), value=1.0), torch.cat((key, bias), dim=-1), value


def adapt_falcon(model: PreTrainedModel) -> None:
    """Puts paged attention into a Falcon."""
    assert isinstance(model, FalconForCausalLM)
    for block in model.transformer.h:
        original = block.self_attention
        assert isinstance(original, FalconAttention)
        block.self_attention = PagedFalconAttention(original)
