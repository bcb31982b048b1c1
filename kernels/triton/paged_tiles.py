"""Queries, keys and values as tiles of vectors: where they lie, and how they are loaded."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from kernels.triton.paged_batch import Shape


class Context(NamedTuple):
    """What a KV head has in a layer's pool for one row.

    Attributes:
        keys: pointer to the head's keys in block 0.
        value_offset: from a key to its value.
        block_table: pointer to the row's block ids.
    """

    keys: Any
    value_offset: Any
    block_table: Any


@triton.jit
def find_context(kv_cache, value_offset, block_tables, table_stride, row, head, SHAPE: Shape):
    """The context of `row`, as the KV head `head` has it."""
    keys = kv_cache + head * (SHAPE.block_size * SHAPE.head_dim)
    return Context(keys, value_offset, block_tables + row.to(tl.int64) * table_stride)


@triton.jit
def load_keys_and_values(context, positions, end, SHAPE: Shape):
    """Those [N, D] of the tokens at `positions` [N]; for positions from `end` on, those of the token before `end`.

    Slots beyond a context may hold NaN, which no weight of zero would silence. So they are not read, and to read a
    token of the context once more costs less than a mask.
    """
    # Unsigned: divisions by powers of two become shifts.
    positions = tl.minimum(positions, end - 1).to(tl.uint32)
    block_ids = tl.load(context.block_table + positions // SHAPE.block_size).to(tl.int64)
    slots = (positions % SHAPE.block_size).to(tl.int32)
    offsets = block_ids * (SHAPE.num_kv_heads * SHAPE.block_size * SHAPE.head_dim) + slots * SHAPE.head_dim
    keys = load_vectors(context.keys, offsets, None, SHAPE)
    values = load_vectors(context.keys + context.value_offset, offsets, None, SHAPE)
    return keys, values


@triton.jit
def load_vectors(base, offsets, wanted, SHAPE: Shape):
    """Vectors [N, D] that begin at `offsets` [N]; zeros where not `wanted` [N], which may be None for all."""
    dims = tl.arange(0, SHAPE.head_pad)
    return tl.load(base + offsets[:, None] + dims[None, :], mask=_mask(dims < SHAPE.head_dim, wanted), other=0.0)


@triton.jit
def store_vectors(base, offsets, wanted, vectors, SHAPE: Shape):
    """Stores `vectors` [N, D] to where `load_vectors` finds them, those that are `wanted` [N]."""
    dims = tl.arange(0, SHAPE.head_pad)
    mask = _mask(dims < SHAPE.head_dim, wanted)
    tl.store(base + offsets[:, None] + dims[None, :], vectors.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _mask(within, wanted):
    mask = within[None, :]
    if wanted is not None:
        mask = wanted[:, None] & mask
    return mask
