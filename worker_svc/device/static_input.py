"""The input of decode graphs: tensors that stay where they are, since a graph reads the addresses that it recorded."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from worker_svc.device.graph_shapes import GraphShape
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.models.base import ModelInput


@dataclass(frozen=True, slots=True)
class StaticInput:
    """The tensors of `ModelInput` for N rows of one new token each; `block_tables` is [N, blocks of a sequence]."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    block_tables: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    kv_caches: Sequence[Tensor]

    @classmethod
    def allocate(
        cls, num_rows: int, num_columns: int, kv_caches: Sequence[Tensor], device: torch.device
    ) -> "StaticInput":
        """Zeros, to be filled before the first use."""

        def indexes(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(shape, dtype=dtype, device=device)

        return cls(
            token_ids=indexes(num_rows, dtype=torch.int64),
            positions=indexes(num_rows, dtype=torch.int64),
            slot_mapping=indexes(num_rows, dtype=torch.int64),
            block_tables=indexes(num_rows, num_columns, dtype=torch.int32),
            # Each row has one token, in any batch.
            query_start_loc=torch.arange(num_rows + 1, dtype=torch.int32, device=device),
            seq_lens=indexes(num_rows, dtype=torch.int32),
            kv_caches=kv_caches,
        )

    def fill(self, inputs: ModelInput) -> None:
        """Takes over a batch of at most N rows of one token each; what lies behind it stays as it was."""
        attention = inputs.attention
        num_rows, num_columns = attention.block_tables.shape
        self.token_ids[:num_rows].copy_(inputs.token_ids)
        self.positions[:num_rows].copy_(inputs.positions)
        self.slot_mapping[:num_rows].copy_(attention.slot_mapping)
        self.block_tables[:num_rows, :num_columns].copy_(attention.block_tables)
        self.seq_lens[:num_rows].copy_(attention.seq_lens)

    def view(self, shape: GraphShape) -> ModelInput:
        """The first rows. Block tables keep their full width, so that every shape has the same strides."""
        num_rows = shape.num_rows
        attention = AttentionMetadata(
            slot_mapping=self.slot_mapping[:num_rows],
            block_tables=self.block_tables[:num_rows],
            query_start_loc=self.query_start_loc[: num_rows + 1],
            seq_lens=self.seq_lens[:num_rows],
            max_query_len=1,
            max_seq_len=shape.max_seq_len,
        )
        return ModelInput(
            token_ids=self.token_ids[:num_rows],
            positions=self.positions[:num_rows],
            attention=attention,
            kv_caches=self.kv_caches,
        )
