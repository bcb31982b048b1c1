"""Writes into the pool and moves of blocks, against plain indexing."""

from collections.abc import Callable

import pytest
import torch

from kernels.cuda.blocks import WORDS, copy_blocks, reshape_and_cache, rotary_and_cache, swap_blocks
from kernels.cuda.pointwise import rotary
from tests.support.pairwise import pairwise
from tests.support.triton_devices import KernelDevice

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
Shape = tuple[int, int, int]


def make_pool(num_blocks: int, shape: Shape = (3, 4, 8), *, seed: int = 0, dtype: torch.dtype = torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_blocks, *shape, generator=generator).to(dtype)


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert torch.equal(actual.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("slots", "shape", "dtype"), pairwise([[0], [19, 5, 4, 6, 0], []], [(3, 4, 8), (1, 16, 64), (2, 5, 20)], DTYPES)
)
def test_tokens_land_in_their_slots_and_nowhere_else(
    device: KernelDevice, slots: list[int], shape: Shape, dtype: torch.dtype
) -> None:
    pool = make_pool(5, shape, dtype=dtype)
    num_heads, block_size, head_dim = shape
    qkv = torch.randn(len(slots), 3 * num_heads, head_dim).to(dtype)
    _, key, value = qkv.split(num_heads, dim=1)
    expected = pool.clone()
    for token, slot in enumerate(slots):
        expected[0, slot // block_size, :, slot % block_size] = key[token]
        expected[1, slot // block_size, :, slot % block_size] = value[token]
    outcome = device.run(reshape_and_cache, key, value, pool, torch.tensor(slots, dtype=torch.int64))
    assert_same_bits(outcome.arguments[2], expected)


def test_keys_of_any_stride_are_written(device: KernelDevice) -> None:
    key, value = torch.randn(8, 3, 2), torch.randn(3, 2, 8)
    key, value = key.permute(2, 1, 0), value.transpose(0, 1)
    assert not key.is_contiguous()
    assert not value.is_contiguous()
    pool = make_pool(4)
    pool = device.run(reshape_and_cache, key, value, pool, torch.tensor([1, 9])).arguments[2]
    assert torch.equal(pool[0, 2, :, 1], key[1])
    assert torch.equal(pool[1, 0, :, 1], value[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [2, 20, 64])
def test_fused_rotary_and_cache_is_the_one_after_the_other(
    device: KernelDevice, head_dim: int, dtype: torch.dtype
) -> None:
    pool = make_pool(4, (3, 4, head_dim), dtype=dtype)
    query, key, value = torch.randn(5, 12, head_dim).to(dtype).split((6, 3, 3), dim=1)
    table = torch.rand(50, head_dim)
    positions, slots = torch.tensor([0, 49, 7, 7, 3]), torch.tensor([15, 2, 3, 4, 8])
    turned_query, turned_key = device.run(rotary, query, key, positions, table).result
    expected = device.run(reshape_and_cache, turned_key, value, pool.clone(), slots).arguments[2]
    outcome = device.run(rotary_and_cache, query, key, value, positions, table, pool, slots)
    assert_same_bits(outcome.result, turned_query)
    assert_same_bits(outcome.arguments[5], expected)


COPIES = {
    "chain": [(0, 1), (1, 2), (4, 0)],
    "swap of two": [(2, 3), (3, 2)],
    "fan out": [(5, 0), (5, 1), (5, 2)],
    "one": [(0, 5)],
    "onto itself": [(3, 3)],
}


# The last shape: blocks that take several programs, the last of which is not full.
@pytest.mark.parametrize(
    ("pairs", "shape", "dtype"),
    pairwise(list(COPIES.values()), [(3, 4, 8), (1, 3, 5), (3, 32, WORDS // 64)], [torch.float32, torch.bfloat16]),
)
def test_copies_read_all_sources_before_they_write(
    device: KernelDevice, pairs: list[tuple[int, int]], shape: Shape, dtype: torch.dtype
) -> None:
    pools = [make_pool(6, shape, seed=layer, dtype=dtype) for layer in range(3)]
    pools[1][0, 5, 0, 0, 0] = torch.nan
    outcome = device.run(copy_blocks, pools, torch.tensor(pairs))
    for actual, before in zip(outcome.arguments[0], pools, strict=True):
        expected = before.clone()
        for source, destination in pairs:
            expected[:, destination] = before[:, source]
        assert_same_bits(actual, expected)


# The last shape: more pieces than there are programs.
@pytest.mark.parametrize(
    ("sizes", "shape", "dtype"), pairwise([(10, 4), (4, 10)], [(3, 4, 8), (3, 32, WORDS // 64)], DTYPES)
)
def test_swap_moves_blocks_between_pools_of_different_size(
    device: KernelDevice, sizes: tuple[int, int], shape: Shape, dtype: torch.dtype
) -> None:
    pairs = [(sizes[0] - 1, 0), (2, 3), (2, 1)]
    source = [make_pool(sizes[0], shape, seed=layer, dtype=dtype) for layer in range(3)]
    destination = [make_pool(sizes[1], shape, seed=layer + 9, dtype=dtype) for layer in range(3)]
    expected = [pool.clone() for pool in destination]
    for pool, old in zip(source, expected, strict=True):
        for first, second in pairs:
            old[:, second] = pool[:, first]
    moved = device.run(swap_blocks, source, destination, torch.tensor(pairs)).arguments[1]
    for actual, wanted in zip(moved, expected, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("move", [copy_blocks, lambda pools, pairs: swap_blocks(pools, pools, pairs)])
def test_no_pairs_and_no_layers_change_nothing(move: Callable[..., None]) -> None:
    pool = make_pool(3)
    before = pool.clone()
    move([pool], torch.empty(0, 2, dtype=torch.int64))
    move([], torch.tensor([[0, 1]]))
    assert torch.equal(pool, before)


def test_layers_that_differ_are_refused(device: KernelDevice) -> None:
    pools = [make_pool(3), make_pool(4)]
    with pytest.raises(ValueError, match=r"source has shape \[2, 4, 3, 4, 8\]; expected \[2, 3, 3, 4, 8\]"):
        device.run(copy_blocks, pools, torch.tensor([[0, 1]]))
