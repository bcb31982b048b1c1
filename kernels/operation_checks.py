"""What single operations ask of their arguments, in the words of `kernels.ops`. Each check raises ValueError."""

import torch

from kernels import int8_cache
from kernels.checks import FLOATING, check_device, check_dtype, check_kv_cache, check_shape
from kernels.short_cache import SHORT_DTYPE


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
        check_shape("query", query, (None, None, _most_head_dim(kv_cache)))
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
    head_dim = key.shape[-1] if key.dim() == 3 and _fits(key, kv_cache) else _most_head_dim(kv_cache)
    expected, dtypes, device = (
        (slot_mapping.numel(), kv_cache.shape[2], head_dim),
        dtype_written_to(kv_cache) or FLOATING,
        kv_cache.device,
    )
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


def _fits(x: torch.Tensor, kv_cache: torch.Tensor) -> bool:
    """Whether lines of x [T, H, D] are as long as those of the pool."""
    head_dim, width = x.size(2), kv_cache.size(4)
    return width == (int8_cache.line_bytes(head_dim) if kv_cache.dtype == torch.int8 else head_dim)


def _most_head_dim(kv_cache: torch.Tensor) -> int:
    width = kv_cache.size(4)
    return int8_cache.most_head_dim(width) if kv_cache.dtype == torch.int8 else width


def dtype_written_to(kv_cache: torch.Tensor) -> torch.dtype | None:
    """The dtype of keys and values that go into a pool, and of queries; None where any floating one does."""
    if kv_cache.dtype == torch.int8:
        return None
    return torch.bfloat16 if kv_cache.dtype == SHORT_DTYPE else kv_cache.dtype
