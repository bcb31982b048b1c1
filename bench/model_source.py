"""A real model in this process as the source of a core's results, by way of the messages that the services exchange."""

import numpy as np
import torch

from quire.model_directory import ModelDirectory
from quire.model_source import resolve_model
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.step import StepPlan, StepResult
from scheduler_svc.service.worker_messages import step_answer, step_message
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.models.registry import load_model, resolve_dtype
from worker_svc.protocol.convert import StepDecoder, result_message, step_of
from worker_svc.protocol.stream import Worker
from worker_svc.settings import WorkerSettings
from worker_svc.startup import make_worker
from worker_svc.step import AdmittedStep


def load_worker(settings: WorkerSettings) -> Worker:
    """A worker on the CPU, without a service around it."""
    if settings.num_threads is not None:
        torch.set_num_threads(settings.num_threads)
    directory = ModelDirectory.open(resolve_model(settings.model))
    device = torch.device("cpu")
    dtype = resolve_dtype(directory.config, settings.dtype, device)
    model = load_model(directory.path, device=device, dtype=dtype)
    return make_worker(model, settings, DeviceLoop())


class ModelSource:
    """Answers plans in the order in which they were made; every one of them must be given to it."""

    def __init__(self, worker: Worker) -> None:
        self._runner = worker.runner
        self._generation = worker.info.worker_generation
        self._vocab_size = worker.info.model.vocab_size
        self._decoder = StepDecoder(worker.info)

    def __call__(self, plan: StepPlan) -> StepResult:
        request = worker_pb2.RunRequest.FromString(step_message(plan, 1, self._generation))
        step = self._decoder.decode(step_of(request))
        output = self._runner.launch(AdmittedStep(step, np.zeros(0, np.int32))).wait()
        return step_answer(result_message(output).result, self._vocab_size).result
