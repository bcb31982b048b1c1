"""Attention over the KV pool, without the projections around it."""

from dataclasses import dataclass

import torch
from torch import nn

from quire_kernels import ops
from worker_svc.layers.embedding_norm import Numbers


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """The positions of the T new tokens of R rows in the KV pool. All tensors are on the model's device.

    Attributes:
        slot_mapping: [T] int64, `block_id * block_size + offset` of each new token.
        block_tables: [R, M] int32 block ids in logical order. Entries beyond a row's context are undefined.
        query_start_loc: [R + 1] int32, where each row's new tokens start in the flat batch, and T.
        seq_lens: [R] int32, computed plus new tokens of each row.
        max_query_len: at least the largest number of new tokens of a row.
        max_seq_len: at least the largest of `seq_lens`.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


class PagedAttention(nn.Module):
    """Writes the new keys and values into their slots and attends over the paged context.

    Args:
        num_kv_heads: written by this layer; 0 for a layer that reads another's keys and values.
        scale: factor on the scores.
        values_are_keys: there are no heads of value.
        sliding_window: tokens that a token sees, itself included; None for all before it.
        soft_cap: of the scores, as in `ops.paged_attention`.
        sinks: the same, of this rank's heads.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        scale: float,
        *,
        values_are_keys: bool = False,
        sliding_window: int | None = None,
        soft_cap: float | None = None,
        sinks: Numbers | None = None,
    ) -> None:
        super().__init__()
        self._head_split = (num_heads, num_kv_heads) if values_are_keys else (num_heads, num_kv_heads, num_kv_heads)
        self._head_dim = head_dim
        self._scale = scale
        self._sliding_window = sliding_window
        self._soft_cap = soft_cap
        self.sinks = sinks

    def split(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv [T, (Hq + 2 Hkv) * D] -> views: query [T, Hq, D], key and value [T, Hkv, D]."""
        query, key, *values = qkv.view(qkv.shape[0], -1, self._head_dim).split_with_sizes(self._head_split, 1)
        return query, key, values[0] if values else key

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        metadata: AttentionMetadata,
    ) -> torch.Tensor:
        """Returns [T, Hq * D]."""
        ops.reshape_and_cache(key, value, kv_cache, metadata.slot_mapping)
        return self.attend(query, kv_cache, metadata)

    def attend(self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: AttentionMetadata) -> torch.Tensor:
        """The same when the new keys and values are in their slots already."""
        attended = ops.paged_attention(
            query,
            kv_cache,
            metadata.block_tables,
            metadata.query_start_loc,
            metadata.seq_lens,
            scale=self._scale,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            sliding_window=self._sliding_window,
            soft_cap=self._soft_cap,
            sinks=None if self.sinks is None else self.sinks.values,
        )
        return attended.view(attended.shape[0], -1)
