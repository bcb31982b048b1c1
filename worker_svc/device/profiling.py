"""The steps that a worker runs for itself before it serves: a worst case to measure memory, a small one to warm up."""

import numpy as np
import torch

from worker_svc.device.kv_pool import allocate_pool
from worker_svc.device.model_runner import ModelRunner
from worker_svc.info import ModelGeometry, PoolGeometry, WorkerLimits
from worker_svc.models.base import CausalLM
from worker_svc.protocol.steps import (
    AdmittedStep,
    AssignRow,
    Batch,
    CacheOperations,
    LogitRules,
    RowChanges,
    RowSampling,
    SealedBlocks,
    Step,
)

# One parameter of each kind, so that every path of the sampler has been taken.
_SAMPLING = RowSampling(
    temperature=1.0,
    top_k=0,
    top_p=0.9,
    min_p=0.01,
    seed=0,
    logprobs=1,
    num_candidates=None,
    prompt_logprobs=1,
    rules=LogitRules(presence_penalty=0.5, repetition_penalty=1.1, bad_sequences=(np.zeros(2, np.int32),)),
)


# On a GPU a longer context is cut into pieces in any case (`kernels.triton.kv_split`), which takes kernels of its own.
_CUT_LENGTH = 2049


def prefill_step(lengths: list[int], blocks_per_row: list[list[int]], num_computed: int = 0) -> AdmittedStep:
    """A step that puts sequences into the first rows, computes them from `num_computed` on and samples from each."""
    rows = np.arange(len(lengths), dtype=np.int32)
    pairs, none = np.zeros((0, 2), np.int32), np.zeros(0, np.int32)
    assigned = tuple(
        AssignRow(row, np.zeros(length, np.int32), np.array(blocks, np.int32), _SAMPLING, length)
        for row, (length, blocks) in enumerate(zip(lengths, blocks_per_row, strict=True))
    )
    step = Step(
        step_id=0,
        scheduler_epoch=0,
        cache_operations=CacheOperations(pairs, pairs, pairs),
        row_changes=RowChanges(none, assigned, pairs, (), (), np.zeros((0, 3), np.int32)),
        batch=Batch(
            rows,
            np.array(lengths, np.int32) - np.int32(num_computed),
            np.full_like(rows, num_computed),
            np.stack((rows, rows), axis=1),
        ),
        sealed=SealedBlocks(none, np.zeros((0, 32), np.uint8)),
    )
    return AdmittedStep(step, np.unique(np.concatenate([each.block_table for each in assigned])))


def warm_up(runner: ModelRunner, block_size: int, max_model_len: int, limits: WorkerLimits) -> None:
    """Runs sequences in block 0, so that the first request does not pay for what is set up, or compiled, lazily.

    One of several tokens where a step may have them, one of a single token and one token of a long context: attention
    has a kernel each for them.
    """
    several = min(2, block_size, max_model_len, limits.max_num_batched_tokens)
    for length in (several, 1):
        runner.launch(prefill_step([length], [[0]])).wait()
    length = min(_CUT_LENGTH, max_model_len)
    runner.launch(prefill_step([length], [[0] * -(-length // block_size)], length - 1)).wait()


def memory_for_pool(
    model: CausalLM, geometry: ModelGeometry, limits: WorkerLimits, block_size: int, utilization: float
) -> int:
    """Bytes of an accelerator that are left for the KV pool when a step of the greatest size runs.

    The step runs on a small pool of its own that all sequences share: only its memory matters, not what it computes.
    """
    device = model.device
    lengths = _worst_case(limits, geometry.max_model_len)
    num_blocks = -(-max(lengths) // block_size)
    pool = allocate_pool(_small_pool(model, block_size, num_blocks), device, model.dtype)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner = ModelRunner(model, pool, geometry, limits)
    blocks = list(range(num_blocks))
    runner.launch(prefill_step(lengths, [blocks[: -(-length // block_size)] for length in lengths])).wait()
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    del runner, pool
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - step_bytes


def _worst_case(limits: WorkerLimits, max_model_len: int) -> list[int]:
    """As many rows as a step may have, sharing its tokens as evenly as may be: the most logits, the most tokens."""
    num_rows = min(limits.max_num_rows, limits.max_num_batched_tokens)
    least, over = divmod(limits.max_num_batched_tokens, num_rows)
    return [min(least + (row < over), max_model_len) for row in range(num_rows)]


def _small_pool(model: CausalLM, block_size: int, num_blocks: int) -> PoolGeometry:
    return PoolGeometry(
        block_size=block_size,
        num_gpu_blocks=num_blocks,
        num_host_blocks=0,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=str(model.dtype).removeprefix("torch."),
        block_bytes=0,
    )
