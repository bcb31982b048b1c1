import os
from pathlib import Path
from typing import Any

import pytest
import torch

from quire.runtime.settings import ConfigurationError
from tests.support.processes import wait_true
from tests.support.steps import int32, make_assign, make_changes, make_operations, make_step
from tests.support.tiny_causal_lm import TinyCausalLM
from worker_svc.device import kv_pool
from worker_svc.device.block_moves import BlockMoves
from worker_svc.device.kv_pool import KvPool, PoolRequest, allocate_pool, num_gpu_blocks, num_host_blocks, pool_geometry
from worker_svc.device.pool_blocks import PoolBlocks
from worker_svc.device.rows import Rows
from worker_svc.device.seals import SealInventory
from worker_svc.models.base import CacheLayer
from worker_svc.step import AdmittedStep, CacheOperations
from worker_svc.streams import Stream

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)

# A block has two heads of 8, one layer, float32, keys and values, 4 tokens.
BLOCK_BYTES = 2 * 2 * 8 * 4 * 4


def make_request(**changes: Any) -> PoolRequest:
    sizes: dict[str, Any] = {
        "block_size": 4,
        "num_gpu_blocks": None,
        "kv_cache_memory": None,
        "swap_space": 0,
        "max_useful_blocks": 100,
    }
    return PoolRequest(**sizes | changes)


def make_pool(num_blocks: int = 6, host_blocks: int = 3) -> KvPool:
    model = TinyCausalLM()
    request = make_request(num_gpu_blocks=num_blocks, swap_space=host_blocks * BLOCK_BYTES)
    pool = allocate_pool(pool_geometry(model, request, None), model.device, model.dtype)
    for block in range(num_blocks):
        pool.gpu[0][:, block] = block + 1
    pool.host[0].zero_()
    return pool


def apply_moves(operations: CacheOperations, pool: KvPool) -> None:
    BlockMoves(pool, Stream(), Stream()).run(AdmittedStep(make_step(operations=operations), int32(())))


def resident_bytes() -> int:
    """Memory of this process that the system has really allocated."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def contents(tensor: torch.Tensor) -> list[float]:
    """The value that fills each block."""
    assert (tensor == tensor[:1, :, :1, :1, :1]).all()
    return tensor[0, :, 0, 0, 0].tolist()


@pytest.mark.parametrize(
    ("changes", "available", "count"),
    [
        # A count wins over all sizes, a given size is used whole, an accelerator uses what profiling left, and the
        # default on a CPU never exceeds what can be used.
        ({"num_gpu_blocks": 7, "kv_cache_memory": 1}, 10**9, 7),
        ({"kv_cache_memory": 500 * BLOCK_BYTES + 1}, None, 500),
        ({"kv_cache_memory": 10 * BLOCK_BYTES, "num_padding_blocks": 1}, None, 9),
        ({}, 1234 * BLOCK_BYTES, 1234),
        ({}, None, 100),
        ({"max_useful_blocks": 10**9}, None, 2**30 // BLOCK_BYTES),
    ],
)
def test_the_pool_has_as_many_blocks_as_its_memory_holds(
    changes: dict[str, Any], available: int | None, count: int
) -> None:
    assert num_gpu_blocks(make_request(**changes), BLOCK_BYTES, available) == count


@pytest.mark.parametrize(
    ("swap_space", "block", "device", "gpu_blocks", "count"),
    [
        # By default as large as the pool of a CPU up to a gibibyte; with CUDA four gibibytes.
        (None, BLOCK_BYTES, CPU, 100, 100),
        (None, 1 << 20, CPU, 5000, 1024),
        (None, 1 << 20, CUDA, 5, 4096),
        (0, BLOCK_BYTES, CPU, 5, 0),
        (BLOCK_BYTES, BLOCK_BYTES, CPU, 5, 1),
        (10 * BLOCK_BYTES - 1, BLOCK_BYTES, CPU, 5, 9),
        (10 * BLOCK_BYTES - 1, BLOCK_BYTES, CUDA, 5, 9),
    ],
)
def test_the_host_pool_has_as_many_blocks_as_its_memory_holds(
    swap_space: int | None, block: int, device: torch.device, gpu_blocks: int, count: int
) -> None:
    assert num_host_blocks(swap_space, block, device, gpu_blocks) == count


@pytest.mark.parametrize(
    ("changes", "available", "message"),
    [
        ({"kv_cache_memory": BLOCK_BYTES - 1}, None, "raise --kv-cache-memory"),
        ({"kv_cache_memory": BLOCK_BYTES, "num_padding_blocks": 1}, None, "raise --kv-cache-memory"),
        ({}, -5, "raise --gpu-memory-utilization"),
        ({"swap_space": BLOCK_BYTES - 1}, None, "--swap-space is .* B and one block .* raise it, or use 0"),
        ({"kv_cache_memory": 64 << 30}, None, "--kv-cache-memory is 64.0 GiB; 1.0 GiB of memory"),
        ({"num_gpu_blocks": 1 << 22}, None, f"--num-gpu-blocks is {1 << 22}, which take .* GiB; .* at most"),
        (
            {"num_gpu_blocks": 1 << 21, "swap_space": 1 << 30},
            None,
            r"--swap-space is 1.0 GiB; 0 B .* in addition to the KV pool; set it to at most that",
        ),
    ],
)
def test_a_pool_that_cannot_be_is_refused_with_the_way_out_before_any_of_it_is_taken(
    changes: dict[str, Any], available: int | None, message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        pool_geometry(TinyCausalLM(), make_request(host_memory=1 << 30, **changes), available)


def test_a_pool_beyond_all_memory_is_refused_in_one_line() -> None:
    geometry = pool_geometry(TinyCausalLM(), make_request(num_gpu_blocks=2**45), None)
    with pytest.raises(ConfigurationError, match="cannot allocate the KV pool") as raised:
        allocate_pool(geometry, torch.device("cpu"), torch.float32)
    assert "\n" not in str(raised.value)


def test_what_was_not_asked_for_leaves_half_of_the_memory() -> None:
    request = make_request(host_memory=1 << 20, swap_space=None, max_useful_blocks=10**9)
    geometry = pool_geometry(TinyCausalLM(), request, None)
    assert geometry.num_gpu_blocks * BLOCK_BYTES == 1 << 19
    assert geometry.num_host_blocks * BLOCK_BYTES == 1 << 18


def make_large_pool() -> KvPool:
    """A pool of 256 MiB whose memory was not touched."""
    geometry = pool_geometry(TinyCausalLM(), make_request(num_gpu_blocks=(256 << 20) // BLOCK_BYTES), None)
    return allocate_pool(geometry, CPU, torch.float32)


def test_population_stops_where_memory_runs_short(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kv_pool, "available_memory", lambda: 1 << 28)
    pool = make_large_pool()
    before = resident_bytes()
    pool.populate(1)
    wait_true(lambda: "memory runs short" in caplog.text)
    assert resident_bytes() - before < 32 << 20


def test_pools_and_rows_take_memory_only_as_they_are_used() -> None:
    count = (256 << 20) // BLOCK_BYTES
    geometry = pool_geometry(TinyCausalLM(), make_request(num_gpu_blocks=count, swap_space=256 << 20), None)
    before = resident_bytes()
    pool, rows = allocate_pool(geometry, CPU, torch.float32), Rows(64, 1 << 20, 1 << 16, CPU)
    assert not pool.gpu[0][:, -1].any()
    apply_moves(make_operations(swap_out=[(0, 0), (1, count - 1)]), pool)
    # All rows together have 272 MiB.
    rows.apply_row_changes(make_changes(assign=[make_assign(0, [1, 2, 3], [5])]))
    assert resident_bytes() - before < 64 << 20


def test_a_pool_that_is_given_back_takes_no_memory_until_it_is_written_again() -> None:
    pool = make_large_pool()
    pool.gpu[0].fill_(1)
    before = resident_bytes()
    pool.release()
    assert before - resident_bytes() > 64 << 20
    assert not pool.gpu[0][:, 7].any()
    pool.gpu[0][:, 7] = 2
    assert contents(pool.gpu[0][:, 6:9]) == [0, 2, 0]


def test_moves_are_applied_out_in_copy() -> None:
    pool = make_pool()
    # Block 1 is swapped out and its place is used at once; the block that was swapped in is copied.
    apply_moves(make_operations(swap_out=[(4, 0), (1, 2)]), pool)
    assert contents(pool.host[0]) == [5.0, 0.0, 2.0]
    operations = make_operations(swap_out=[(0, 1)], swap_in=[(1, 3), (0, 0)], copy=[(3, 5), (0, 2)])
    apply_moves(operations, pool)
    assert contents(pool.host[0]) == [5.0, 1.0, 2.0]
    assert contents(pool.gpu[0]) == [5.0, 2.0, 5.0, 1.0, 5.0, 1.0]
    assert sorted(operations.written_blocks.tolist()) == [0, 2, 3, 5]


def test_each_layer_has_its_own_heads() -> None:
    model = TinyCausalLM()
    model.cache_layers = (CacheLayer(2, 8), CacheLayer(1, 16, window=3), CacheLayer(1, 4))
    request = make_request(num_gpu_blocks=4, swap_space=1 << 20)
    geometry = pool_geometry(model, request, None)
    assert (geometry.num_layers, geometry.num_kv_heads, geometry.head_dim) == (3, 2, 16)
    assert geometry.block_bytes == BLOCK_BYTES * 9 // 4
    pool = allocate_pool(geometry, model.device, model.dtype, layers=model.cache_layers)
    assert [tuple(layer.shape[2:]) for layer in pool.gpu] == [(2, 4, 8), (1, 4, 16), (1, 4, 4)]
    assert [layer.shape[2:] for layer in pool.host] == [layer.shape[2:] for layer in pool.gpu]


def test_blocks_have_the_layers_of_a_draft_model_wherever_they_go() -> None:
    model, draft_model = TinyCausalLM(), TinyCausalLM()
    draft_model.cache_layers = (CacheLayer(1, 4),) * 2
    request = make_request(num_gpu_blocks=4, swap_space=2 * 2 * BLOCK_BYTES)
    geometry = pool_geometry(model, request, None, draft_model)
    # Two layers with a quarter of the numbers.
    assert geometry.block_bytes == BLOCK_BYTES * 3 // 2
    pool = allocate_pool(geometry, model.device, model.dtype, draft_model=draft_model)
    assert [tuple(layer.shape) for layer in pool.gpu] == [(2, 4, 2, 4, 8), *[(2, 4, 1, 4, 4)] * 2]
    assert pool.of_draft_model().gpu == pool.gpu[1:]
    for index, layer in enumerate(pool.gpu):
        for block in range(4):
            layer[:, block] = 10 * index + block
    apply_moves(make_operations(swap_out=[(1, 0)], swap_in=[(0, 2)], copy=[(3, 0)]), pool)
    assert [contents(layer) for layer in pool.gpu] == [
        [10 * index + each for each in (3, 1, 1, 3)] for index in range(3)
    ]

    blocks = PoolBlocks(pool, SealInventory(4))
    assert blocks.block_bytes == geometry.block_bytes
    blocks.write(int32([0, 3]), blocks.read(int32([1, 0])))
    assert [contents(layer) for layer in pool.gpu] == [
        [10 * index + each for each in (1, 1, 1, 3)] for index in range(3)
    ]
