"""A KV pool filled with random keys and values."""

import torch

from kernels import ops
from kernels.checks import dtype_written_to


def fill_pool(layers: tuple[torch.Tensor, ...], head_dim: int) -> None:
    """Writes keys and values, or latents, of a normal distribution to all blocks, as in service.

    Args:
        layers: [lines_per_token, num_blocks, num_kv_heads, block_size, D] each, or a packed form of D in a pool of
            another dtype.
    """
    for layer in layers:
        num_lines, num_blocks, num_heads, block_size, _ = layer.shape
        shape = num_blocks * block_size, num_heads, head_dim
        dtype = dtype_written_to(layer) or torch.bfloat16
        lines, slots = [torch.randn(shape).to(dtype) for _ in range(num_lines)], torch.arange(shape[0])
        if num_lines == 1:
            ops.cache_latents(lines[0], layer, slots)
        else:
            ops.reshape_and_cache(lines[0], lines[1], layer, slots)
