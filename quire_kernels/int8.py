"""Rounding to int8, and the KV pool of int8.

Rounding is symmetric, with one scale for each line: value = round(x / scale), from -127 to 127.

In a KV pool of int8 the line of one token and head is its int8 values, then its float32 scale, in one tile. So blocks
move together with their scales, and attention reads a tile as one stream. A line that was not finite when it was
written is not finite when it is read.

The CPU library multiplies queries of decodes with the int8 values as they are, and applies the scales to scores and
weights; for a prefill it makes lines floating, a tile at a time. For other implementations the blocks of a batch become
floating in scratch memory first, each block once however many rows share it.
"""

from dataclasses import dataclass

import torch

MAX_VALUE = 127
"""The greatest int8 value. -128 is not used, so that the range is symmetric."""

_SCALE_BYTES = torch.float32.itemsize
# Bytes of lines that become floating at once, so that intermediate results stay in the caches. 29 MB of lines on two
# cores: 79 ms in pieces, 125 at once.
_BYTES_AT_ONCE = 1 << 18


@dataclass(frozen=True, slots=True)
class QuantizedLines:
    """Numbers as `values * scales`."""

    values: torch.Tensor
    """[..., n] int8."""
    scales: torch.Tensor
    """[..., 1]; 0 for lines of zeros, not finite for lines with a number that is not."""


def quantize(x: torch.Tensor, scale_dtype: torch.dtype = torch.float32) -> QuantizedLines:
    """Rounds each line of x [..., n] to int8.

    The scale is rounded to its dtype before the values are made, which costs nearly no precision: each number is at
    most half a scale off, and one near its line's largest a little more if the dtype is short.
    """
    numbers = x.float()
    scales = (numbers.abs().amax(dim=-1, keepdim=True) / MAX_VALUE).to(scale_dtype)
    # A scale that underflowed to 0 gives values of 0.
    divisors = scales.float().masked_fill(scales == 0, torch.inf)
    values = (numbers / divisors).nan_to_num_(0.0).round_().clamp_(-MAX_VALUE, MAX_VALUE).to(torch.int8)
    return QuantizedLines(values, scales)


def line_bytes(head_dim: int) -> int:
    """Size of a pool's line: the values, padded so that the scale and the next line are aligned, and the scale."""
    return -(-head_dim // _SCALE_BYTES) * _SCALE_BYTES + _SCALE_BYTES


def max_head_dim(width: int) -> int:
    """The greatest head size whose lines have this many bytes."""
    return width - _SCALE_BYTES


def quantized_lines(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] as lines of a pool, [T, H, line_bytes(D)] int8."""
    num_tokens, num_heads, head_dim = x.shape
    lines = torch.zeros((num_tokens, num_heads, line_bytes(head_dim)), dtype=torch.int8, device=x.device)
    if x.numel():
        quantized = quantize(x)
        lines[..., :head_dim] = quantized.values
        lines[..., -_SCALE_BYTES:] = quantized.scales.view(torch.int8)
    return lines


def as_words(lines: torch.Tensor) -> torch.Tensor:
    """Lines [..., line_bytes] as float32 words, which plain copies move four bytes at a time."""
    return lines.view(torch.float32)


def dequantized(lines: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous lines [..., line_bytes] as numbers [..., head_dim]."""
    scales = as_words(lines)[..., -1:]
    # Through float32, so that a number is rounded once.
    return lines[..., :head_dim].to(torch.float32).mul_(scales).to(dtype)


def floating_blocks(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of the rows' contexts as a pool of the query's dtype, and block tables for that pool.

    Args:
        kv_cache: [2, num_blocks, Hkv, B, line_bytes(D)] int8; [1, ...] of latents.
        block_tables: [R, M] int32; entries beyond a row's context are not read.
        seq_lens: [R] int32.

    Raises:
        IndexError: a table names a block that is not in the pool.
    """
    block_size = kv_cache.shape[3]
    first_tokens = torch.arange(block_tables.shape[1], device=block_tables.device) * block_size
    is_used = first_tokens < seq_lens[:, None]
    # The first block of the first row stands in for entries that are not read.
    used = block_tables.where(is_used, block_tables[:1, :1])
    block_ids, tables = torch.unique(used, return_inverse=True)
    if block_ids.numel() and not 0 <= int(block_ids[0]) <= int(block_ids[-1]) < kv_cache.shape[1]:
        raise IndexError("block_tables names a block that is not in kv_cache")
    shape = (kv_cache.shape[0], block_ids.shape[0], *kv_cache.shape[2:4], query.shape[-1])
    pool = torch.empty(shape, dtype=query.dtype, device=query.device)
    count = max(1, _BYTES_AT_ONCE // max(1, 2 * kv_cache[0, 0].numel()))
    for start in range(0, block_ids.shape[0], count):
        lines = kv_cache.index_select(1, block_ids[start : start + count])
        pool[:, start : start + count] = dequantized(lines, query.shape[-1], query.dtype)
    return pool, tables.to(torch.int32)
