"""The ceiling: the scheduler's core drives the worker's model runner in one process, without gRPC, threads or text."""

import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from quire.common.v1.common_pb2 import SamplingParameters
from quire.load import LoadRequest
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan, StepResult
from worker_svc import step as steps
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.settings import WorkerSettings
from worker_svc.startup import build_worker


class InProcessEngine:
    """Core and model runner, called in turn by the thread that creates them: it binds threads as a worker does."""

    def __init__(self, settings: WorkerSettings) -> None:
        worker = build_worker(settings, DeviceLoop())
        self._runner = worker.runner
        info = worker.info
        self.config = SchedulerConfig(
            num_blocks=info.pool.num_gpu_blocks,
            block_size=info.pool.block_size,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            max_model_len=info.model.max_model_len,
            full_groups=info.pool.groups.num_full,
            windowed_groups=info.pool.groups.num_windowed,
            window=info.pool.groups.window,
            state_blocks=info.pool.state_blocks,
        )

    def run(
        self,
        work: Sequence[LoadRequest],
        *,
        make_blocks: Callable[[SchedulerConfig], BlockManager] = BlockManager.of,
        look: Callable[[Scheduler, StepPlan], None] = lambda scheduler, plan: None,
    ) -> float:
        """Generates all outputs greedily; returns seconds. `look` gets each step after it was computed."""
        scheduler = Scheduler(self.config, make_blocks)
        started = time.perf_counter()
        for index, item in enumerate(work):
            key, prompt = RequestKey(ClientId(0), Handle(index)), item.token_ids.tolist()
            assert item.output_len is not None, "a benchmark says how long outputs are"
            scheduler.submit(Request(key, str(index), prompt, RowSampling(seed=index), item.output_len), started)
        results: deque[StepResult] = deque()
        while True:
            while len(results) < 2 and (plan := scheduler.schedule(time.perf_counter())) is not None:
                results.append(self._step(plan))
                look(scheduler, plan)
            if not results:
                return time.perf_counter() - started
            scheduler.apply(results.popleft(), time.perf_counter())

    def _step(self, plan: StepPlan) -> StepResult:
        output = self._runner.launch(steps.AdmittedStep(_step_of(plan), np.zeros(0, np.int32))).wait()
        return StepResult(plan.step_id, output.token_ids.astype(np.int64))


def _step_of(plan: StepPlan) -> steps.Step:
    pairs, none = np.zeros((0, 2), np.int32), np.zeros(0, np.int32)
    assign = tuple(
        steps.AssignRow(
            row=assigned.row,
            token_ids=np.array(assigned.token_ids, np.int32),
            block_table=np.array(assigned.block_table, np.int32),
            sampling=steps.RowSampling(SamplingParameters(top_p=1.0), assigned.sampling.seed),
            num_prompt_tokens=assigned.num_prompt_tokens,
        )
        for assigned in plan.assign
    )
    deltas = plan.block_table_deltas.astype(np.int32)
    return steps.Step(
        step_id=plan.step_id,
        scheduler_epoch=0,
        cache_operations=steps.CacheOperations(pairs, pairs, pairs),
        row_changes=steps.RowChanges(plan.release.astype(np.int32), assign, pairs, (), (), deltas),
        batch=steps.Batch(
            rows=plan.rows.astype(np.int32),
            num_new_tokens=plan.num_new_tokens.astype(np.int32),
            num_computed_tokens=plan.num_computed_tokens.astype(np.int32),
            samples=plan.samples.astype(np.int32),
        ),
        sealed=steps.SealedBlocks(none, np.zeros((0, 32), np.uint8)),
    )
