"""Calls the CPU library: the functions of `kernels.reference`, for tensors in host memory."""

from collections.abc import Callable, Sequence

import torch

from kernels import reference
from kernels.cpu.library import (
    ATTENTION_ARGS,
    NORM_ARGS,
    PACK_ARGS,
    PRODUCT_ARGS,
    ROTARY_ARGS,
    SILU_ARGS,
    Operation,
    Operations,
)
from kernels.int8 import quantize
from kernels.packed_weight import ACTIVATIONS, PackedWeight
from kernels.reference_attention import ScoreRule

_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}

# The enum Activation of api.h.
_ACTIVATIONS = {name: number for number, name in enumerate(ACTIVATIONS)}
_SILU_AND_MUL = len(ACTIVATIONS)
# kPanel of isa.h: packed weights are padded to multiples of it.
_PANEL = 32

_NO_HEADS = (0, 0, 0, 0, 0, 0, 0)
_NO_CACHE = (0, 0, 0, 0, 0)


# A contiguous tensor of this shape, whatever is in it.
Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]


def _empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


class CpuKernels:
    """The operations on one library. Arguments are those of `kernels.ops`, checked there.

    What the library has no code for (float64, weights of another dtype than x) is left to the reference. Tensors may be
    views whose last dimension is contiguous; others are copied first.

    Args:
        empty: makes the tensors that operations return.

    Raises:
        IndexError: of any operation, where a block id, slot, position or length is out of range. Nothing was written.
    """

    def __init__(self, library: Operations, empty: Empty = _empty) -> None:
        self._library = library
        self._context = library.context
        self._empty = empty

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
        query, block_tables = _dense(query), _dense(block_tables)
        query_start_loc, seq_lens = query_start_loc.contiguous(), seq_lens.contiguous()
        alibi_slopes = None if scores.alibi_slopes is None else scores.alibi_slopes.contiguous()
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
            _DTYPES[query.dtype],
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
            _quantized_line(kv_cache),
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
        lines = _lines(x)
        arguments = SILU_ARGS.pack(
            output.data_ptr(),
            lines.data_ptr(),
            _DTYPES[x.dtype],
            torch.get_num_threads(),
            lines.shape[0],
            doubled // 2,
            lines.stride(0),
        )
        check_status(self._library.silu_and_mul(self._context, arguments))
        return output

    def pack_weight(self, weight: torch.Tensor, gated: bool, quantized: bool = False) -> PackedWeight:
        lines, dtype = quantize(weight) if quantized else None, weight.dtype
        weight = _dense(weight) if lines is None else lines.codes
        out_features, in_features = weight.shape
        padded_in = -(-in_features // _PANEL) * _PANEL
        panels = -(-(out_features // 2) // (_PANEL // 2)) if gated else -(-out_features // _PANEL)
        data = torch.empty((panels, padded_in, _PANEL), dtype=weight.dtype)
        arguments = PACK_ARGS.pack(
            data.data_ptr(),
            weight.data_ptr(),
            out_features,
            in_features,
            weight.stride(0),
            int(gated),
            weight.element_size(),
        )
        check_status(self._library.pack_weight(self._context, arguments))
        scales = None if lines is None else lines.scales.squeeze(-1)
        return PackedWeight(data, scales, dtype, out_features, in_features, gated)

    def product(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        activation: str,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        padded_in = weight.data.shape[1]
        lines = _lines(x)
        if padded_in != weight.in_features:
            lines = torch.nn.functional.pad(lines, (0, padded_in - weight.in_features))
        output = self._empty((*x.shape[:-1], weight.width), output_dtype)
        arguments = PRODUCT_ARGS.pack(
            output.data_ptr(),
            lines.data_ptr(),
            weight.data.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if weight.scales is None else weight.scales.data_ptr(),
            _DTYPES[output_dtype],
            _SILU_AND_MUL if weight.gated else _ACTIVATIONS[activation],
            torch.get_num_threads(),
            lines.shape[0],
            weight.out_features,
            padded_in,
            lines.stride(0),
            weight.width,
        )
        check_status(self._library.product(self._context, arguments))
        return output

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _same_dtype(query, key):
            return reference.rotary(query, key, positions, cos_sin_cache)
        outputs = self._empty(query.shape, query.dtype), self._empty(key.shape, key.dtype)
        query, key = _dense(query), _dense(key)
        heads = (*_heads(query, outputs[0]), *_heads(key, outputs[1]), *_NO_HEADS)
        self._rotary(heads, _NO_CACHE, positions, cos_sin_cache, key)
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
        query, key, value = _dense(query), _dense(key), _dense(value)
        slot_mapping = slot_mapping.contiguous()
        # Rotated keys on their way to int8 take the place of those that were there.
        rotated = key if kv_cache.dtype == torch.int8 else None
        heads = (*_heads(query, query), *_heads(key, rotated), *_heads(value, None))
        self._rotary(heads, _cache(kv_cache, slot_mapping), positions, cos_sin_cache, key)
        return query

    def reshape_and_cache(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        key, value, slot_mapping = _dense(key), _dense(value), slot_mapping.contiguous()
        heads = (*_NO_HEADS, *_heads(key, None), *_heads(value, None))
        self._rotary(heads, _cache(kv_cache, slot_mapping), None, None, key)

    def _rotary(
        self,
        heads: Sequence[int],
        cache: tuple[int, int, int, int, int],
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
            _DTYPES[key.dtype],
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
        lines = x if x.dim() == 3 and x.stride(-1) == 1 else _lines(x).unsqueeze(1)
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
            _DTYPES[x.dtype],
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
    return x.dtype in _DTYPES and all(other is None or other.dtype == x.dtype for other in others)


def _dense(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _lines(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as [lines, n], copied only if that takes it."""
    if x.dim() != 2:
        x = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    return _dense(x)


def _heads(source: torch.Tensor, target: torch.Tensor | None) -> tuple[int, int, int, int, int, int, int]:
    """The struct Heads: source and target are [T, H, D], the last dimension contiguous."""
    token_stride, head_stride, _ = source.stride()
    if target is None:
        return source.data_ptr(), 0, source.shape[1], token_stride, head_stride, 0, 0
    target_token_stride, target_head_stride, _ = target.stride()
    return (
        source.data_ptr(),
        target.data_ptr(),
        source.shape[1],
        token_stride,
        head_stride,
        target_token_stride,
        target_head_stride,
    )


def _cache(kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[int, int, int, int, int]:
    """The struct CacheSlots."""
    _, num_blocks, _, block_size, _ = kv_cache.shape
    return kv_cache.data_ptr(), slot_mapping.data_ptr(), num_blocks, block_size, _quantized_line(kv_cache)


def _quantized_line(kv_cache: torch.Tensor) -> int:
    """Bytes of a line of a pool of int8, else 0."""
    return kv_cache.shape[4] if kv_cache.dtype == torch.int8 else 0


_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (IndexError, "block_tables names a block that is not in kv_cache"),
    2: (IndexError, "query_start_loc and seq_lens contradict each other or the shapes"),
    3: (IndexError, "slot_mapping names a slot that is not in kv_cache"),
    4: (IndexError, "positions has one that is not in cos_sin_cache"),
    5: (MemoryError, "attention found no memory for its intermediate results"),
}


def check_status(status: int) -> None:
    """Raises what a status of api.h means, unless it is kOk."""
    if status:
        error, message = _ERRORS[status]
        raise error(message)
