"""Writing tokens into the pool and moving blocks."""

from collections.abc import Callable

import pytest
import torch

from quire_kernels import host_memory, ops, reference
from tests.support.cpu_kernels import IMPLEMENTATIONS, parametrize_pairwise
from tests.support.pairwise import pairwise

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SWAPS = [host_memory.swap_blocks, reference.swap_blocks]


def make_pool(num_blocks: int = 6, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, num_blocks, 3, 4, 8, generator=generator).to(dtype)


@pytest.mark.usefixtures("implementation")
@parametrize_pairwise("implementation,slots,dtype", IMPLEMENTATIONS, [[0], [23, 5, 4, 6, 0], []], DTYPES)
def test_tokens_land_in_their_slots_and_nowhere_else(slots: list[int], dtype: torch.dtype) -> None:
    pool = make_pool(dtype=dtype)
    expected = pool.clone()
    key, value = torch.randn(2, len(slots), 3, 8).to(dtype)
    for token, slot in enumerate(slots):
        expected[0, slot // 4, :, slot % 4] = key[token]
        expected[1, slot // 4, :, slot % 4] = value[token]
    ops.reshape_and_cache(key, value, pool, torch.tensor(slots, dtype=torch.int64))
    assert torch.equal(pool, expected)


@pytest.mark.usefixtures("implementation")
def test_copies_read_all_sources_before_they_write() -> None:
    pools = [make_pool(seed=layer) for layer in range(2)]
    before = [pool.clone() for pool in pools]
    ops.copy_blocks(pools, torch.tensor([[0, 1], [1, 2], [4, 0]]))
    for pool, old in zip(pools, before, strict=True):
        assert torch.equal(pool, old[:, [4, 0, 1, 3, 4, 5]])


PAIRS = [
    [(0, 0)],
    [(2, 7), (3, 8), (4, 9), (5, 10)],
    [(5, 1), (4, 2), (3, 3), (0, 0)],
    [(1, 4), (3, 5), (2, 3), (6, 8), (7, 9)],
    [(8, 0), (8, 1), (8, 2), (9, 3)],
]


@pytest.mark.parametrize(("pairs", "swap", "dtype"), pairwise(PAIRS, SWAPS, DTYPES))
def test_every_swap_moves_the_same_bits(
    pairs: list[tuple[int, int]], swap: Callable[..., None], dtype: torch.dtype
) -> None:
    source = [make_pool(10, seed=layer, dtype=dtype) for layer in range(3)]
    source[1][0, 8, 0, 0, 0] = torch.nan
    destination = [make_pool(11, seed=layer + 9, dtype=dtype) for layer in range(3)]
    expected = [pool.clone() for pool in destination]
    for pool, old in zip(source, expected, strict=True):
        for first, second in pairs:
            old[:, second] = pool[:, first]
    swap(source, destination, torch.tensor(pairs))
    for pool, old in zip(destination, expected, strict=True):
        assert torch.equal(pool.view(torch.uint8), old.view(torch.uint8))


@pytest.mark.parametrize("swap", SWAPS, ids=["host_memory", "reference"])
def test_a_model_without_layers_and_a_step_without_blocks_swap_nothing(swap: Callable[..., None]) -> None:
    none, pool = torch.empty(0, 2, dtype=torch.int64), make_pool()
    before = pool.clone()
    swap([], [], torch.tensor([[0, 1]]))
    swap([make_pool(seed=3)], [pool], none)
    assert torch.equal(pool, before)


@pytest.mark.parametrize("pair", [(6, 1), (-1, 1), (1, 6), (1, 4), (1, -1), (100, 100), (-1, -1)])
def test_moves_of_blocks_that_are_not_there_raise_and_move_nothing(pair: tuple[int, int]) -> None:
    pools, pairs = [make_pool(6), make_pool(4, seed=1)], torch.tensor([(0, 2), pair])
    before = [pool.clone() for pool in pools]
    missing = r"pairs names (source|destination) block -?\d+; the pool has [64] blocks"
    with pytest.raises(IndexError, match=missing):
        ops.swap_blocks(pools[:1], pools[1:], pairs)
    if pair != (1, 4):
        with pytest.raises(IndexError, match=missing):
            ops.copy_blocks(pools[:1], pairs)
    assert all(map(torch.equal, pools, before))


def test_misfits_are_refused() -> None:
    pool, slots = make_pool(), torch.tensor([0, 1])
    good = torch.zeros(2, 3, 8)
    with pytest.raises(ValueError, match=r"key has shape \[2, 2, 8\]; expected \[2, 3, 8\]"):
        ops.reshape_and_cache(good[:, :2], good, pool, slots)
    with pytest.raises(ValueError, match=r"value has dtype torch.bfloat16; expected torch.float32"):
        ops.reshape_and_cache(good, good.bfloat16(), pool, slots)
    with pytest.raises(ValueError, match=r"slot_mapping has dtype torch.int32"):
        ops.reshape_and_cache(good, good, pool, slots.int())
    with pytest.raises(ValueError, match="pairs has shape"):
        ops.copy_blocks([pool], slots)
    with pytest.raises(ValueError, match="source has 1 layers; destination has 2"):
        ops.swap_blocks([pool], [pool, pool], slots[None])
    with pytest.raises(ValueError, match="destination has dtype"):
        ops.swap_blocks([pool], [pool.half()], slots[None])
