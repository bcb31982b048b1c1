"""The steps that a worker runs before it serves: a worst case to measure memory, small ones to warm up."""

import numpy as np
import torch

from quire.common.v1.common_pb2 import SamplingParameters
from worker_svc.device.kv_pool import allocate_pool
from worker_svc.device.runner import ModelRunner
from worker_svc.models.base import CausalLM
from worker_svc.step import (
    AdmittedStep,
    AssignRow,
    Batch,
    CacheOperations,
    LogitRules,
    ModelGeometry,
    PoolGeometry,
    RowChanges,
    RowSampling,
    SealedBlocks,
    Step,
    WorkerLimits,
)

# One parameter of each kind, so that every path of the sampler has been taken.
_SAMPLING = RowSampling(
    SamplingParameters(temperature=1.0, top_p=0.9, min_p=0.01),
    logprobs=1,
    prompt_logprobs=1,
    rules=LogitRules(presence_penalty=0.5, repetition_penalty=1.1, bad_sequences=(np.zeros(2, np.int32),)),
)


# On a GPU a longer context is cut into pieces in any case (`kernels.cuda.attention`), which takes kernels of its own.
_CUT_LENGTH = 2049
_NO_PAIRS = np.zeros((0, 2), np.int32)
_NO_MOVES = CacheOperations(_NO_PAIRS, _NO_PAIRS, _NO_PAIRS)


def _prefill_step(
    lengths: list[int], num_new: list[int], block_size: int, moves: CacheOperations = _NO_MOVES
) -> AdmittedStep:
    """A step that assigns sequences to the first rows, computes the last new tokens of each and samples from each.

    All their blocks are block 0: the results do not matter.
    """
    rows, none = np.arange(len(lengths), dtype=np.int32), np.zeros(0, np.int32)
    assigned = tuple(
        AssignRow(row, np.zeros(length, np.int32), np.zeros(-(-length // block_size), np.int32), _SAMPLING, length)
        for row, length in enumerate(lengths)
    )
    new_tokens = np.array(num_new, np.int32)
    step = Step(
        step_id=0,
        scheduler_epoch=0,
        cache_operations=moves,
        row_changes=RowChanges(none, assigned, _NO_PAIRS, (), (), np.zeros((0, 3), np.int32)),
        batch=Batch(rows, new_tokens, np.array(lengths, np.int32) - new_tokens, np.stack((rows, rows), axis=1)),
        sealed=SealedBlocks(none, np.zeros((0, 32), np.uint8)),
    )
    return AdmittedStep(step, np.zeros(1, np.int32))


def warm_up(runner: ModelRunner, pool: PoolGeometry, max_model_len: int, limits: WorkerLimits) -> None:
    """Runs sequences in block 0, so that the first request does not wait for lazy initialisation or compilation.

    The steps compute several tokens where a step may have them, a single token, and one token of a long context:
    attention has a kernel for each. Before the last one, block 0 is moved in every way that this pool has.
    """
    several = min(2, pool.block_size, max_model_len, limits.max_num_batched_tokens)
    for length in (several, 1):
        runner.launch(_prefill_step([length], [length], pool.block_size)).wait()
    length = min(_CUT_LENGTH, max_model_len)
    runner.launch(_prefill_step([length], [1], pool.block_size, _every_move(pool))).wait()


def _every_move(pool: PoolGeometry) -> CacheOperations:
    """Block 0 to the host and back where there are blocks, and onto block 1 where there is one."""
    swap = np.array([(0, 0)], np.int32)[: pool.num_host_blocks]
    copy = np.array([(0, 1)], np.int32)[: pool.num_gpu_blocks - 1]
    return CacheOperations(swap, swap, copy)


def memory_for_pool(
    model: CausalLM, geometry: ModelGeometry, limits: WorkerLimits, block_size: int, utilization: float
) -> int:
    """Bytes of an accelerator that are left for the KV pool while a step of maximal size runs.

    The step runs on a pool of one block that all sequences share: only its memory matters.
    """
    device = model.device
    num_new = _worst_case(limits, geometry.max_model_len)
    # For the longest context attention keeps the result of each piece, and allocates as much for every other row.
    lengths = [geometry.max_model_len, *num_new[1:]]
    pool = allocate_pool(_pool_of_one_block(model, block_size), device, model.dtype)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner = ModelRunner(model, pool, geometry, limits)
    runner.launch(_prefill_step(lengths, num_new, block_size)).wait()
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    del runner, pool
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - step_bytes


def _worst_case(limits: WorkerLimits, max_model_len: int) -> list[int]:
    """The new tokens of as many rows as a step may have, divided evenly: a maximum of logits and of tokens."""
    num_rows = min(limits.max_num_rows, limits.max_num_batched_tokens)
    least, over = divmod(limits.max_num_batched_tokens, num_rows)
    return [min(least + (row < over), max_model_len) for row in range(num_rows)]


def _pool_of_one_block(model: CausalLM, block_size: int) -> PoolGeometry:
    return PoolGeometry(
        block_size=block_size,
        num_gpu_blocks=1,
        num_host_blocks=0,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=str(model.dtype).removeprefix("torch."),
        block_bytes=0,
    )
