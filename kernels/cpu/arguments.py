"""How tensors are told to the CPU library: the parts of the structs of api.h that operations share."""

from collections.abc import Callable, Sequence

import torch

from kernels.short_cache import SHORT_DTYPE

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""The enum Dtype."""
NO_HEADS = (0, 0, 0, 0, 0, 0, 0)
NO_CACHE = (0, 0, 0, 0, 0, 0)

Empty = Callable[[Sequence[int], torch.dtype], torch.Tensor]
"""Makes a contiguous tensor of this shape, whatever is in it."""


def empty(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """An `Empty` of torch's memory."""
    return torch.empty(shape, dtype=dtype)


def dense(x: torch.Tensor) -> torch.Tensor:
    """x, copied only if its last dimension is not contiguous."""
    return x if x.stride(-1) == 1 else x.contiguous()


def as_lines(x: torch.Tensor) -> torch.Tensor:
    """x [..., n] as [lines, n], copied only if that takes it."""
    if x.dim() != 2:
        x = x.unsqueeze(0) if x.dim() == 1 else x.flatten(0, -2)
    return dense(x)


def heads_of(source: torch.Tensor, target: torch.Tensor | None) -> tuple[int, int, int, int, int, int, int]:
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


def cache_slots(kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> tuple[int, int, int, int, int, int]:
    """The struct CacheSlots."""
    _, num_blocks, _, block_size, _ = kv_cache.shape
    return kv_cache.data_ptr(), slot_mapping.data_ptr(), num_blocks, block_size, *storage_of(kv_cache)


def storage_of(kv_cache: torch.Tensor) -> tuple[int, int]:
    """Bytes of a line of a pool of int8, else 0; and whether a pool has short blocks."""
    return (kv_cache.shape[4] if kv_cache.dtype == torch.int8 else 0), int(kv_cache.dtype == SHORT_DTYPE)


_ERRORS: dict[int, tuple[type[Exception], str]] = {
    1: (IndexError, "block_tables names a block that is not in kv_cache"),
    2: (IndexError, "query_start_loc and seq_lens contradict each other or the shapes"),
    3: (IndexError, "slot_mapping names a slot that is not in kv_cache"),
    4: (IndexError, "positions has one that is not in cos_sin_cache"),
    5: (MemoryError, "the operation found no memory for its intermediate results"),
}


def check_status(status: int) -> None:
    """Raises what a status of api.h means, unless it is kOk."""
    if status:
        error, message = _ERRORS[status]
        raise error(message)
