"""A KV pool of int8: a line of one token and head is its codes, then its float32 scale, in one tile.

So whatever moves blocks moves their scales with them and needs not know of them. The scale is a part of the line and
not of a tensor of its own for another reason too: attention reads a tile as one stream.

The CPU library multiplies queries of decodes with the codes as they are, and applies the scales to scores and weights;
for a prefill it makes lines floating, a tile at a time. For other implementations the blocks of a batch are made
floating in scratch memory first, each once however many rows share it. A line that was not finite when it was written
is not finite when it is read.
"""

import torch

from kernels.int8 import quantize

_SCALE_BYTES = torch.float32.itemsize
# Lines that are made floating at once: what comes between stays in the caches. 29 MB of lines, two cores: 79 ms in
# pieces, 125 at once.
_BYTES_AT_ONCE = 1 << 18


def line_bytes(head_dim: int) -> int:
    """Size of a line: the codes, padded so that the scale and the next line are aligned, and the scale."""
    return -(-head_dim // _SCALE_BYTES) * _SCALE_BYTES + _SCALE_BYTES


def most_head_dim(width: int) -> int:
    """The greatest head size whose lines have this many bytes."""
    return width - _SCALE_BYTES


def quantized_lines(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] as lines of a pool, [T, H, line_bytes(D)] int8."""
    num_tokens, num_heads, head_dim = x.shape
    quantized = quantize(x) if x.numel() else None
    lines = torch.zeros((num_tokens, num_heads, line_bytes(head_dim)), dtype=torch.int8, device=x.device)
    if quantized is not None:
        lines[..., :head_dim] = quantized.codes
        lines[..., -_SCALE_BYTES:] = quantized.scales.view(torch.int8)
    return lines


def as_words(lines: torch.Tensor) -> torch.Tensor:
    """Lines [..., line_bytes] as float32 words, which plain copies take four bytes at a time."""
    return lines.view(torch.float32)


def dequantized(lines: torch.Tensor, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous lines [..., line_bytes] as numbers [..., head_dim]."""
    scales = as_words(lines)[..., -1:]
    # Through float32, so that a number is rounded once.
    return lines[..., :head_dim].to(torch.float32).mul_(scales).to(dtype)


def floating_blocks(
    kv_cache: torch.Tensor, block_tables: torch.Tensor, seq_lens: torch.Tensor, query: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks that the rows' contexts are in, as a pool of the query's dtype, and the tables that name them there.

    Args:
        kv_cache: [2, num_blocks, Hkv, B, line_bytes(D)] int8.
        block_tables: [R, M] int32; entries beyond a row's context mean nothing.
        seq_lens: [R] int32.

    Raises:
        IndexError: a table names a block that is not in the pool.
    """
    block_size = kv_cache.shape[3]
    first_tokens = torch.arange(block_tables.shape[1], device=block_tables.device) * block_size
    is_used = first_tokens < seq_lens[:, None]
    # Where entries mean nothing the first block of the first row stands in for them.
    used = block_tables.where(is_used, block_tables[:1, :1])
    block_ids, tables = torch.unique(used, return_inverse=True)
    if block_ids.numel() and not 0 <= int(block_ids[0]) <= int(block_ids[-1]) < kv_cache.shape[1]:
        raise IndexError("block_tables names a block that is not in kv_cache")
    shape = (2, block_ids.shape[0], *kv_cache.shape[2:4], query.shape[-1])
    pool = torch.empty(shape, dtype=query.dtype, device=query.device)
    count = max(1, _BYTES_AT_ONCE // max(1, 2 * kv_cache[0, 0].numel()))
    for start in range(0, block_ids.shape[0], count):
        lines = kv_cache.index_select(1, block_ids[start : start + count])
        pool[:, start : start + count] = dequantized(lines, query.shape[-1], query.dtype)
    return pool, tables.to(torch.int32)
