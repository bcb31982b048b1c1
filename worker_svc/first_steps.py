"""The first steps of a worker: they warm up the device, measure passes, and find the memory that a step takes."""

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from quire.common.v1.common_pb2 import SamplingParameters
from worker_svc.device.draft_choice import PayingDrafts
from worker_svc.device.kv_pool import KvPool, PoolRequest, allocate_pool, block_bytes, pool_geometry
from worker_svc.device.pass_times import PassCosts, PassTimes
from worker_svc.device.runner import ModelRunner
from worker_svc.models.base import CausalLM
from worker_svc.parallel.ranks import Ranks
from worker_svc.step import (
    AdmittedStep,
    AssignRow,
    Batch,
    CacheOperations,
    LogitRules,
    ModelGeometry,
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
_PLAIN_SAMPLING = RowSampling(SamplingParameters(temperature=1.0, top_p=1.0))
# On a GPU, attention always cuts a longer context into pieces (`quire_kernels.cuda.attention`), by kernels of its own.
_CUT_LENGTH = 2049
_MEASURED_S, _MEASURED_LARGE_S, _MAX_MEASURED = 0.1, 0.02, 40
"""Seconds of measuring passes again, up to `_ROWS_MEASURED` rows and above that, and the maximum repetitions."""
_ROWS_MEASURED, _MAX_ROWS_MEASURED, _LONG_PASS_US = 8, 64, 25_000
"""Passes are measured with 1, 2, 4 and so on up to `_ROWS_MEASURED` rows. The row count then doubles further, up to
`_MAX_ROWS_MEASURED`, while the last pass took at most `_LONG_PASS_US`. A large pass is measured about once: the start
waits for these measurements, and later passes correct small errors."""
_CONTEXT_MEASURED = 512
"""Tokens of context in the passes that measure the cost of context."""
_MIN_FIXED_TOKENS, _MAX_FIXED_TOKENS = 2, 1024
"""Bounds of the measured `WorkerLimits.fixed_tokens`."""
_NO_PAIRS = np.zeros((0, 2), np.int32)
_NO_MOVES = CacheOperations(_NO_PAIRS, _NO_PAIRS, _NO_PAIRS)
_logger = logging.getLogger(__name__)


def _prefill_step(
    lengths: list[int],
    num_new: list[int],
    pool: KvPool,
    block: int = 0,
    moves: CacheOperations = _NO_MOVES,
    sampling: RowSampling = _SAMPLING,
) -> AdmittedStep:
    """A step that assigns sequences to the first rows, computes the last `num_new` tokens of each and samples from it.

    All their blocks are the same one: the results do not matter. A single new token counts as output, as in a decode.
    """
    rows, none = np.arange(len(lengths), dtype=np.int32), np.zeros(0, np.int32)
    states = pool.padding_states(len(lengths))
    assigned = tuple(
        AssignRow(
            row,
            np.zeros(length, np.int32),
            np.full(pool.geometry.table_len(length), block, np.int32),
            sampling,
            max(length - (new == 1), 1),
            state_blocks=np.array(states[row], np.int32),
        )
        for row, (length, new) in enumerate(zip(lengths, num_new, strict=True))
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
    return AdmittedStep(step, np.full(1, block, np.int32))


def _free_block(pool: KvPool) -> int:
    """A block that the first steps may write to: the padding block, since others may be sealed already; without one,
    block 0."""
    return pool.padding_block or 0


def warm_up(runner: ModelRunner, pool: KvPool, max_model_len: int, limits: WorkerLimits) -> None:
    """Runs sequences in one block, so that the first request does not wait for lazy initialisation or compilation.

    The steps compute several tokens if a step may have them, a single token, and one token of a long context:
    attention has a kernel for each. Before the last one, the block is moved in every way that this pool has.
    """
    block, shape = _free_block(pool), pool.geometry
    several = min(2, shape.block_size, max_model_len, limits.max_num_batched_tokens)
    for length in (several, 1):
        runner.launch(_prefill_step([length], [length], pool, block)).wait()
    length = min(_CUT_LENGTH, max_model_len)
    runner.launch(_prefill_step([length], [1], pool, block, _every_move(pool))).wait()


def predict_passes(
    runner: ModelRunner,
    model: CausalLM,
    pool: KvPool,
    geometry: ModelGeometry,
    limits: WorkerLimits,
    *,
    chooses_drafts: bool,
) -> WorkerLimits:
    """Measures passes, from which the runner predicts the time of later ones and chooses drafts; returns the limits
    with the measured `fixed_tokens`, if drafts are chosen."""
    costs = _measure_passes(runner, limits, geometry, pool, model.ranks)
    runner.predict_passes(times := PassTimes(costs))
    if not chooses_drafts:
        return limits
    costs, times = (PassCosts(), PassTimes(PassCosts())) if costs is None else (costs, times)
    # Time to read context is in proportion to its bytes. `share` is the draft model's bytes per byte of the model's.
    share = pool.geometry.block_bytes / block_bytes(model, pool.geometry.block_size, pool.gpu[0].dtype) - 1
    model_costs = runner.measure_draft_model(share * costs.context_s)
    runner.choose_drafts(PayingDrafts(limits.max_num_rows, times, model_costs))
    return replace(limits, fixed_tokens=_fixed_tokens(costs))


def _measure_passes(
    runner: ModelRunner, limits: WorkerLimits, geometry: ModelGeometry, pool: KvPool, ranks: Ranks
) -> PassCosts | None:
    """Measures passes of decodes. Each runs several times, and its shortest time counts, since other processes may slow
    the others. All ranks get the same result. None if a step has at most one row."""
    block = _free_block(pool)

    def decodes(*lengths: int) -> AdmittedStep:
        """A step in which each row computes the last token of its length."""
        return _prefill_step(list(lengths), [1] * len(lengths), pool, block, sampling=_PLAIN_SAMPLING)

    max_rows = min(limits.max_num_rows, limits.max_num_batched_tokens, _MAX_ROWS_MEASURED)
    counts = [2**power for power in range(min(max_rows, _ROWS_MEASURED).bit_length())]
    if len(counts) == 1:
        return None
    few, length = counts[min(2, len(counts) - 1)], min(_CONTEXT_MEASURED, geometry.max_model_len)
    # The last step is like one sequence with drafts: each of its rows is one token longer than the row before.
    drafted = [max(length - behind, 1) for behind in reversed(range(few))]
    steps = [*(decodes(*[1] * count) for count in counts), decodes(*[length] * few), decodes(*drafted)]
    *micros, long, long_drafted = _least_micros(runner, steps, ranks, measured_s=_MEASURED_S, min_more=1)
    while 2 * counts[-1] <= max_rows and micros[-1] <= _LONG_PASS_US:
        counts.append(2 * counts[-1])
        micros += _least_micros(runner, [decodes(*[1] * counts[-1])], ranks, measured_s=_MEASURED_LARGE_S, min_more=0)
    without = micros[counts.index(few)]
    context_us = max(long - without, 0) / (few * max(length - 1, 1))
    draft_context_us = max(long_drafted - without - context_us * length, 0) / ((few - 1) * length)
    costs = PassCosts.from_measurements([each / 1e6 for each in micros], context_us / 1e6, draft_context_us / 1e6)
    _logger.info(
        "decodes of %s rows take %s ms, and %.2f us more for each token of context, of a draft %.2f",
        ", ".join(map(str, counts)),
        ", ".join(f"{1e3 * each:.2f}" for each in costs.seconds),
        context_us,
        draft_context_us,
    )
    return costs


def _least_micros(
    runner: ModelRunner, steps: Sequence[AdmittedStep], ranks: Ranks, *, measured_s: float, min_more: int
) -> tuple[int, ...]:
    """The shortest time of each of these steps, in microseconds. All run in turn: once, and then for `measured_s`, at
    least `min_more` times. The time is that of the model and the draws, without the assignment of rows, which decodes
    do not have."""
    seconds = [math.inf] * len(steps)

    def measure() -> None:
        for index, step in enumerate(steps):
            timings = runner.launch(step).wait().timings
            seconds[index] = min(seconds[index], (timings.model_us + timings.sample_us) / 1e6)

    measure()
    # All ranks take part in each step, so all run the same number of steps.
    (num_more,) = ranks.smallest(int(min(max(measured_s / max(sum(seconds), 1e-6), min_more), _MAX_MEASURED)))
    for _ in range(num_more):
        measure()
    return ranks.smallest(*(max(int(1e6 * each), 1) for each in seconds))


def _fixed_tokens(costs: PassCosts) -> int:
    """`WorkerLimits.fixed_tokens`."""
    last = min(_ROWS_MEASURED.bit_length() - 1, len(costs.num_rows) - 1)
    of_token = (costs.seconds[last] - costs.seconds[0]) / (costs.num_rows[last] - 1)
    return min(max(int(costs.seconds[0] / of_token - 1), _MIN_FIXED_TOKENS), _MAX_FIXED_TOKENS)


def _every_move(pool: KvPool) -> CacheOperations:
    """Copies a block to the host and back if there are host blocks, and another block onto it if the pool has two."""
    block, geometry = _free_block(pool), pool.geometry
    out = np.array([(block, 0)], np.int32)[: geometry.num_host_blocks]
    copy = np.array([(1 if block == 0 else 0, block)], np.int32)[: pool.gpu[0].shape[1] - 1]
    return CacheOperations(out, out[:, ::-1], copy)


def memory_for_pool(
    model: CausalLM, geometry: ModelGeometry, limits: WorkerLimits, block_size: int, utilization: float
) -> int:
    """Bytes of an accelerator that are left for the KV pool while a step of maximal size runs.

    The step runs on a pool of one block that all sequences share: only its memory matters.
    """
    device = model.device
    longest = min(geometry.max_model_len, model.max_model_len)
    num_new = _worst_case(limits, longest)
    # Attention cuts the longest context into pieces, and allocates results of that number of pieces for every row.
    lengths = [longest, *num_new[1:]]
    request = PoolRequest(block_size, num_gpu_blocks=1, kv_cache_memory=None, swap_space=0, max_useful_blocks=1)
    pool = allocate_pool(pool_geometry(model, request, None), device, model.dtype, layers=model.cache_layers)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    runner = ModelRunner(model, pool, geometry, limits)
    runner.launch(_prefill_step(lengths, num_new, pool)).wait()
    step_bytes = torch.cuda.max_memory_allocated(device) - before
    del runner, pool
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return int(total * utilization) - (total - free) - step_bytes


def _worst_case(limits: WorkerLimits, max_model_len: int) -> list[int]:
    """The number of new tokens of each row of a maximal step: the maximum number of rows shares the budget evenly. So
    both the logits and the tokens of the step are at their maximum."""
    num_rows = min(limits.max_num_rows, limits.max_num_batched_tokens)
    least, over = divmod(limits.max_num_batched_tokens, num_rows)
    return [min(least + (row < over), max_model_len) for row in range(num_rows)]
