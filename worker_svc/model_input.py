"""What the runner hands to a model for one step: a flat batch without padding."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Where the T tokens of R rows lie in the KV pool. All tensors are on the model's device.

    Attributes:
        slot_mapping: [T] int64, `block_id * block_size + offset` of each new token.
        block_tables: [R, M] int32 block ids in logical order; entries beyond a row's context mean nothing.
        query_start_loc: [R + 1] int32, where each row's new tokens start in the flat batch, and T.
        seq_lens: [R] int32, computed plus new tokens of each row.
        max_query_len: at least the most new tokens of any row.
        max_seq_len: at least the largest of `seq_lens`.
    """

    slot_mapping: torch.Tensor
    block_tables: torch.Tensor
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class ModelInput:
    """One step's tokens.

    Attributes:
        token_ids: [T] int64.
        positions: [T] int64, each token's index in its sequence.
        kv_caches: one [2, num_blocks, num_kv_heads, block_size, head_dim] a layer; the model writes the new tokens'
            keys and values into their slots.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    attention: AttentionMetadata
    kv_caches: Sequence[torch.Tensor]
