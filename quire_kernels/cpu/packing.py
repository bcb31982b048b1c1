"""Packs weights of products for the CPU library, which reads them in panels of outputs, and quantizes tokens.

A bfloat16 weight is stored in 12 bits a number where the instruction set gains by it and few numbers are exceptions.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from quire_kernels.cpu.library import (
    BF12_EXCEPTION_BYTES,
    BF12_GROUP,
    BF12_GROUP_BYTES,
    BF12_HEAD_BYTES,
    DTYPES,
    PANEL,
    STORED_BF12,
    STORED_CODED,
    STORED_INT8,
    STORED_PLAIN,
    WORDS_OF_BLOCK,
    CompressArgs,
    Operation,
    Operations,
    PackArgs,
    QuantizeArgs,
    coded_panel_bytes,
)
from quire_kernels.cpu.library import Grouping as GroupingArgs
from quire_kernels.host_memory import SharedPages, lazy_zeros
from quire_kernels.packed_weight import CodedWeight, Coding, Grouping, PackedWeight, Quantization

# Instruction sets on which 12-bit weights are not faster with few tokens.
_ISAS_WITHOUT_BF12 = ("avx2",)
# A weight stays in 16 bits if more than one in this many numbers is an exception. In normally distributed weights about
# one in 10,000 is.
_NUMBERS_PER_EXCEPTION = 256


Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes a contiguous tensor of this shape with any content."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An `Empty` in torch's memory."""
    return torch.empty(shape, dtype=dtype)


class WeightPacker:
    """Packs weights in the order in which the kernels of one library read them.

    Args:
        make_empty: allocates intermediate tensors.
    """

    def __init__(self, library: Operations, make_empty: Empty) -> None:
        self._library = library
        self._empty = make_empty
        self._pages = SharedPages()

    def tokens_for(self, weight: PackedWeight, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """x as lines of padded_in, and their scales if they are int8."""
        tokens = as_lines(x)
        if weight.quantization is Quantization.INT8_DYNAMIC:
            return quantize(self._library, tokens, weight.padded_in, self._empty)
        if weight.padded_in != weight.in_features:
            tokens = torch.nn.functional.pad(tokens, (0, weight.padded_in - weight.in_features))
        return tokens, None

    def pack(self, weight: torch.Tensor, gated: bool, quantization: Quantization) -> PackedWeight:
        dtype, numbers, scales = weight.dtype, dense(weight), None
        if quantization is not Quantization.NONE:
            numbers, scales = quantize(self._library, numbers, weight.shape[1], self._empty)
        return self._pack_numbers(numbers, scales, dtype, gated, quantization)

    def _pack_numbers(
        self,
        numbers: torch.Tensor,
        scales: torch.Tensor | None,
        dtype: torch.dtype,
        gated: bool,
        quantization: Quantization,
    ) -> PackedWeight:
        """A weight of this dtype, or the int8 values [out, in] that stand for it, with their scales [out]."""
        out_features, in_features = numbers.shape
        elements_of_word = _elements_of_word(dtype, quantization)
        block = elements_of_word * WORDS_OF_BLOCK
        panels = _num_panels(out_features, gated)
        padded_in = -(-in_features // block) * block
        is_final = scales is not None or dtype != torch.bfloat16 or self._library.isa in _ISAS_WITHOUT_BF12
        data = (self._pages.empty if is_final else lazy_zeros)((panels, padded_in, PANEL), numbers.dtype)
        arguments = PackArgs(
            packed=data.data_ptr(),
            weight=numbers.data_ptr(),
            out_features=out_features,
            in_bytes=in_features * numbers.element_size(),
            row_bytes=numbers.stride(0) * numbers.element_size(),
            gated=gated,
            word_bytes=elements_of_word * numbers.element_size(),
        )
        self._library.call(Operation.PACK_WEIGHT, arguments)
        packed = PackedWeight(data, scales, dtype, out_features, in_features, padded_in, gated, quantization)
        compressed = None if is_final else self._compress(data)
        return packed if compressed is None else replace(packed, data=compressed, is_bf12=True)

    def pack_coded(
        self, weight: CodedWeight, gated: bool, quantization: Quantization, dtype: torch.dtype
    ) -> PackedWeight:
        if quantization is Quantization.INT8_DYNAMIC and (int8 := _int8_by_output(weight)) is not None:
            return self._pack_numbers(*int8, torch.bfloat16, gated, quantization)
        (out_features, row_bytes), in_features = weight.rows.shape, weight.in_features
        rows, panels, padded_in = (
            dense(weight.rows),
            _num_panels(out_features, gated),
            -(-in_features // PANEL) * PANEL,
        )
        scales = zeros = parts = table = grouping = None
        if weight.scales is not None:
            scales, zeros = weight.scales.values.contiguous(), contiguous(weight.scales.zeros)
            parts, table = contiguous(weight.scales.parts), contiguous(weight.scales.table)
            grouping = Grouping(-(-weight.scales.inputs // PANEL), scales.dtype, zeros is not None)
            # The library has twice the numbers of E2M1 in its table.
            scales = scales if parts is None else scales / 2
        panel_bytes = coded_panel_bytes(weight.coding, padded_in, grouping_args(grouping))
        data = self._pages.empty((panels, panel_bytes), torch.uint8)
        arguments = PackArgs(
            packed=data.data_ptr(),
            weight=rows.data_ptr(),
            out_features=out_features,
            in_bytes=row_bytes,
            row_bytes=rows.stride(0),
            gated=gated,
            stored=STORED_CODED[weight.coding],
            scales=address(scales),
            zeros=address(zeros),
            parts=address(parts),
            table=address(table),
            grouping=grouping_args(grouping),
        )
        self._library.call(Operation.PACK_WEIGHT, arguments)
        return PackedWeight(
            data, None, dtype, out_features, in_features, padded_in, gated, quantization, weight.coding, grouping
        )

    def _compress(self, packed: torch.Tensor) -> torch.Tensor | None:
        """The same numbers in 12 bits; None if too many of them are exceptions."""
        panels, numbers = packed.shape[0], packed[0].numel()
        panel_bytes = BF12_HEAD_BYTES + numbers // BF12_GROUP * BF12_GROUP_BYTES
        max_exceptions = packed.numel() // _NUMBERS_PER_EXCEPTION
        bytes_of_panels = panels * panel_bytes
        compressed = self._pages.empty((bytes_of_panels + max_exceptions * BF12_EXCEPTION_BYTES,), torch.uint8)
        num_exceptions = torch.empty((), dtype=torch.int64)
        arguments = CompressArgs(
            compressed=compressed.data_ptr(),
            packed=packed.data_ptr(),
            num_exceptions=num_exceptions.data_ptr(),
            panels=panels,
            numbers=numbers,
            max_exceptions=max_exceptions,
        )
        self._library.call(Operation.COMPRESS_WEIGHT, arguments)
        found = int(num_exceptions.item())
        if found > max_exceptions:
            self._pages.cut(compressed, 0)
            return None
        return self._pages.cut(compressed, bytes_of_panels + found * BF12_EXCEPTION_BYTES)


def quantize(
    library: Operations, tokens: torch.Tensor, width: int, make_empty: Empty
) -> tuple[torch.Tensor, torch.Tensor]:
    """Int8 values of tokens [T, n], as [T, width] with zeros after the n, and scales, [T]."""
    num_tokens, n = tokens.shape
    values, scales = make_empty((num_tokens, width), torch.int8), make_empty((num_tokens,), torch.float32)
    arguments = QuantizeArgs(
        values=values.data_ptr(),
        scales=scales.data_ptr(),
        x=tokens.data_ptr(),
        dtype=DTYPES[tokens.dtype],
        rows=num_tokens,
        n=n,
        x_stride=tokens.stride(0),
        value_stride=width,
    )
    library.call(Operation.QUANTIZE, arguments)
    return values, scales


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_lines(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as [lines, n], copied only if no view can be."""
    if x.dim() != 2:
        x = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    return dense(x)


def _int8_by_output(weight: CodedWeight) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The values and scales of an int8 weight with one scale for each output, so that sums over all inputs are
    integers; None for other weights, and if its inputs would be padded, unlike its neighbours' inputs."""
    scales = weight.scales
    if weight.coding is not Coding.INT8 or scales is None or scales.zeros is not None:
        return None
    if scales.values.shape[1] != 1 or weight.in_features % (4 * WORDS_OF_BLOCK):
        return None
    return (weight.rows ^ 128).view(torch.int8), scales.values.flatten().float()


def stored_as(weight: PackedWeight) -> int:
    """A number of the enum StoredAs."""
    if weight.coding is not None:
        return STORED_CODED[weight.coding]
    return STORED_BF12 if weight.is_bf12 else STORED_PLAIN if weight.scales is None else STORED_INT8


def grouping_args(grouping: Grouping | None) -> GroupingArgs:
    if grouping is None:
        return GroupingArgs()
    return GroupingArgs(grouping.pieces, DTYPES[grouping.scale_dtype], grouping.has_zeros)


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return None if x is None else x.contiguous()


def address(x: torch.Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _num_panels(out_features: int, gated: bool) -> int:
    return -(-(out_features // 2) // (PANEL // 2)) if gated else -(-out_features // PANEL)


def _elements_of_word(dtype: torch.dtype, quantization: Quantization) -> int:
    """Number of elements of a token in a word of 32 bits, which are multiplied together."""
    if quantization is Quantization.INT8_DYNAMIC:
        return 4
    return 1 if dtype == torch.float32 else 2
