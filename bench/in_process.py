"""The scheduler's core drives the worker's model runner in one process, by the messages of the services, without gRPC,
threads or text."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from quire.common.v1.common_pb2 import RowSampling as RowSamplingMessage
from quire.common.v1.common_pb2 import SamplingParameters
from quire.load import LoadRequest
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.kv_cache import BlockManager
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step import StepPlan, StepResult
from scheduler_svc.service.replica import core_config
from scheduler_svc.service.worker_messages import replica_info, step_answer, step_message
from scheduler_svc.settings import SchedulerSettings
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.row_ledger import RowLedger
from worker_svc.protocol.step_messages import StepDecoder, info_message, result_message
from worker_svc.settings import WorkerSettings
from worker_svc.startup import build_worker

_GREEDY = RowSamplingMessage(sampling=SamplingParameters(temperature=0.0, top_p=1.0)).SerializeToString()


class InProcessEngine:
    """Core and model runner, called in turn by the thread that creates them: it binds threads as a worker does."""

    def __init__(self, settings: WorkerSettings) -> None:
        worker = build_worker(settings, DeviceLoop())
        self._runner, info = worker.runner, worker.info
        self._decoder, self._ledger = StepDecoder(info), RowLedger(info.pool, info.model, info.limits)
        self._vocab_size = info.model.vocab_size
        self.config = core_config(SchedulerSettings(), replica_info(info_message(info)))

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
        for plan in self.steps(scheduler, work):
            look(scheduler, plan)
        return time.perf_counter() - started

    def steps(self, scheduler: Scheduler, work: Sequence[LoadRequest]) -> Iterator[StepPlan]:
        """Generates all outputs greedily, each for a tenant of its own, step by step: plans a step, computes it, and
        applies the result of the one before. Yields each step then."""
        self._ledger.reset()
        for index, item in enumerate(work):
            key, prompt = RequestKey(ClientId(0), Handle(index)), item.token_ids.tolist()
            assert item.output_len is not None, "a benchmark says how long outputs are"
            request = Request(key, str(index), prompt, RowSampling(index, _GREEDY), item.output_len, tenant=str(index))
            scheduler.submit(request, time.perf_counter())
        results: deque[StepResult] = deque()
        while True:
            while len(results) < 2 and (plan := scheduler.schedule(time.perf_counter())) is not None:
                results.append(self._step(plan))
                if len(results) == 2:
                    scheduler.apply(results.popleft(), time.perf_counter())
                yield plan
            if not results:
                return
            scheduler.apply(results.popleft(), time.perf_counter())

    def _step(self, plan: StepPlan) -> StepResult:
        step = self._decoder.decode(worker_pb2.RunRequest.FromString(step_message(plan, 0, 0)).step)
        output = self._runner.launch(self._ledger.admit(step)).wait()
        self._ledger.record_output(output)
        return step_answer(result_message(output).result, self._vocab_size).result
