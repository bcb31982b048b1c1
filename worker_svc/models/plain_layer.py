"""Decoder layers with layer norms and an MLP without a gate, as GPT-2 and OPT have them."""

from collections.abc import Sequence

import torch
from torch import nn

from worker_svc.layers.attention import PagedAttention
from worker_svc.layers.linear import Linear
from worker_svc.layers.norm import LayerNorm
from worker_svc.model_input import AttentionMetadata, ModelInput


class PlainLayer(nn.Module):
    """What a layer does with its modules, which a family's own class makes. `qkv` is query, key and value in one."""

    attention_norm: LayerNorm
    qkv: Linear
    attention: PagedAttention
    attention_output: Linear
    mlp_norm: LayerNorm
    up: Linear
    down: Linear

    def attend(self, x: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        query, key, value = self.attention.split(self.qkv(x))
        return self.attention_output(self.attention(query, key, value, kv_cache, metadata))

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def run_norm_first(
    layers: nn.ModuleList, norms: Sequence[LayerNorm | None], residual: torch.Tensor, inputs: ModelInput
) -> torch.Tensor:
    """Runs layers whose norms come before attention and MLP.

    Args:
        layers: `PlainLayer`s.
        norms: the attention norm of each, then the final norm, None where there is none.
        residual: [T, hidden], what the first layer takes. It may be overwritten.

    Returns:
        Hidden states after the final norm, [T, hidden].
    """
    first_norm, *next_norms = norms
    assert first_norm is not None
    x = first_norm(residual)
    # The sum at the end of a layer is taken by the norm after it: the next layer's, or the final one.
    for layer, next_norm, kv_cache in zip(layers, next_norms, inputs.kv_caches, strict=True):
        assert isinstance(layer, PlainLayer)
        x, residual = layer.mlp_norm.add(layer.attend(x, kv_cache, inputs.attention), residual)
        output = layer.feed_forward(x)
        if next_norm is None:
            return residual + output
        x, residual = next_norm.add(output, residual)
    return x
