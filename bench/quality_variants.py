"""Variants of a model that `bench.quality` compares: dtypes, and parts that are rounded to int8, over a paged pool."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.filled_pool import fill_pool
from kernels.packed_weight import Quantization
from worker_svc.device.kv_pool import PoolRequest, allocate_pool, pool_geometry
from worker_svc.device.replay import make_forward
from worker_svc.layers.attention import AttentionMetadata
from worker_svc.models.base import CausalLM, ModelInput
from worker_svc.models.registry import load_model
from worker_svc.step import WorkerLimits

_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Variant:
    """Flags of one variant."""

    name: str
    dtype: torch.dtype
    quantization: Quantization = Quantization.NONE
    has_int8_pool: bool = False


VARIANTS = (
    Variant("float32", torch.float32),
    Variant("bfloat16", torch.bfloat16),
    Variant("int8-weight-only", torch.bfloat16, Quantization.INT8_WEIGHT_ONLY),
    Variant("int8-dynamic", torch.bfloat16, Quantization.INT8_DYNAMIC),
    Variant("int8 KV pool", torch.bfloat16, has_int8_pool=True),
    Variant("int8-weight-only, int8 KV pool", torch.bfloat16, Quantization.INT8_WEIGHT_ONLY, has_int8_pool=True),
    Variant("int8-dynamic, int8 KV pool", torch.bfloat16, Quantization.INT8_DYNAMIC, has_int8_pool=True),
)


class PagedModel:
    """A model and a pool in which each of `num_rows` sequences has room for `num_tokens` tokens."""

    def __init__(self, directory: Path, variant: Variant, *, num_rows: int, num_tokens: int) -> None:
        self._model: CausalLM = load_model(
            directory, device=torch.device("cpu"), dtype=variant.dtype, quantization=variant.quantization
        )
        self._blocks_per_row = -(-num_tokens // _BLOCK_SIZE)
        dtype = torch.int8 if variant.has_int8_pool else variant.dtype
        num_blocks = num_rows * self._blocks_per_row
        request = PoolRequest(_BLOCK_SIZE, num_blocks, None, 0, num_blocks, dtype)
        geometry = pool_geometry(self._model, request, None)
        self.bytes_of_token = geometry.block_bytes / _BLOCK_SIZE
        self._pool = allocate_pool(geometry, torch.device("cpu"), dtype)
        fill_pool(self._pool.gpu, self._model.head_dim)
        # The runner's own way to the hidden states; whole texts are longer than its steps, so the model computes them.
        self._limits = WorkerLimits(num_rows, num_rows, max_steps_in_flight=1, max_logprobs=0)
        self._forward = make_forward(self._model, self._pool, num_tokens, self._limits)

    @torch.inference_mode()
    def run(self, token_ids: Sequence[Sequence[int]], computed: int) -> torch.Tensor:
        """Computes the next tokens of rows 0, 1, ... after `computed` tokens in the pool; logits [T, vocab_size]."""
        lengths = torch.tensor([len(each) for each in token_ids])
        positions = torch.cat([torch.arange(len(each)) + computed for each in token_ids])
        tables = torch.arange(len(token_ids) * self._blocks_per_row).view(len(token_ids), -1)
        rows = torch.arange(len(token_ids)).repeat_interleave(lengths)
        slots = tables[rows, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
        metadata = AttentionMetadata(
            slot_mapping=slots,
            block_tables=tables.int(),
            query_start_loc=torch.cat((torch.zeros(1), lengths.cumsum(0))).int(),
            seq_lens=(lengths + computed).int(),
            max_query_len=int(lengths.max()),
            max_seq_len=int(lengths.max()) + computed,
        )
        flat = torch.tensor([token for each in token_ids for token in each])
        forward = self._forward if len(flat) <= self._limits.max_num_batched_tokens else self._model
        return self._model.logits(forward(ModelInput(flat, positions, [metadata], self._pool.gpu)))
