"""Checks of the arguments of operations.

Each raises ValueError and names the argument, its value and the limit; IndexError if the content of an index tensor
is wrong.
"""

from collections.abc import Sequence

import torch

from quire_kernels import int8

FLOATING = (torch.float32, torch.bfloat16, torch.float16)


def check_shape(name: str, tensor: torch.Tensor, expected: Sequence[int | None]) -> None:
    """A None in `expected` allows any size of that dimension."""
    shape = tensor.shape
    if shape == expected:  # Five times as fast as the comparison below.
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


def check_same_tokens(name: str, tensor: torch.Tensor, tokens: torch.Tensor) -> None:
    """Whether both have one dtype and are on one device."""
    check_dtype(name, tensor, tokens.dtype)
    check_device(name, tensor, tokens.device)


def check_kv_cache(kv_cache: torch.Tensor) -> None:
    """A layer's KV pool: [2, num_blocks, num_kv_heads, block_size, head_dim], or int8 lines; [1, ...] if its lines are
    latents. The keys of a block are contiguous, its values too; blocks are equally far apart, keys and values too."""
    if kv_cache.dim() != 5 or kv_cache.size(0) not in (1, 2):
        check_shape("kv_cache", kv_cache, (2, None, None, None, None))
    check_dtype("kv_cache", kv_cache, (*FLOATING, torch.int8))
    if not kv_cache.is_contiguous() and not kv_cache[0, 0].is_contiguous():
        raise ValueError("kv_cache is not contiguous")


def check_block_pairs(pairs: torch.Tensor) -> None:
    check_shape("pairs", pairs, (None, 2))
    check_dtype("pairs", pairs, torch.int64)


def check_block_ids(pairs: torch.Tensor, source: Sequence[torch.Tensor], destination: Sequence[torch.Tensor]) -> None:
    """Checks that `pairs`, on the host, name blocks that exist in both pools. Each pool has at least one layer."""
    for name, layers, block_ids in zip(("source", "destination"), (source, destination), pairs.unbind(1), strict=True):
        num_blocks = min(layer.size(1) for layer in layers)
        beyond = block_ids[(block_ids < 0) | (block_ids >= num_blocks)]
        if beyond.numel():
            raise IndexError(f"pairs names {name} block {int(beyond[0])}; the pool has {num_blocks} blocks")


def check_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    sinks: torch.Tensor | None,
) -> None:
    check_kv_cache(kv_cache)
    _, _, num_kv_heads, _, _ = kv_cache.shape
    if query.dim() != 3 or not _fits(query, kv_cache):
        check_shape("query", query, (None, None, _max_head_dim(kv_cache)))
    num_heads = query.size(1)
    if num_heads == 0 or num_heads % num_kv_heads:
        raise ValueError(f"query has {num_heads} heads; expected a multiple of the {num_kv_heads} of kv_cache")
    num_rows = seq_lens.shape[0]
    check_shape("block_tables", block_tables, (num_rows, None))
    check_shape("query_start_loc", query_start_loc, (num_rows + 1,))
    check_shape("seq_lens", seq_lens, (num_rows,))
    device = kv_cache.device
    check_dtype("query", query, dtype_written_to(kv_cache) or FLOATING)
    check_device("query", query, device)
    for name, tensor in (
        ("block_tables", block_tables),
        ("query_start_loc", query_start_loc),
        ("seq_lens", seq_lens),
    ):
        check_dtype(name, tensor, torch.int32)
        check_device(name, tensor, device)
    for name, numbers in (("alibi_slopes", alibi_slopes), ("sinks", sinks)):
        if numbers is not None:
            check_shape(name, numbers, (num_heads,))
            check_dtype(name, numbers, torch.float32)
            check_device(name, numbers, device)


def check_extent(max_query_len: int, max_seq_len: int, num_columns: int, block_size: int) -> None:
    if not 1 <= max_query_len <= max_seq_len:
        raise ValueError(f"max_query_len is {max_query_len}; expected 1 to max_seq_len, {max_seq_len}")
    if max_seq_len > num_columns * block_size:
        raise ValueError(f"max_seq_len is {max_seq_len}; {num_columns} blocks of {block_size} tokens hold fewer")


def check_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    check_shape("weight", weight, (x.shape[-1],))
    check_dtype("x", x, FLOATING)
    check_device("weight", weight, x.device)


def check_layer_norm(x: torch.Tensor, weight: torch.Tensor | None, bias: torch.Tensor | None) -> None:
    for name, tensor in (("weight", weight), ("bias", bias)):
        if tensor is not None:
            check_shape(name, tensor, (x.shape[-1],))


def check_write(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    check_kv_cache(kv_cache)
    check_dtype("slot_mapping", slot_mapping, torch.int64)
    check_shape("slot_mapping", slot_mapping, (slot_mapping.numel(),))
    head_dim = key.shape[-1] if key.dim() == 3 and _fits(key, kv_cache) else _max_head_dim(kv_cache)
    expected = (slot_mapping.numel(), kv_cache.shape[2], head_dim)
    dtypes, device = dtype_written_to(kv_cache) or FLOATING, kv_cache.device
    for name, tensor in (("key", key), ("value", value)):
        check_shape(name, tensor, expected)
        check_dtype(name, tensor, dtypes)
        check_device(name, tensor, device)
    check_dtype("value", value, key.dtype)
    check_device("slot_mapping", slot_mapping, device)


def check_rotary(query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor) -> None:
    if query.dim() != 3:
        check_shape("query", query, (None, None, None))
    num_tokens, _, head_dim = query.shape
    check_shape("key", key, (num_tokens, None, head_dim))
    check_dtype("key", key, query.dtype)
    check_shape("positions", positions, (num_tokens,))
    check_dtype("positions", positions, torch.int64)
    check_shape("cos_sin_cache", cos_sin_cache, (None, head_dim))
    check_dtype("cos_sin_cache", cos_sin_cache, torch.float32)
    if head_dim % 2:
        raise ValueError(f"query has head size {head_dim}; expected an even one")
    device = query.device
    for name, tensor in (("key", key), ("positions", positions), ("cos_sin_cache", cos_sin_cache)):
        check_device(name, tensor, device)


def dtype_written_to(kv_cache: torch.Tensor) -> torch.dtype | None:
    """The dtype of the keys, values and queries that a pool takes; None if it takes any floating one."""
    return None if kv_cache.dtype == torch.int8 else kv_cache.dtype


def _fits(x: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Whether lines of x [T, H, D] have the length of the pool's lines."""
    head_dim, width = x.size(2), kv_cache.size(4)
    return width == (int8.line_bytes(head_dim) if kv_cache.dtype == torch.int8 else head_dim)


def _max_head_dim(kv_cache: torch.Tensor) -> int:
    width = kv_cache.size(4)
    return int8.max_head_dim(width) if kv_cache.dtype == torch.int8 else width


def offset_of_values(kv_cache: torch.Tensor) -> int:
    """Elements from a key to its value; 0 in a pool of latents."""
    return kv_cache.stride(0) if kv_cache.shape[0] == 2 else 0
