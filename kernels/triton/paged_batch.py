"""What both attention kernels take: new tokens of several rows and where their contexts lie."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton.language as tl

from kernels.triton.launch import padded


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What belongs to the model: one constant of the kernels, where they are compiled anew for each that differs.

    Attributes:
        group: query heads that share a KV head.
        head_pad: the power of two in which a head fits.
    """

    num_heads: int
    num_kv_heads: int
    group: int
    block_size: int
    head_dim: int
    head_pad: int


if TYPE_CHECKING:
    Shape = AttentionShape
else:
    # What says to Triton that an argument is a constant; a type checker would find no fields in it.
    Shape = tl.constexpr


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """The tensors of `kernels.ops.paged_attention`; `query` has contiguous heads, the indexes are contiguous."""

    query: torch.Tensor
    kv_cache: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.seq_lens.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.kv_cache.shape[2]

    @property
    def group(self) -> int:
        """Query heads that share a KV head."""
        return self.query.shape[1] // self.num_kv_heads

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.query, self.kv_cache, self.block_tables, self.query_start_loc, self.seq_lens

    def strides(self) -> tuple[int, int, int]:
        """From token to token of the queries, from keys to values, from row to row of the block tables."""
        return self.query.stride(0), self.kv_cache.stride(0), self.block_tables.stride(0)

    @property
    def shape(self) -> "AttentionShape":
        _, _, num_kv_heads, block_size, head_dim = self.kv_cache.shape
        return AttentionShape(self.query.shape[1], num_kv_heads, self.group, block_size, head_dim, padded(head_dim, 16))
