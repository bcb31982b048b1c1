"""Calls the CPU library: the functions of `kernels.reference`, for tensors in host memory."""

from collections.abc import Sequence

import torch

from kernels import reference
from kernels.cpu.arguments import (
    DTYPES,
    NO_CACHE,
    NO_HEADS,
    Empty,
    as_lines,
    cache_slots,
    check_status,
    dense,
    empty,
    heads_of,
    storage_of,
)
from kernels.cpu.exchange import CpuExchange
from kernels.cpu.library import ATTENTION_ARGS, NORM_ARGS, ROTARY_ARGS, SILU_ARGS, Operation, Operations
from kernels.cpu.products import CpuProducts
from kernels.packed_weight import PackedWeight, Rounding
from kernels.reference import ScoreRule


class CpuKernels:
    """The operations on one library. Arguments are those of `kernels.ops`, checked there.

    What the library has no code for (float64, weights of another dtype than x) is left to the reference. Tensors may be
    views whose last dimension is contiguous; others are copied first.

    Args:
        make_empty: makes the tensors that operations return.

    Raises:
        IndexError: of any operation, where a block id, slot, position or length is out of range. Nothing was written.
    """

    def __init__(self, library: Operations, make_empty: Empty = empty) -> None:
        self._library = library
        self._context = library.context
        self._empty = make_empty
        self._products = CpuProducts(library, make_empty)
        self._exchange = CpuExchange(library, make_empty)

    def paged_attention(
        self,
        query: torch.Tensor,
        kv_cache: torch.Tensor,
        block_tables: torch.Tensor,
        query_start_loc: torch.Tensor,
        seq_lens: torch.Tensor,
        *,
        scores: ScoreRule,
        max_query_len: int,
        max_seq_len: int,
    ) -> torch.Tensor:
        query, block_tables = dense(query), dense(block_tables)
        query_start_loc, seq_lens = query_start_loc.contiguous(), seq_lens.contiguous()
        alibi_slopes = None if scores.alibi_slopes is None else scores.alibi_slopes.contiguous()
        sinks = None if scores.sinks is None else scores.sinks.contiguous()
        num_tokens, num_heads, head_dim = query.shape
        _, num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
        token_stride, head_stride, _ = query.stride()
        output = self._empty(query.shape, query.dtype)
        arguments = ATTENTION_ARGS.pack(
            output.data_ptr(),
            query.data_ptr(),
            kv_cache.data_ptr(),
            block_tables.data_ptr(),
            query_start_loc.data_ptr(),
            seq_lens.data_ptr(),
            0 if alibi_slopes is None else alibi_slopes.data_ptr(),
            0 if sinks is None else sinks.data_ptr(),
            DTYPES[query.dtype],
            torch.get_num_threads(),
            num_tokens,
            seq_lens.shape[0],
            num_heads,
            num_kv_heads,
            head_dim,
            block_size,
            num_blocks,
            token_stride,
            head_stride,
            block_tables.stride(0),
            block_tables.shape[1],
            *storage_of(kv_cache),
            max_seq_len if scores.sliding_window is None else scores.sliding_window,
            scores.scale,
            0.0 if scores.soft_cap is None else scores.soft_cap,
        )
        check_status(self._library.paged_attention(self._context, arguments))
        return output

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        if not _same_dtype(x, weight):
            return reference.rms_norm(x, weight, eps)
        return self._norm(self._library.rms_norm, x, None, weight, None, eps)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _same_dtype(x, weight):
            return reference.add_rms_norm(x, residual, weight, eps)
        if not residual.is_contiguous():
            residual = residual.contiguous()
        return self._norm(self._library.rms_norm, x, residual, weight, None, eps), residual

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        if not _same_dtype(x, weight, bias):
            return reference.layer_norm(x, weight, bias, eps)
        return self._norm(self._library.layer_norm, x, None, weight, bias, eps)

    def add_layer_norm(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _same_dtype(x, weight, bias):
            return reference.add_layer_norm(x, residual, weight, bias, eps)
        if not residual.is_contiguous():
            residual = residual.contiguous()
        return self._norm(self._library.layer_norm, x, residual, weight, bias, eps), residual

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        if not _same_dtype(x):
            return reference.silu_and_mul(x)
        *leading, doubled = x.shape
        output = self._empty((*leading, doubled // 2), x.dtype)
        lines = as_lines(x)
        arguments = SILU_ARGS.pack(
            output.data_ptr(),
            lines.data_ptr(),
            DTYPES[x.dtype],
            torch.get_num_threads(),
            lines.shape[0],
            doubled // 2,
            lines.stride(0),
        )
        check_status(self._library.silu_and_mul(self._context, arguments))
        return output

    def has_products(self, dtype: torch.dtype, rounding: Rounding) -> bool:
        return self._products.has(dtype, rounding)

    def pack_weight(self, weight: torch.Tensor, gated: bool, rounding: Rounding) -> PackedWeight:
        return self._products.pack_weight(weight, gated, rounding)

    def product(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        activation: str,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        return self._products.product(x, weight, bias, activation, output_dtype)

    def all_reduce(self, x: torch.Tensor, memory: torch.Tensor, rank: int, size: int) -> None:
        self._exchange.all_reduce(x, memory, rank, size)

    def all_gather(self, x: torch.Tensor, memory: torch.Tensor, rank: int, size: int, total: int) -> torch.Tensor:
        return self._exchange.all_gather(x, memory, rank, size, total)

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _same_dtype(query, key):
            return reference.rotary(query, key, positions, cos_sin_cache)
        outputs = self._empty(query.shape, query.dtype), self._empty(key.shape, key.dtype)
        query, key = dense(query), dense(key)
        heads = (*heads_of(query, outputs[0]), *heads_of(key, outputs[1]), *NO_HEADS)
        self._rotary(heads, NO_CACHE, positions, cos_sin_cache, key)
        return outputs

    def rotary_and_cache(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        positions: torch.Tensor,
        cos_sin_cache: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> torch.Tensor:
        query, key, value = dense(query), dense(key), dense(value)
        slot_mapping = slot_mapping.contiguous()
        # Rotated keys on their way to int8 take the place of those that were there.
        rotated = key if kv_cache.dtype == torch.int8 else None
        heads = (*heads_of(query, query), *heads_of(key, rotated), *heads_of(value, None))
        self._rotary(heads, cache_slots(kv_cache, slot_mapping), positions, cos_sin_cache, key)
        return query

    def reshape_and_cache(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        key, value, slot_mapping = dense(key), dense(value), slot_mapping.contiguous()
        heads = (*NO_HEADS, *heads_of(key, None), *heads_of(value, None))
        self._rotary(heads, cache_slots(kv_cache, slot_mapping), None, None, key)

    def _rotary(
        self,
        heads: Sequence[int],
        cache: tuple[int, int, int, int, int, int],
        positions: torch.Tensor | None,
        cos_sin_cache: torch.Tensor | None,
        key: torch.Tensor,
    ) -> None:
        positions = None if positions is None else positions.contiguous()
        cos_sin_cache = None if cos_sin_cache is None else cos_sin_cache.contiguous()
        arguments = ROTARY_ARGS.pack(
            *heads,
            *cache,
            0 if positions is None else positions.data_ptr(),
            0 if cos_sin_cache is None else cos_sin_cache.data_ptr(),
            0 if cos_sin_cache is None else cos_sin_cache.shape[0],
            DTYPES[key.dtype],
            torch.get_num_threads(),
            key.shape[0],
            key.shape[2],
        )
        check_status(self._library.rotary(self._context, arguments))

    def _norm(
        self,
        function: Operation,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        output = self._empty(x.shape, x.dtype)
        lines = x if x.dim() == 3 and x.stride(-1) == 1 else as_lines(x).unsqueeze(1)
        num_groups, group_size, hidden = lines.shape
        group_stride, line_stride, _ = lines.stride()
        weight = None if weight is None else weight.contiguous()
        bias = None if bias is None else bias.contiguous()
        arguments = NORM_ARGS.pack(
            output.data_ptr(),
            lines.data_ptr(),
            0 if residual is None else residual.data_ptr(),
            0 if weight is None else weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            DTYPES[x.dtype],
            torch.get_num_threads(),
            num_groups * group_size,
            hidden,
            line_stride,
            group_size,
            group_stride,
            hidden,
            eps,
        )
        check_status(function(self._context, arguments))
        return output


def _same_dtype(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    return x.dtype in DTYPES and all(other is None or other.dtype == x.dtype for other in others)
