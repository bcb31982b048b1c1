"""A KV pool filled with random keys and values."""

import torch

from kernels import ops
from kernels.checks import dtype_written_to


def fill_pool(layers: tuple[torch.Tensor, ...], head_dim: int) -> None:
    """Writes keys and values of a normal distribution to all blocks, as in service.

    Args:
        layers: [2, num_blocks, num_kv_heads, block_size, D] each, or a packed form of D in a pool of another dtype.
    """
    for layer in layers:
        _, num_blocks, num_heads, block_size, _ = layer.shape
        shape = num_blocks * block_size, num_heads, head_dim
        dtype = dtype_written_to(layer) or torch.bfloat16
        key, value = (torch.randn(shape).to(dtype) for _ in range(2))
        ops.reshape_and_cache(key, value, layer, torch.arange(shape[0]))
