"""Calls the CPU library for products with packed weights."""

from dataclasses import dataclass, replace

import torch

from kernels.cpu.arguments import DTYPES, Empty, as_lines, check_status, dense
from kernels.cpu.library import PACK_ARGS, PRODUCT_ARGS, QUANTIZE_ARGS, SHORTEN_ARGS, Operations
from kernels.packed_weight import ACTIVATIONS, PackedWeight, Rounding

# The enum Activation of api.h.
_ACTIVATIONS = {name: number for number, name in enumerate(ACTIVATIONS)}
_SILU_AND_MUL = len(ACTIVATIONS)
# kPanel and kWordsOfBlock of isa.h.
_PANEL, _WORDS_OF_BLOCK = 32, 16
# Where float16 has matrix units. Elsewhere oneDNN is faster with more than a few tokens.
_ISAS_WITH_HALVES = ("amx_fp16",)
# Where products from short numbers are the faster ones with few tokens.
_ISAS_WITH_SHORT_WEIGHTS = ("amx_fp16", "amx", "avx512_bf16", "avx512_vnni", "avx512")
# The sizes of ShortHead, ShortGroup and ShortException of short_weight.h, and how many numbers a group has.
_SHORT_HEAD_BYTES, _SHORT_GROUP, _SHORT_GROUP_BYTES, _EXCEPTION_BYTES = 64, 128, 192, 8
# Numbers of which one may be an exception; of weights that a normal distribution gave, of about 10,000 one is.
_NUMBERS_OF_EXCEPTION = 256
# The enum Multiplied of api.h.
_MULTIPLIED = {Rounding.NONE: 0, Rounding.WEIGHT: 1, Rounding.WEIGHT_AND_INPUT: 2}
_SHORT_NUMBERS = 3


@dataclass(frozen=True, slots=True)
class ProductShape:
    """What packed arguments of a product say of its weight.

    Attributes:
        out_features: of the weight.
        in_features: padded to whole blocks.
        number_bits: of a number in memory.
    """

    out_features: int
    in_features: int
    number_bits: int

    @classmethod
    def of(cls, arguments: bytes) -> "ProductShape":
        """Reads the struct ProductArgs."""
        *_, dtype, multiplied, _, _, _, _, out_features, in_features, _, _ = PRODUCT_ARGS.unpack(arguments)
        if multiplied == _SHORT_NUMBERS:
            return cls(out_features, in_features, 12)
        number_bits = 32 if dtype == DTYPES[torch.float32] else 16
        return cls(out_features, in_features, number_bits if multiplied == _MULTIPLIED[Rounding.NONE] else 8)

    @property
    def weight_bytes(self) -> int:
        return self.out_features * self.in_features * self.number_bits // 8


class CpuProducts:
    """The products of `kernels.ops`.

    Args:
        make_empty: makes the tensors that are returned, and those in between.
    """

    def __init__(self, library: Operations, make_empty: Empty) -> None:
        self._library = library
        self._context = library.context
        self._empty = make_empty

    def has(self, dtype: torch.dtype, rounding: Rounding) -> bool:
        """Whether there are such products."""
        if dtype == torch.float16 and rounding is not Rounding.WEIGHT_AND_INPUT:
            return self._library.isa in _ISAS_WITH_HALVES
        return dtype in DTYPES

    def pack_weight(self, weight: torch.Tensor, gated: bool, rounding: Rounding) -> PackedWeight:
        (out_features, in_features), dtype = weight.shape, weight.dtype
        weight, scales = dense(weight), None
        if rounding is not Rounding.NONE:
            weight, scales = self._quantize(weight, in_features)
        in_word = _elements_of_word(dtype, rounding)
        block = in_word * _WORDS_OF_BLOCK
        panels = -(-(out_features // 2) // (_PANEL // 2)) if gated else -(-out_features // _PANEL)
        padded_in = -(-in_features // block) * block
        data = torch.empty((panels, padded_in, _PANEL), dtype=weight.dtype)
        arguments = PACK_ARGS.pack(
            data.data_ptr(),
            weight.data_ptr(),
            torch.get_num_threads(),
            out_features,
            in_features * weight.element_size(),
            weight.stride(0) * weight.element_size(),
            int(gated),
            in_word * weight.element_size(),
        )
        check_status(self._library.pack_weight(self._context, arguments))
        packed = PackedWeight(data, scales, dtype, out_features, in_features, padded_in, gated, rounding)
        if rounding is not Rounding.NONE or not self._has_short_weights(dtype):
            return packed
        short = self._shorten(data)
        return packed if short is None else replace(packed, data=short, short=True)

    def _has_short_weights(self, dtype: torch.dtype) -> bool:
        return dtype == torch.bfloat16 and self._library.isa in _ISAS_WITH_SHORT_WEIGHTS

    def _shorten(self, packed: torch.Tensor) -> torch.Tensor | None:
        """The same numbers in fewer bits; None where too many of them are exceptions."""
        panels, numbers = packed.shape[0], packed[0].numel()
        panel_bytes = _SHORT_HEAD_BYTES + numbers // _SHORT_GROUP * _SHORT_GROUP_BYTES
        most_exceptions = packed.numel() // _NUMBERS_OF_EXCEPTION
        short = torch.empty(panels * panel_bytes + most_exceptions * _EXCEPTION_BYTES, dtype=torch.uint8)
        num_exceptions = torch.empty((), dtype=torch.int64)
        arguments = SHORTEN_ARGS.pack(
            short.data_ptr(),
            packed.data_ptr(),
            num_exceptions.data_ptr(),
            torch.get_num_threads(),
            panels,
            numbers,
            most_exceptions,
        )
        check_status(self._library.shorten_weight(self._context, arguments))
        return short if num_exceptions.item() <= most_exceptions else None

    def product(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None,
        activation: str,
        output_dtype: torch.dtype,
    ) -> torch.Tensor:
        padded_in = weight.padded_in
        tokens, x_scales = as_lines(x), None
        if weight.rounding is Rounding.WEIGHT_AND_INPUT:
            tokens, x_scales = self._quantize(tokens, padded_in)
        elif padded_in != weight.in_features:
            tokens = torch.nn.functional.pad(tokens, (0, padded_in - weight.in_features))
        output = self._empty((*x.shape[:-1], weight.width), output_dtype)
        bias = None if bias is None else bias.contiguous()
        arguments = PRODUCT_ARGS.pack(
            output.data_ptr(),
            tokens.data_ptr(),
            weight.data.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if weight.scales is None else weight.scales.data_ptr(),
            0 if x_scales is None else x_scales.data_ptr(),
            DTYPES[weight.dtype],
            _SHORT_NUMBERS if weight.short else _MULTIPLIED[weight.rounding],
            DTYPES[output_dtype],
            _SILU_AND_MUL if weight.gated else _ACTIVATIONS[activation],
            torch.get_num_threads(),
            tokens.shape[0],
            weight.out_features,
            padded_in,
            tokens.stride(0),
            weight.width,
        )
        check_status(self._library.product(self._context, arguments))
        return output

    def _quantize(self, tokens: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes of tokens [T, n], [T, width] with zeros after the n, and scales, [T]."""
        num_tokens, n = tokens.shape
        codes, scales = self._empty((num_tokens, width), torch.int8), self._empty((num_tokens,), torch.float32)
        arguments = QUANTIZE_ARGS.pack(
            codes.data_ptr(),
            scales.data_ptr(),
            tokens.data_ptr(),
            DTYPES[tokens.dtype],
            torch.get_num_threads(),
            num_tokens,
            n,
            tokens.stride(0),
            width,
        )
        check_status(self._library.quantize(self._context, arguments))
        return codes, scales


def _elements_of_word(dtype: torch.dtype, rounding: Rounding) -> int:
    """How many elements of a token are a word of 32 bits, and are multiplied together."""
    if rounding is Rounding.WEIGHT_AND_INPUT:
        return 4
    return 1 if dtype == torch.float32 else 2
