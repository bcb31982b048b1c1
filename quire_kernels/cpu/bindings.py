"""Calls the CPU library: the functions of `quire_kernels.reference`, for tensors in host memory."""

from collections.abc import Sequence
from ctypes import Structure
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from quire_kernels import reference
from quire_kernels.checks import offset_of_values
from quire_kernels.cpu.experts import HeldTable, PackedExperts
from quire_kernels.cpu.library import (
    DTYPES,
    SCORES_SIGMOID,
    SCORES_SOFTMAX,
    SLOT_BYTES,
    STORED_BF12,
    STORED_CODED,
    STORED_PLAIN,
    AllGatherArgs,
    AllReduceArgs,
    AttentionArgs,
    CacheSlots,
    ChooseArgs,
    DrawArgs,
    ExpertsArgs,
    Heads,
    LookUpArgs,
    MultiplyArgs,
    NormArgs,
    Operation,
    Operations,
    ProductArgs,
    RotaryArgs,
    SharedGroup,
    ShrinkArgs,
    SiluArgs,
)
from quire_kernels.cpu.low_rank import PackedTable, TokenAddends
from quire_kernels.cpu.packing import (
    Empty,
    WeightPacker,
    address,
    as_lines,
    contiguous,
    dense,
    empty,
    grouping_args,
    stored_as,
)
from quire_kernels.cpu.states import StateKernels
from quire_kernels.cpu.texts import TextKernels
from quire_kernels.draw_rules import DrawRules
from quire_kernels.experts import ChoiceRule, Factor
from quire_kernels.packed_weight import ACTIVATIONS, GATES, CodedWeight, PackedWeight, Quantization
from quire_kernels.reference import ScoreRule

# The enum Activation of api.h.
_ACTIVATIONS = {name: number for number, name in enumerate(ACTIVATIONS)}
_GATES = {name: number for number, name in enumerate(GATES, start=len(ACTIVATIONS))}
_CODINGS = {number: coding for coding, number in STORED_CODED.items()}


@dataclass(frozen=True, slots=True)
class ProductShape:
    """The shape of a product's weight, from its arguments.

    Attributes:
        in_features: padded to whole blocks.
        number_bits: of a number in memory.
    """

    out_features: int
    in_features: int
    number_bits: float

    @classmethod
    def of(cls, arguments: Structure) -> "ProductShape":
        stored = arguments.stored
        if (coding := _CODINGS.get(stored)) is not None:
            in_group, num_bytes = coding.group
            number_bits = num_bytes * 8 / in_group
        elif stored == STORED_PLAIN:
            number_bits = 32 if arguments.dtype == DTYPES[torch.float32] else 16
        else:
            number_bits = 12 if stored == STORED_BF12 else 8
        return cls(arguments.out_features, arguments.in_features, number_bits)

    @property
    def weight_bytes(self) -> int:
        return int(self.out_features * self.in_features * self.number_bits / 8)


_Shrunk = tuple[torch.Tensor, torch.Tensor, PackedTable]
"""The products of tokens with A of their adapters, the slots of the tokens, and the table of the parts."""


class CpuKernels(StateKernels):
    """The operations of one library. `quire_kernels.ops` documents and checks the arguments.

    The reference computes unsupported cases (float64, weights of another dtype than x). Tensors may be views whose last
    dimension is contiguous; others are copied first.

    Args:
        make_empty: allocates the results of operations and their intermediate tensors.

    Attributes:
        texts: The operation on texts that lie one after the other.

    Raises:
        IndexError: of any operation, if a block id, slot, position or length is out of range. Nothing was written.
    """

    def __init__(self, library: Operations, make_empty: Empty = empty) -> None:
        self._library = library
        self._empty = make_empty
        self._packer = WeightPacker(library, make_empty)
        self.texts = TextKernels(library, make_empty)

    @property
    def isa(self) -> str:
        """The instruction set of the library."""
        return self._library.isa

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
        alibi_slopes, sinks = contiguous(scores.alibi_slopes), contiguous(scores.sinks)
        num_tokens, num_heads, head_dim = query.shape
        _, num_blocks, num_kv_heads, block_size, _ = kv_cache.shape
        token_stride, head_stride, _ = query.stride()
        output = self._empty(query.shape, query.dtype)
        arguments = AttentionArgs(
            output=output.data_ptr(),
            query=query.data_ptr(),
            kv_cache=kv_cache.data_ptr(),
            block_tables=block_tables.data_ptr(),
            query_start_loc=query_start_loc.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            alibi_slopes=address(alibi_slopes),
            sinks=address(sinks),
            dtype=DTYPES[query.dtype],
            num_tokens=num_tokens,
            num_rows=seq_lens.shape[0],
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            num_blocks=num_blocks,
            block_stride=kv_cache.stride(1),
            value_offset=offset_of_values(kv_cache),
            query_token_stride=token_stride,
            query_head_stride=head_stride,
            table_stride=block_tables.stride(0),
            table_width=block_tables.shape[1],
            int8_line_bytes=_int8_line_bytes(kv_cache),
            sliding_window=max_seq_len if scores.sliding_window is None else scores.sliding_window,
            scale=scores.scale,
            soft_cap=0.0 if scores.soft_cap is None else scores.soft_cap,
        )
        self._library.call(Operation.PAGED_ATTENTION, arguments)
        return output

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A tensor to write results to, which a recording can reuse."""
        return self._empty(shape, dtype)

    def rms_norm_into(self, x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor) -> None:
        """Like `rms_norm` of x [T, hidden], for tensors of one dtype; lines of `out` may lie apart."""
        self._norm(Operation.RMS_NORM, x, None, weight, None, eps, output=out)

    def rms_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        offset: float = 0.0,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not _same_dtype(x, weight):
            return reference.rms_norm(x, weight, eps, offset, residual)
        return self._norm(Operation.RMS_NORM, x, residual, weight, None, eps, offset)

    def layer_norm(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if not _same_dtype(x, weight, bias):
            return reference.layer_norm(x, weight, bias, eps, residual)
        return self._norm(Operation.LAYER_NORM, x, residual, weight, bias, eps)

    def _norm(
        self,
        operation: Operation,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        offset: float = 0.0,
        output: torch.Tensor | None = None,
    ) -> torch.Tensor:
        output = self._empty(x.shape, x.dtype) if output is None else output
        lines = x if x.dim() == 3 and x.stride(-1) == 1 else as_lines(x).unsqueeze(1)
        num_groups, group_size, hidden = lines.shape
        group_stride, line_stride, _ = lines.stride()
        weight, bias = contiguous(weight), contiguous(bias)
        arguments = NormArgs(
            output=output.data_ptr(),
            x=lines.data_ptr(),
            residual=address(residual),
            weight=address(weight),
            bias=address(bias),
            dtype=DTYPES[x.dtype],
            rows=num_groups * group_size,
            hidden=hidden,
            x_stride=line_stride,
            x_group=group_size,
            x_group_stride=group_stride,
            residual_stride=hidden if residual is None or residual.is_contiguous() else residual.stride(0),
            output_stride=hidden if output.is_contiguous() else output.stride(0),
            eps=eps,
            offset=offset,
        )
        self._library.call(operation, arguments)
        return output

    def silu_and_mul(self, x: torch.Tensor) -> torch.Tensor:
        if not _same_dtype(x):
            return reference.silu_and_mul(x)
        *leading, doubled = x.shape
        output, lines = self._empty((*leading, doubled // 2), x.dtype), as_lines(x)
        arguments = SiluArgs(
            output=output.data_ptr(),
            x=lines.data_ptr(),
            dtype=DTYPES[x.dtype],
            rows=lines.shape[0],
            n=doubled // 2,
            x_stride=lines.stride(0),
        )
        self._library.call(Operation.SILU_AND_MUL, arguments)
        return output

    def multiply(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        if not _same_dtype(x, y):
            return x * y
        output, lines = self._empty(x.shape, x.dtype), as_lines(x)
        factors = y if y.stride(-1) == 1 else y.contiguous()
        arguments = MultiplyArgs(
            output=output.data_ptr(),
            x=lines.data_ptr(),
            y=factors.data_ptr(),
            dtype=DTYPES[x.dtype],
            rows=lines.shape[0],
            n=lines.shape[1],
            x_stride=lines.stride(0),
            y_stride=0 if y.dim() == 1 else factors.stride(0),
        )
        self._library.call(Operation.MULTIPLY, arguments)
        return output

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not _same_dtype(query, key):
            return reference.rotary(query, key, positions, cos_sin_cache)
        outputs = self._empty(query.shape, query.dtype), self._empty(key.shape, key.dtype)
        query, key = dense(query), dense(key)
        heads = {"query": _heads(query, outputs[0]), "key": _heads(key, outputs[1])}
        self._rotary(heads, CacheSlots(), positions, cos_sin_cache, key)
        return outputs

    def rotary_into(
        self, x: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, out: torch.Tensor
    ) -> None:
        """`rotary` of one tensor; heads of `out` may lie apart."""
        self._rotary({"query": _heads(dense(x), out)}, CacheSlots(), positions, cos_sin_cache, x)

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
        query, key, value, slot_mapping = dense(query), dense(key), dense(value), slot_mapping.contiguous()
        # Keys are rotated in place before they are rounded to int8.
        rotated = key if kv_cache.dtype == torch.int8 else None
        heads = {"query": _heads(query, query), "key": _heads(key, rotated), "value": _heads(value, None)}
        self._rotary(heads, _cache_slots(kv_cache, slot_mapping), positions, cos_sin_cache, key)
        return query

    def reshape_and_cache(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        key, value, slot_mapping = dense(key), dense(value), slot_mapping.contiguous()
        heads = {"key": _heads(key, None), "value": _heads(value, None)}
        self._rotary(heads, _cache_slots(kv_cache, slot_mapping), None, None, key)

    def _rotary(
        self,
        heads: dict[str, Heads],
        cache: CacheSlots,
        positions: torch.Tensor | None,
        cos_sin_cache: torch.Tensor | None,
        key: torch.Tensor,
    ) -> None:
        positions, cos_sin_cache = contiguous(positions), contiguous(cos_sin_cache)
        arguments = RotaryArgs(
            **heads,
            cache=cache,
            positions=address(positions),
            cos_sin=address(cos_sin_cache),
            max_position=0 if cos_sin_cache is None else cos_sin_cache.shape[0],
            dtype=DTYPES[key.dtype],
            num_tokens=key.shape[0],
            head_dim=key.shape[2],
        )
        self._library.call(Operation.ROTARY, arguments)

    def has_products(self, dtype: torch.dtype, quantization: Quantization) -> bool:
        """Whether there are products with packed weights of this dtype. Products in float16 are left to oneDNN, which
        is faster with more than a few tokens."""
        return dtype in DTYPES and (dtype != torch.float16 or quantization is Quantization.INT8_DYNAMIC)

    def pack_weight(self, weight: torch.Tensor, gated: bool, quantization: Quantization) -> PackedWeight:
        return self._packer.pack(weight, gated, quantization)

    def pack_coded(
        self, weight: CodedWeight, gated: bool, quantization: Quantization, dtype: torch.dtype = torch.bfloat16
    ) -> PackedWeight:
        return self._packer.pack_coded(weight, gated, quantization, dtype)

    def look_up(self, weight: CodedWeight, ids: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        rows, ids = dense(weight.rows), ids.contiguous()
        output = self._empty((ids.shape[0], weight.in_features), dtype)
        arguments = LookUpArgs(
            output=output.data_ptr(),
            rows=rows.data_ptr(),
            ids=ids.data_ptr(),
            num_ids=ids.shape[0],
            num_rows=rows.shape[0],
            row_bytes=rows.shape[1],
            row_stride=rows.stride(0),
            stored=STORED_CODED[weight.coding],
        )
        self._library.call(Operation.LOOK_UP, arguments)
        return output

    def product(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        activation: str,
        output_dtype: torch.dtype,
        addends: TokenAddends | None = None,
    ) -> torch.Tensor:
        tokens, x_scales = self._packer.tokens_for(weight, x)
        shrunk = None if addends is None else self._shrink(x, addends)
        output = self._empty((*x.shape[:-1], weight.width), output_dtype)
        lines = output.view(-1, weight.width)
        self._multiply(tokens, x_scales, weight, contiguous(bias), activation, lines, shrunk)
        return output

    def products(
        self,
        x: torch.Tensor,
        weights: Sequence[PackedWeight],
        bias: torch.Tensor | None,
        output_dtype: torch.dtype,
        addends: TokenAddends | None = None,
    ) -> torch.Tensor:
        tokens, x_scales = self._packer.tokens_for(weights[0], x)
        shrunk = None if addends is None else self._shrink(x, addends)
        width = sum(weight.width for weight in weights)
        output = self._empty((*x.shape[:-1], width), output_dtype)
        start, bias, lines = 0, contiguous(bias), output.view(-1, width)
        for number, weight in enumerate(weights):
            columns = slice(start, start + weight.width)
            part_of_bias = None if bias is None else bias[columns]
            self._multiply(tokens, x_scales, weight, part_of_bias, "identity", lines[:, columns], shrunk, number)
            start = columns.stop
        return output

    def head_products_into(self, x: torch.Tensor, weights: Sequence[PackedWeight], out: torch.Tensor) -> None:
        """The products of each head of x [T, H, in] with its weight, to `out` [T, H, out]. Heads may lie apart."""
        for head, weight in enumerate(weights):
            tokens, x_scales = self._packer.tokens_for(weight, x[:, head])
            self._multiply(tokens, x_scales, weight, None, "identity", out[:, head], None)

    def _shrink(self, x: torch.Tensor, addends: TokenAddends) -> _Shrunk:
        """The products of tokens x [..., in] with A."""
        table, slots, tokens = addends.table, addends.slots.contiguous(), as_lines(x)
        if table.padded_in != table.in_features:
            tokens = torch.nn.functional.pad(tokens, (0, table.padded_in - table.in_features))
        output = self._empty((tokens.shape[0], table.num_parts * table.max_rank), table.shrunk_dtype)
        arguments = ShrinkArgs(
            shrunk=output.data_ptr(),
            x=tokens.data_ptr(),
            parts=table.address(0),
            slots=slots.data_ptr(),
            dtype=DTYPES[table.dtype],
            num_tokens=tokens.shape[0],
            num_slots=table.num_slots,
            num_parts=table.num_parts,
            max_rank=table.max_rank,
            in_features=table.padded_in,
            x_stride=tokens.stride(0),
            shrunk_stride=output.stride(0),
        )
        self._library.call(Operation.SHRINK, arguments)
        return output, slots, table

    def _multiply(
        self,
        tokens: torch.Tensor,
        x_scales: torch.Tensor | None,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        activation: str,
        output: torch.Tensor,
        shrunk: _Shrunk | None,
        number: int = 0,
    ) -> None:
        """Tokens [T, padded_in] by a weight, into output [T, width], which may be some columns of more. `number` is the
        weight's in the table of `shrunk`."""
        arguments = _product_args(weight, bias, activation, output.dtype)
        arguments.output, arguments.output_stride = output.data_ptr(), output.stride(0)
        arguments.x, arguments.x_stride = tokens.data_ptr(), tokens.stride(0)
        arguments.x_scales, arguments.num_tokens = address(x_scales), tokens.shape[0]
        if shrunk is not None:
            products, slots, table = shrunk
            arguments.shrunk, arguments.shrunk_stride = products.data_ptr(), products.stride(0)
            arguments.parts, arguments.slots = table.address(number), slots.data_ptr()
            arguments.num_slots, arguments.num_parts = table.num_slots, table.num_parts
        self._library.call(Operation.PRODUCT, arguments)

    def choose_experts(
        self,
        outputs: torch.Tensor,
        rule: ChoiceRule,
        correction: torch.Tensor | None,
        factors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, correction, factors = dense(outputs), contiguous(correction), contiguous(factors)
        num_tokens, num_experts = outputs.shape
        shape = (num_tokens, rule.num_chosen)
        weights, chosen = self._empty(shape, torch.float32), self._empty(shape, torch.int64)
        arguments = ChooseArgs(
            chosen=chosen.data_ptr(),
            weights=weights.data_ptr(),
            outputs=outputs.data_ptr(),
            correction=address(correction),
            factors=address(factors),
            dtype=DTYPES[outputs.dtype],
            num_tokens=num_tokens,
            num_experts=num_experts,
            num_chosen=rule.num_chosen,
            output_stride=outputs.stride(0),
            scoring=SCORES_SIGMOID if rule.sigmoid else SCORES_SOFTMAX,
            normalized=rule.normalized,
            num_groups=rule.num_groups,
            num_chosen_groups=rule.num_chosen_groups,
            group_members=rule.group_members,
            scale=rule.scale,
        )
        self._library.call(Operation.CHOOSE, arguments)
        return weights, chosen

    def pack_experts(self, inner: Sequence[Factor], down: Sequence[Factor]) -> PackedExperts:
        return PackedExperts(_table_of(inner), _table_of(down), inner[0].weight, down[0].weight)

    def experts(
        self,
        x: torch.Tensor,
        experts: PackedExperts,
        weights: torch.Tensor,
        chosen: torch.Tensor,
        shared: torch.Tensor | None,
        shared_gate: torch.Tensor | None,
    ) -> torch.Tensor:
        tokens, x_scales = self._packer.tokens_for(experts.inner_weight, x)
        weights, chosen = weights.contiguous(), chosen.contiguous()
        shared, shared_gate = contiguous(shared), contiguous(shared_gate)
        output = self._empty((x.shape[0], experts.down_weight.out_features), x.dtype)
        arguments = ExpertsArgs(
            output=output.data_ptr(),
            x=tokens.data_ptr(),
            x_scales=address(x_scales),
            chosen=chosen.data_ptr(),
            weights=weights.data_ptr(),
            shared=address(shared),
            shared_gate=address(shared_gate),
            inner=experts.inner.address,
            down=experts.down.address,
            dtype=DTYPES[x.dtype],
            num_tokens=x.shape[0],
            num_chosen=chosen.shape[1],
            num_experts=experts.count,
            x_stride=tokens.stride(0),
        )
        self._library.call(Operation.EXPERTS, arguments)
        return output

    def draw(
        self, logits: torch.Tensor, rules: DrawRules, numbers: NDArray[np.float64]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        logits = dense(logits)
        num_rows, vocab_size = logits.shape
        token_ids, highest = self._empty((num_rows,), torch.int64), self._empty((num_rows,), torch.float32)
        arguments = DrawArgs(
            token_ids=token_ids.data_ptr(),
            highest=highest.data_ptr(),
            logits=logits.data_ptr(),
            temperature=rules.temperature.ctypes.data,
            top_k=rules.top_k.ctypes.data,
            top_p=rules.top_p.ctypes.data,
            min_score=rules.min_score.ctypes.data,
            numbers=numbers.ctypes.data,
            rows=num_rows,
            vocab_size=vocab_size,
            row_stride=logits.stride(0),
        )
        self._library.call(Operation.DRAW, arguments)
        return token_ids, highest

    def all_reduce(self, x: torch.Tensor, memory: torch.Tensor, rank: int, size: int) -> None:
        lines = as_lines(x)
        rows, n = lines.shape
        arguments = AllReduceArgs(
            x=lines.data_ptr(),
            group=SharedGroup(memory=memory.data_ptr(), rank=rank, size=size, slot_bytes=SLOT_BYTES),
            dtype=DTYPES[x.dtype],
            rows=rows,
            n=n,
        )
        self._library.call(Operation.ALL_REDUCE, arguments)

    def all_gather(self, x: torch.Tensor, memory: torch.Tensor, rank: int, size: int, total: int) -> torch.Tensor:
        x, element = dense(x), x.element_size()
        output = self._empty((x.shape[0], total), x.dtype)
        arguments = AllGatherArgs(
            output=output.data_ptr(),
            x=x.data_ptr(),
            group=SharedGroup(memory=memory.data_ptr(), rank=rank, size=size, slot_bytes=SLOT_BYTES),
            rows=x.shape[0],
            part=-(-total // size) * element,
            total=total * element,
            x_stride=x.stride(0) * element,
        )
        self._library.call(Operation.ALL_GATHER, arguments)
        return output


def _table_of(factors: Sequence[Factor]) -> HeldTable:
    held = tuple((each.weight, contiguous(each.bias)) for each in factors)
    arguments = (
        _product_args(weight, bias, factor.activation, weight.dtype)
        for factor, (weight, bias) in zip(factors, held, strict=True)
    )
    return HeldTable((ProductArgs * len(held))(*arguments), held)


def _product_args(
    weight: PackedWeight, bias: torch.Tensor | None, activation: str, output_dtype: torch.dtype
) -> ProductArgs:
    """The arguments that do not depend on tokens; the bias is contiguous."""
    return ProductArgs(
        weight=weight.data.data_ptr(),
        bias=address(bias),
        scales=address(weight.scales),
        dtype=DTYPES[weight.dtype],
        stored=stored_as(weight),
        output_dtype=DTYPES[output_dtype],
        activation=(_GATES if weight.gated else _ACTIVATIONS)[activation],
        out_features=weight.out_features,
        in_features=weight.padded_in,
        grouping=grouping_args(weight.grouping),
    )


def _same_dtype(x: torch.Tensor, *others: torch.Tensor | None) -> bool:
    return x.dtype in DTYPES and all(other is None or other.dtype == x.dtype for other in others)


def _heads(source: torch.Tensor, target: torch.Tensor | None) -> Heads:
    """Source and target are [T, H, D], the last dimension contiguous."""
    token_stride, head_stride, _ = source.stride()
    heads = Heads(
        source=source.data_ptr(),
        count=source.shape[1],
        source_token_stride=token_stride,
        source_head_stride=head_stride,
    )
    if target is not None:
        heads.target = target.data_ptr()
        heads.target_token_stride, heads.target_head_stride, _ = target.stride()
    return heads


def _cache_slots(kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> CacheSlots:
    _, num_blocks, _, block_size, _ = kv_cache.shape
    return CacheSlots(
        kv_cache=kv_cache.data_ptr(),
        slot_mapping=slot_mapping.data_ptr(),
        num_blocks=num_blocks,
        block_stride=kv_cache.stride(1),
        value_offset=offset_of_values(kv_cache),
        block_size=block_size,
        int8_line_bytes=_int8_line_bytes(kv_cache),
    )


def _int8_line_bytes(kv_cache: torch.Tensor) -> int:
    return kv_cache.shape[4] if kv_cache.dtype == torch.int8 else 0
