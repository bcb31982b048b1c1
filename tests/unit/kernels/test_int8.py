"""An int8 pool compared with a floating-point pool of the same numbers, and moves of its blocks."""

import pytest
import torch

from quire_kernels import ops
from quire_kernels.int8 import dequantized, line_bytes, quantize, quantized_lines
from tests.support.cpu_kernels import IMPLEMENTATIONS, parametrize_pairwise

BLOCK_SIZE = 5


def make_pool(num_blocks: int, num_kv_heads: int, head_dim: int) -> torch.Tensor:
    """Values and scales that were not written: scales are NaN."""
    shape = (2, num_blocks, num_kv_heads, BLOCK_SIZE, line_bytes(head_dim))
    return torch.full(shape, -1, dtype=torch.int8)


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 3, 64), (4, 0), (0, 8)])
def test_rounding_is_off_by_half_a_scale_at_most(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not all(shape):
        lines = quantized_lines(torch.zeros((*shape[:1], 2, 8) if not shape[0] else (4, 0, 8), dtype=dtype))
        assert lines.numel() == 0
        return
    x = noise(*shape, dtype=dtype)
    lines = quantize(x)
    error = (lines.values * lines.scales - x.float()).abs()
    assert (error <= lines.scales * 0.5001).all()


def test_lines_of_zeros_and_of_the_smallest_and_largest_numbers_survive() -> None:
    x = torch.zeros(5, 1, 8)
    x[1, 0, 3] = 3.0e38
    x[2, 0] = torch.tensor([1e-40, -1e-40, 0, 0, 0, 0, 0, 0])
    x[3, 0, 0] = 1e-30
    x[4, 0] = -127.0
    read = dequantized(quantized_lines(x), 8, torch.float32)
    assert torch.equal(read[0], x[0])
    torch.testing.assert_close(read, x, rtol=0.01, atol=1e-39)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_line_that_is_not_finite_stays_so_and_its_neighbours_finite(bad: float) -> None:
    x = noise(3, 2, 8)
    x[1, 0, 5] = bad
    read = dequantized(quantized_lines(x), 8, torch.bfloat16)
    finite = read.isfinite().all(dim=-1)
    assert finite.tolist() == [[True, True], [False, True], [True, True]]


@pytest.mark.usefixtures("implementation")
@parametrize_pairwise(
    "implementation,head_dim,heads,dtype,rows,has_sinks",
    IMPLEMENTATIONS,
    [1, 6, 16, 33, 80],
    [(4, 4), (6, 2), (3, 1)],
    [torch.float32, torch.bfloat16],
    [[(1, 1)], [(1, 9), (7, 7), (1, 23), (4, 12)], [(1, 600), (150, 270)]],
    [False, True],
)
def test_attention_is_that_over_the_rounded_keys_and_values(
    head_dim: int, heads: tuple[int, int], dtype: torch.dtype, rows: list[tuple[int, int]], has_sinks: bool
) -> None:
    num_heads, num_kv_heads = heads
    columns = max(-(-length // BLOCK_SIZE) for _, length in rows) + 1
    num_blocks = columns * len(rows) + 1
    tables = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(1))[:-1].view(len(rows), columns)
    slots = torch.cat(
        [
            tables[r, torch.arange(n) // BLOCK_SIZE] * BLOCK_SIZE + torch.arange(n) % BLOCK_SIZE
            for r, (_, n) in enumerate(rows)
        ]
    )
    for row, (_, length) in enumerate(rows):
        tables[row, -(-length // BLOCK_SIZE) :] = 2**31 - 1
    key, value = (noise(len(slots), num_kv_heads, head_dim, seed=seed, dtype=dtype) for seed in (2, 3))
    rounded_pool = make_pool(num_blocks, num_kv_heads, head_dim)
    ops.reshape_and_cache(key, value, rounded_pool, slots)
    pool = torch.full((2, num_blocks, num_kv_heads, BLOCK_SIZE, head_dim), float("nan"), dtype=dtype)
    for each, tensor in ((0, key), (1, value)):
        rounded = dequantized(quantized_lines(tensor), head_dim, dtype)
        pool[each, slots // BLOCK_SIZE, :, slots % BLOCK_SIZE] = rounded
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0).int()
    query = noise(int(starts[-1]), num_heads, head_dim, dtype=dtype)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    most_new, longest = max(new for new, _ in rows), int(lengths.max())
    sinks = torch.arange(num_heads, dtype=torch.float32) if has_sinks else None
    got, expected = (
        ops.paged_attention(
            *(query, each, tables.int(), starts, lengths),
            scale=0.3,
            max_query_len=most_new,
            max_seq_len=longest,
            sinks=sinks,
        )
        for each in (rounded_pool, pool)
    )
    assert got.dtype == dtype
    torch.testing.assert_close(got, expected, rtol=1e-2, atol=1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.usefixtures("implementation")
def test_rotated_keys_are_rounded_after_the_rotation() -> None:
    query, key, value = noise(7, 4, 16), noise(7, 2, 16, seed=1), noise(7, 2, 16, seed=2)
    positions, angles = torch.arange(7), torch.arange(7)[:, None] * torch.rand(8)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    pools = [make_pool(3, 2, 16), make_pool(3, 2, 16)]
    slots = torch.tensor([14, 2, 3, 7, 0, 9, 11])
    expected_query, rotated = ops.rotary(query.clone(), key.clone(), positions, table)
    ops.reshape_and_cache(rotated, value, pools[0], slots)
    got_query = ops.rotary_and_cache(query, key, value, positions, table, pools[1], slots)
    torch.testing.assert_close(got_query, expected_query)
    torch.testing.assert_close(pools[0], pools[1], rtol=0, atol=1)


@pytest.mark.usefixtures("implementation")
@parametrize_pairwise(
    "implementation,head_dim,dtype", IMPLEMENTATIONS, [1, 6, 16, 33, 80], [torch.float32, torch.bfloat16, torch.float16]
)
def test_every_implementation_writes_the_same_values(head_dim: int, dtype: torch.dtype) -> None:
    key, value = noise(9, 3, head_dim, dtype=dtype), noise(9, 3, head_dim, seed=1, dtype=dtype) * 40
    value[2, 1], key[4, 0, 0] = 0.0, float("nan")
    value[5, 2, -1], key[6, 0] = float("inf"), -1e-7
    pool, slots = make_pool(3, 3, head_dim), torch.tensor([14, 2, 3, 7, 0, 9, 11, 1, 5])
    ops.reshape_and_cache(key, value, pool, slots)
    written = pool[:, slots // BLOCK_SIZE, :, slots % BLOCK_SIZE].transpose(0, 1)
    expected = torch.stack((quantized_lines(key), quantized_lines(value)))
    read, wanted = (dequantized(lines.contiguous(), head_dim, torch.float32) for lines in (written, expected))
    torch.testing.assert_close(read.nan_to_num(9.0, 9.0), wanted.nan_to_num(9.0, 9.0), rtol=0, atol=0)
    untouched = make_pool(1, 3, head_dim)[0, 0, :, 0]
    assert torch.equal(pool[0, 0, :, 4], untouched), "a slot beside them"


@pytest.mark.usefixtures("implementation")
def test_blocks_move_with_their_scales() -> None:
    key, value = noise(5, 2, 8) * 100, noise(5, 2, 8, seed=1)
    gpu, host = [make_pool(4, 2, 8)], [make_pool(3, 2, 8)]
    ops.reshape_and_cache(key, value, gpu[0], torch.arange(5) + 2 * BLOCK_SIZE)
    written = gpu[0][:, 2].clone()
    ops.swap_blocks(gpu, host, torch.tensor([[2, 1]]))
    ops.swap_blocks(host, gpu, torch.tensor([[1, 0]]))
    ops.copy_blocks(gpu, torch.tensor([[0, 3]]))
    assert all(torch.equal(gpu[0][:, block], written) for block in (0, 2, 3))


@pytest.mark.parametrize(
    ("key_dtype", "value_dtype"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)]
)
def test_values_of_another_dtype_than_the_keys_are_refused(key_dtype: torch.dtype, value_dtype: torch.dtype) -> None:
    pool, slots = make_pool(2, 1, 8), torch.arange(1)
    key, value = noise(1, 1, 8, dtype=key_dtype), noise(1, 1, 8, dtype=value_dtype)
    with pytest.raises(ValueError, match=f"value has dtype {value_dtype}; expected {key_dtype}"):
        ops.reshape_and_cache(key, value, pool, slots)
    with pytest.raises(ValueError, match=f"value has dtype {value_dtype}; expected {key_dtype}"):
        ops.rotary_and_cache(key, key, value, slots, torch.ones(1, 8), pool, slots)


@pytest.mark.usefixtures("implementation")
def test_lines_of_another_length_and_blocks_that_are_not_there_are_refused() -> None:
    pool, slots = make_pool(2, 1, 8), torch.arange(1)
    with pytest.raises(ValueError, match=r"key has shape \[1, 1, 16\]; expected \[1, 1, 8\]"):
        ops.reshape_and_cache(noise(1, 1, 16), noise(1, 1, 16), pool, slots)
    with pytest.raises(ValueError, match="query has shape"):
        ops.paged_attention(
            noise(1, 1, 4), pool, *(torch.tensor(x, dtype=torch.int32) for x in ([[0]], [0, 1], [1])),
            scale=1.0, max_query_len=1, max_seq_len=1,
        )  # fmt: skip
    for block in (2, -1):
        with pytest.raises(IndexError, match="block_tables names a block"):
            ops.paged_attention(
                noise(1, 1, 8), pool, *(torch.tensor(x, dtype=torch.int32) for x in ([[block]], [0, 1], [1])),
                scale=1.0, max_query_len=1, max_seq_len=1,
            )  # fmt: skip
