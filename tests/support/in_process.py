"""One replica in this process: the scheduler's core drives the worker's real parts by the messages of the services.

No threads and no sockets, and the core's state is there to look at.
"""

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from quire.worker.v1 import worker_pb2
from scheduler_svc.core import invariants
from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import Request
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.sequence import FinishReason
from scheduler_svc.core.step import ClientEvents, StepPlan, StepResult, Usage
from scheduler_svc.service.worker_messages import step_answer, step_message
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.models.registry import load_model
from worker_svc.protocol.convert import result_message, step_of
from worker_svc.protocol.stream import Worker
from worker_svc.settings import WorkerSettings
from worker_svc.startup import make_worker


@dataclass(slots=True)
class Output:
    """What one sequence of a request was given; `reason` is None until it ended."""

    token_ids: list[int] = field(default_factory=list)
    reason: FinishReason | None = None
    cumulative_logprob: float | None = None


def load_worker(directory: Path, settings: WorkerSettings) -> Worker:
    """The worker of the model in `directory`, in float32 on the CPU, with nobody attached."""
    model = load_model(directory, device=torch.device("cpu"), dtype=torch.float32)
    return make_worker(model, settings, DeviceLoop())


def config_of(worker: Worker, **changes: Any) -> SchedulerConfig:
    """The bounds that the scheduler service would take from this worker, with these changes."""
    info = worker.info
    values: dict[str, Any] = {
        "num_blocks": info.pool.num_gpu_blocks,
        "block_size": info.pool.block_size,
        "max_num_seqs": info.limits.max_num_rows,
        "max_num_batched_tokens": info.limits.max_num_batched_tokens,
        "max_model_len": info.model.max_model_len,
        "num_host_blocks": info.pool.num_host_blocks,
    }
    return SchedulerConfig(**(values | changes))


class InProcessReplica:
    """A scheduler and a worker with up to two steps in flight between them; its clock counts results.

    A worker takes one scheduler after the other, of rising epochs.
    """

    def __init__(self, worker: Worker, config: SchedulerConfig, epoch: int = 1) -> None:
        self.scheduler = Scheduler(config)
        self.outputs: dict[int, list[Output]] = {}
        """By handle, one entry for each sequence to be returned."""
        self.usage: dict[int, Usage] = {}
        """Of the requests that are completed."""
        self._worker = worker
        self._session = worker.attach(epoch, lambda _: None)
        self._results: deque[StepResult] = deque()
        self._clock = 0.0

    def submit(self, request: Request) -> None:
        self.outputs[request.key.handle] = [Output() for _ in range(request.num_returned)]
        self.scheduler.submit(request, self._clock)
        self.check()

    def run_until_idle(self, max_steps: int = 5_000) -> None:
        """Runs until nothing is left to do; the invariants are checked after each operation."""
        for _ in range(max_steps):
            while len(self._results) < 2:
                plan = self.scheduler.schedule(self._clock)
                self.check()
                if plan is None:
                    break
                self._results.append(self._compute(plan))
            if not self._results:
                return
            self._deliver()
        raise AssertionError(f"still busy after {max_steps} steps")

    def check(self) -> None:
        invariants.check(self.scheduler)

    def _compute(self, plan: StepPlan) -> StepResult:
        info = self._worker.info
        request = worker_pb2.RunRequest.FromString(step_message(plan, self._session.epoch, info.worker_generation))
        step = self._worker.decoder.decode(step_of(request))
        output = self._worker.runner.launch(self._worker.admit(step)).wait()
        return step_answer(result_message(output).result, info.model.vocab_size).result

    def _deliver(self) -> None:
        self._clock += 1.0
        for events in self.scheduler.apply(self._results.popleft(), self._clock).values():
            self._record(events)
        self.check()

    def _record(self, events: ClientEvents) -> None:
        assert not events.failed
        columns = zip(events.handles, events.sequence_indices, events.offsets, events.token_ids, strict=True)
        for handle, index, offset, token_id in columns:
            output = self.outputs[handle][index]
            assert offset == len(output.token_ids), "an event was lost or repeated"
            output.token_ids.append(token_id)
        for end in events.finished:
            output = self.outputs[end.handle][end.sequence_index]
            assert output.reason is None, "a sequence ended twice"
            assert end.num_tokens == len(output.token_ids)
            output.reason, output.cumulative_logprob = end.reason, end.cumulative_logprob
        self.usage.update((end.handle, end.usage) for end in events.completed)
