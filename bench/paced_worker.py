"""A worker whose model takes a fixed time: everything else of it is as in service.

Called as `python -m bench.paced_worker MILLISECONDS FLAGS`, with the flags of `quire worker`.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import time
from dataclasses import dataclass

import numpy as np

from quire.model_directory import resolve_model
from quire.rpc.server import RpcServer
from quire.settings import load_settings
from quire.worker.v1.worker_pb2_grpc import add_WorkerServiceServicer_to_server
from worker_svc.device_loop import DeviceLoop
from worker_svc.info import ModelGeometry, PoolGeometry, WorkerInfo, WorkerLimits
from worker_svc.metrics import WorkerMetrics
from worker_svc.sealed_blocks import SealInventory
from worker_svc.servicer import SERVICE_NAME, WorkerServicer
from worker_svc.settings import WorkerSettings
from worker_svc.steps import AdmittedStep, SealedBlocks, StepOutput, StepTimings
from worker_svc.worker import Worker

_MAX_MODEL_LEN = 32768
_TOKEN_ID = 65
_PR_SET_TIMERSLACK = 29


@dataclass(frozen=True, slots=True)
class PacedStep:
    """A step that is over."""

    output: StepOutput

    def wait(self) -> StepOutput:
        return self.output


def _wake_on_time() -> None:
    """Lets sleeps of this process end when they should: Linux adds up to 50 us, which no device does."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class PacedRunner:
    """Every row samples the same token; a step takes `step_seconds`, asleep, as a host waits for its device."""

    is_asynchronous = False

    def __init__(self, num_blocks: int, step_seconds: float) -> None:
        self._seals = SealInventory(num_blocks)
        self._num_steps = 0
        self._step_seconds = step_seconds
        _wake_on_time()

    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> PacedStep:
        started = time.perf_counter()
        self._num_steps += 1
        step = admitted.step
        self._seals.begin_write(admitted.written_blocks, self._num_steps)
        rows = step.batch.samples[:, 0]
        time.sleep(max(started + self._step_seconds - time.perf_counter(), 0))
        self._seals.add(step.sealed, self._num_steps)
        model_us = int((time.perf_counter() - started) * 1e6)
        return PacedStep(
            StepOutput(
                step_id=step.step_id,
                rows=rows,
                token_ids=np.full(len(rows), _TOKEN_ID, np.int32),
                logprobs=(),
                candidates=(),
                failed_rows=(),
                timings=StepTimings(queue_us, 0, model_us, 0),
            )
        )

    def sealed_blocks(self) -> SealedBlocks:
        return self._seals.snapshot()


def _info(settings: WorkerSettings) -> WorkerInfo:
    config = json.loads((resolve_model(settings.model) / "config.json").read_text())
    num_blocks = settings.num_gpu_blocks or 65536
    pool = PoolGeometry(settings.block_size, num_blocks, 0, 1, 1, 1, "float32", 8 * settings.block_size)
    model = ModelGeometry(config["architectures"][0], "float32", config["vocab_size"], _MAX_MODEL_LEN, "cpu")
    limits = WorkerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, 2, max_logprobs=0)
    return WorkerInfo(time.time_ns(), rank=0, world_size=1, pool=pool, model=model, limits=limits)


async def _serve(settings: WorkerSettings, step_seconds: float) -> None:
    servicer, device_loop = WorkerServicer(WorkerMetrics()), DeviceLoop()
    server = await RpcServer.start(
        settings.listen, lambda grpc_server: add_WorkerServiceServicer_to_server(servicer, grpc_server), [SERVICE_NAME]
    )
    info = _info(settings)
    runner = PacedRunner(info.pool.num_gpu_blocks, step_seconds)
    device_loop.use(runner)
    device_loop.start()
    servicer.open(Worker(info, runner, device_loop))
    server.set_serving(True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    step_seconds = float(sys.argv[1]) / 1e3
    asyncio.run(_serve(load_settings(WorkerSettings, sys.argv[2:], os.environ, program="paced worker"), step_seconds))
