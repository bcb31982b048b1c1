"""Encodes weights in the quantized types of GGUF files. The package `gguf` encodes the older types and decodes all; the
K-quants and IQ4 are encoded here, by a search for the scales that keep decoded numbers near the originals.

A number of such a type is code * scale, or code * scale - minimum, and the scales of groups are codes too. For each
group several scales are tried: each rounds the numbers to codes, and the codes have a best scale, by weighted least
squares. The one with the least error is taken.
"""

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import gguf
import numpy as np

from quire.runtime.processors import num_processors

Array = np.ndarray[Any, np.dtype[Any]]
_BLOCK = 256
# Numbers per chunk, so that intermediate results stay in a processor's cache.
_CHUNK = 1 << 16
_SMALLEST = np.float32(1e-20)
# The values of the 16 codes of IQ4_NL and IQ4_XS.
_IQ4_VALUES = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.float32)
# The nearest code, by the double of a number from -128 to 128: all bounds between codes are multiples of a half.
_IQ4_CODES = np.searchsorted((_IQ4_VALUES[1:] + _IQ4_VALUES[:-1]) / 2, np.arange(-128, 128, 0.5), side="right").astype(
    np.uint8
)


def encode(data: Array, kind: str) -> Array:
    """The rows of a tensor in a type, [..., bytes of a row]. The last dimension is a multiple of the type's block."""
    if kind not in _ENCODERS:
        return gguf.quantize(data, gguf.GGMLQuantizationType[kind])
    elements, num_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.ascontiguousarray(data, np.float32).reshape(-1, elements)
    found = np.empty((len(blocks), num_bytes), np.uint8)
    step = _CHUNK // elements

    def fill(start: int) -> None:
        found[start : start + step] = _ENCODERS[kind](blocks[start : start + step])

    with ThreadPoolExecutor(num_processors()) as threads:
        list(threads.map(fill, range(0, len(blocks), step)))
    return found.reshape(*data.shape[:-1], -1)


def _importance(groups: Array) -> Array:
    """The weights of errors: large numbers count more, as they weigh more in a product."""
    return np.abs(groups) + np.sqrt(np.mean(groups * groups, -1, keepdims=True))


def _scales_and_minima(groups: Array, largest: int) -> tuple[Array, Array]:
    """The best scale and minimum of each group, [...]: numbers are code * scale - minimum, codes from 0 to `largest`.
    Neither is below 0."""
    weights = _importance(groups)
    low = np.minimum(groups.min(-1, keepdims=True), 0)
    width = np.maximum(groups.max(-1, keepdims=True) - low, _SMALLEST)
    weighted = weights * groups
    num_all, sum_all = weights.sum(-1), weighted.sum(-1)
    best = np.full(num_all.shape, np.inf, np.float32)
    # The default is for groups of equal numbers, which need no search.
    scales, minima = width[..., 0] / largest, -low[..., 0]
    for extra in np.arange(-1.0, 1.0, 0.15).astype(np.float32):
        codes = np.clip(np.rint((groups - low) * ((largest + extra) / width)), 0, largest)
        heavy = weights * codes
        sum_codes, sum_squares = heavy.sum(-1), np.einsum("...i,...i", heavy, codes)
        sum_products = np.einsum("...i,...i", heavy, groups)
        spread = num_all * sum_squares - sum_codes * sum_codes
        has_spread = spread > 1e-5 * num_all * sum_squares
        spread = np.where(has_spread, spread, 1)
        scale = (num_all * sum_products - sum_all * sum_codes) / spread
        minimum = (sum_codes * sum_products - sum_squares * sum_all) / spread
        # A minimum below 0 cannot be stored; without one the best scale is another.
        is_below = minimum < 0
        scale = np.where(is_below, sum_products / np.maximum(sum_squares, _SMALLEST), scale)
        minimum = np.where(is_below, 0, minimum)
        # The squared error without the part that is the same for all.
        error = (
            scale * (scale * sum_squares - 2 * sum_products)
            + minimum * (minimum * num_all + 2 * sum_all)
            - 2 * scale * minimum * sum_codes
        )
        is_better = has_spread & (error < best) & (scale > 0)
        best = np.where(is_better, error, best)
        scales, minima = np.where(is_better, scale, scales), np.where(is_better, minimum, minima)
    return scales, minima


def _signed_scales(groups: Array, lowest: float, nearest: Callable[[Array], Array]) -> Array:
    """The best scale of each group, [...], of either sign: numbers are scale * nearest(number / scale). The number
    furthest from 0 is at `lowest` or near it, since there are more values below 0."""
    weights = _importance(groups)
    furthest = np.take_along_axis(groups, np.abs(groups).argmax(-1)[..., None], -1)
    furthest = np.where(np.abs(furthest) < _SMALLEST, _SMALLEST, furthest)
    best = np.full(groups.shape[:-1], -1, np.float32)
    scales = np.zeros_like(best)
    for share in np.arange(0.90, 1.101, 0.0125).astype(np.float32):
        values = nearest(groups * (lowest * share / furthest))
        heavy = weights * values
        sum_squares = np.maximum(np.einsum("...i,...i", heavy, values), _SMALLEST)
        sum_products = np.einsum("...i,...i", heavy, groups)
        # The reduction of the squared error by the scale.
        gain = sum_products * sum_products / sum_squares
        is_better = gain > best
        best, scales = np.where(is_better, gain, best), np.where(is_better, sum_products / sum_squares, scales)
    return scales


def _half(numbers: Array) -> tuple[Array, Array]:
    """Numbers as float16, in bytes [..., 2], and the values that these bytes decode to."""
    stored = np.clip(numbers, -65504, 65504).astype("<f2")[..., None]
    return stored.view(np.uint8), stored.astype(np.float32)


def _rounded(numbers: Array, unit: Array, lowest: int, highest: int) -> Array:
    """Each number in units, rounded to the nearest integer; 0 if the unit is 0."""
    return np.clip(np.rint(numbers / np.where(unit == 0, np.inf, unit)), lowest, highest)


def _k_with_minima(blocks: Array, bits: int) -> Array:
    """Q4_K and Q5_K: 8 groups of 32 with a scale and a minimum of 6 bits each."""
    groups, largest = blocks.reshape(-1, 8, 32), (1 << bits) - 1
    scales, minima = _scales_and_minima(groups, largest)
    unit_bytes, unit = _half(scales.max(-1) / 63)
    minimum_bytes, minimum_unit = _half(minima.max(-1) / 63)
    scale_codes, minimum_codes = _rounded(scales, unit, 0, 63), _rounded(minima, minimum_unit, 0, 63)
    step, offset = (unit * scale_codes)[..., None], (minimum_unit * minimum_codes)[..., None]
    codes = _rounded(groups + offset, step, 0, largest).astype(np.uint8)
    first, second = scale_codes.astype(np.uint8), minimum_codes.astype(np.uint8)
    packed = [
        first[:, :4] | first[:, 4:] >> 4 << 6,
        second[:, :4] | second[:, 4:] >> 4 << 6,
        first[:, 4:] & 15 | second[:, 4:] << 4,
    ]
    low = codes & 15
    parts = [unit_bytes, minimum_bytes, *packed]
    if bits == 5:
        parts.append(np.packbits(codes >> 4, axis=1, bitorder="little"))
    parts.append(low[:, ::2] | low[:, 1::2] << 4)
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], -1)


def _q6_k(blocks: Array) -> Array:
    """16 groups of 16 with a scale of 8 bits each."""
    groups = blocks.reshape(-1, 16, 16)
    scales = _signed_scales(groups, -32, lambda numbers: np.clip(np.rint(numbers), -32, 31))
    furthest = np.take_along_axis(scales, np.abs(scales).argmax(-1)[:, None], -1)[:, 0]
    unit_bytes, unit = _half(furthest / -128)
    scale_codes = _rounded(scales, unit, -128, 127)
    codes = (_rounded(groups, (unit * scale_codes)[..., None], -32, 31) + 32).astype(np.uint8)
    quarters = codes.reshape(-1, 2, 4, 32)
    low = quarters[:, :, :2] & 15 | quarters[:, :, 2:] << 4
    shifts = np.array([0, 2, 4, 6], np.uint8)[:, None]
    high = np.bitwise_or.reduce(quarters >> 4 << shifts, axis=2)
    parts = [low, high, scale_codes.astype(np.int8).view(np.uint8), unit_bytes]
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], -1)


def _nearest_iq4(numbers: Array) -> Array:
    return _IQ4_CODES[np.clip(np.floor(numbers * 2), -256, 255).astype(np.int32) + 256]


def _iq4_pairs(groups: Array, step: Array) -> Array:
    """Packs groups of 32 as two codes per byte."""
    codes = _nearest_iq4(groups / np.where(step == 0, np.inf, step)[..., None])
    return codes[..., :16] | codes[..., 16:] << 4


def _iq4_nl(blocks: Array) -> Array:
    unit_bytes, unit = _half(_signed_scales(blocks, -127, lambda numbers: _IQ4_VALUES[_nearest_iq4(numbers)]))
    return np.concatenate([unit_bytes, _iq4_pairs(blocks, unit[:, 0])], -1)


def _iq4_xs(blocks: Array) -> Array:
    """8 groups of 32 with a scale of 6 bits each."""
    groups = blocks.reshape(-1, 8, 32)
    scales = _signed_scales(groups, -127, lambda numbers: _IQ4_VALUES[_nearest_iq4(numbers)])
    furthest = np.take_along_axis(scales, np.abs(scales).argmax(-1)[:, None], -1)[:, 0]
    unit_bytes, unit = _half(furthest / -32)
    scale_codes = _rounded(scales, unit, -32, 31)
    stored = (scale_codes + 32).astype(np.uint16)
    high = np.bitwise_or.reduce(stored >> 4 << np.arange(0, 16, 2, dtype=np.uint16), axis=1)[:, None]
    low = (stored[:, ::2] & 15 | (stored[:, 1::2] & 15) << 4).astype(np.uint8)
    parts = [unit_bytes, high.astype("<u2").view(np.uint8), low, _iq4_pairs(groups, unit * scale_codes)]
    return np.concatenate([part.reshape(len(blocks), -1) for part in parts], -1)


_ENCODERS: dict[str, Callable[[Array], Array]] = {
    "Q4_K": functools.partial(_k_with_minima, bits=4),
    "Q5_K": functools.partial(_k_with_minima, bits=5),
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
    "IQ4_XS": _iq4_xs,
}
