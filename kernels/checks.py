"""Checks of arguments that the operations share. Each raises ValueError and names the argument, value and limit; where
it is the content of a tensor that is wrong, IndexError.
"""

from collections.abc import Sequence

import torch

from kernels.short_cache import SHORT_DTYPE, can_be_short

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | None]) -> None:
    """None in `expected` allows any size of that dimension."""
    shape = tensor.shape
    if shape == expected:  # Takes a fifth of the time of what follows.
        return
    if len(shape) == len(expected):
        for size, wanted in zip(shape, expected, strict=True):
            if wanted is not None and size != wanted:
                break
        else:
            return
    wanted_text = ", ".join("any" if size is None else str(size) for size in expected)
    raise ValueError(f"{name} has shape {list(shape)}; expected [{wanted_text}]")


def check_dtype(name: str, tensor: torch.Tensor, expected: torch.dtype | tuple[torch.dtype, ...]) -> None:
    allowed = expected if isinstance(expected, tuple) else (expected,)
    if tensor.dtype not in allowed:
        raise ValueError(f"{name} has dtype {tensor.dtype}; expected {' or '.join(str(dtype) for dtype in allowed)}")


def check_device(name: str, tensor: torch.Tensor, expected: torch.device) -> None:
    if tensor.device != expected:
        raise ValueError(f"{name} is on {tensor.device}; expected {expected}")


def check_kv_cache(kv_cache: torch.Tensor) -> None:
    """A layer's KV pool: contiguous [2, num_blocks, num_kv_heads, block_size, head_dim], or lines of int8, or int16."""
    if kv_cache.dim() != 5 or kv_cache.size(0) != 2:
        check_shape("kv_cache", kv_cache, (2, None, None, None, None))
    check_dtype("kv_cache", kv_cache, (*FLOATING, torch.int8, SHORT_DTYPE))
    if kv_cache.dtype == SHORT_DTYPE and not can_be_short(kv_cache.size(3), kv_cache.size(4)):
        raise ValueError(
            f"kv_cache is of {SHORT_DTYPE} with tiles of {kv_cache.size(3)} times {kv_cache.size(4)} numbers; expected "
            "head sizes from 16 on, and a multiple of 128 numbers up to 65536"
        )
    if not kv_cache.is_contiguous():
        raise ValueError("kv_cache is not contiguous")


def check_pairs(pairs: torch.Tensor) -> None:
    check_shape("pairs", pairs, (None, 2))
    check_dtype("pairs", pairs, torch.int64)


def check_blocks_of(pairs: torch.Tensor, source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor]) -> None:
    """Whether pairs on the host name blocks of both pools alone; these have a layer at least."""
    for name, layers, block_ids in zip(("source", "destination"), (source, destination), pairs.unbind(1), strict=True):
        num_blocks = min(layer.size(1) for layer in layers)
        beyond = block_ids[(block_ids < 0) | (block_ids >= num_blocks)]
        if beyond.numel():
            raise IndexError(f"pairs names {name} block {int(beyond[0])}; the pool has {num_blocks} blocks")
