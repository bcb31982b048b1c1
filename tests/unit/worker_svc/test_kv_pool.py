from typing import Any

import pytest
import torch

from quire.settings import ConfigurationError
from tests.support.steps import make_operations
from tests.support.tiny_causal_lm import TinyCausalLM
from worker_svc.cache_ops import apply_cache_operations
from worker_svc.kv_pool import KvPool, PoolRequest, allocate_pool, block_bytes, num_gpu_blocks, pool_geometry

# Two heads of 8, one layer, float32, keys and values, 4 tokens.
BLOCK_BYTES = 2 * 2 * 8 * 4 * 4


def make_request(**changes: Any) -> PoolRequest:
    return PoolRequest(
        **{
            "block_size": 4,
            "num_gpu_blocks": None,
            "kv_cache_memory": None,
            "swap_space": 0,
            "most_useful_blocks": 100,
            **changes,
        }
    )


def make_pool(num_blocks: int = 6, host_blocks: int = 3) -> KvPool:
    model = TinyCausalLM()
    request = make_request(num_gpu_blocks=num_blocks, swap_space=host_blocks * BLOCK_BYTES)
    pool = allocate_pool(pool_geometry(model, request, None), model.device, model.dtype)
    for block in range(num_blocks):
        pool.gpu[0][:, block] = block + 1
    return pool


def contents(tensor: torch.Tensor) -> list[float]:
    """The value that fills each block."""
    assert (tensor == tensor[:1, :, :1, :1, :1]).all()
    return tensor[0, :, 0, 0, 0].tolist()


def test_a_block_holds_keys_and_values_of_all_layers() -> None:
    assert block_bytes(TinyCausalLM(), 4) == BLOCK_BYTES
    assert block_bytes(TinyCausalLM(torch.bfloat16), 4) == BLOCK_BYTES // 2


def test_a_count_wins_over_all_sizes() -> None:
    assert num_gpu_blocks(make_request(num_gpu_blocks=7, kv_cache_memory=1), BLOCK_BYTES, 10**9) == 7


def test_the_given_memory_is_used_whole() -> None:
    assert num_gpu_blocks(make_request(kv_cache_memory=500 * BLOCK_BYTES + 1), BLOCK_BYTES, None) == 500


def test_the_default_on_a_cpu_is_never_more_than_can_be_used() -> None:
    assert num_gpu_blocks(make_request(), BLOCK_BYTES, None) == 100
    assert num_gpu_blocks(make_request(most_useful_blocks=10**9), BLOCK_BYTES, None) == 2**30 // BLOCK_BYTES


def test_an_accelerator_gives_what_profiling_left() -> None:
    assert num_gpu_blocks(make_request(), BLOCK_BYTES, 1234 * BLOCK_BYTES) == 1234


@pytest.mark.parametrize(
    ("changes", "available", "advice"),
    [
        ({"kv_cache_memory": BLOCK_BYTES - 1}, None, "--kv-cache-memory"),
        ({}, -5, "--gpu-memory-utilization"),
    ],
)
def test_a_pool_without_a_block_is_refused_with_the_way_out(
    changes: dict[str, Any], available: int | None, advice: str
) -> None:
    with pytest.raises(ConfigurationError, match=advice):
        num_gpu_blocks(make_request(**changes), BLOCK_BYTES, available)


def test_a_pool_beyond_all_memory_is_refused_in_one_line() -> None:
    geometry = pool_geometry(TinyCausalLM(), make_request(num_gpu_blocks=2**45), None)
    with pytest.raises(ConfigurationError, match="cannot allocate the KV pool") as raised:
        allocate_pool(geometry, torch.device("cpu"), torch.float32)
    assert "\n" not in str(raised.value)


def test_tensors_have_the_layout_of_the_contract() -> None:
    pool = make_pool(6, 3)
    assert pool.geometry.num_host_blocks == 3
    assert pool.gpu[0].shape == (2, 6, 2, 4, 8)
    assert pool.host[0].shape == (2, 3, 2, 4, 8)
    assert len(pool.gpu) == len(pool.host) == pool.geometry.num_layers


def test_moves_are_applied_out_in_copy() -> None:
    pool = make_pool()
    # Block 1 leaves and its place is taken at once; what came in is copied on.
    apply_cache_operations(make_operations(swap_out=[(4, 0), (1, 2)]), pool)
    assert contents(pool.host[0]) == [5.0, 0.0, 2.0]
    operations = make_operations(swap_out=[(0, 1)], swap_in=[(1, 3), (0, 0)], copy=[(3, 5), (0, 2)])
    apply_cache_operations(operations, pool)
    assert contents(pool.host[0]) == [5.0, 1.0, 2.0]
    assert contents(pool.gpu[0]) == [5.0, 2.0, 5.0, 1.0, 5.0, 1.0]
    assert sorted(operations.written_blocks.tolist()) == [0, 2, 3, 5]
