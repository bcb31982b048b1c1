"""A worker whose model takes a fixed time; all other parts are as in service.

Called as `python -m bench.paced_worker PACE MILLISECONDS FLAGS`, with the flags of `quire worker`. PACE is `device` or
`host`, a value of `Pace`.
"""

import asyncio
import contextlib
import ctypes
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from bench.audience import StepClock
from quire.model_files.model_source import resolve_model
from quire.rpc.process import run_service
from quire.runtime.settings import load_settings
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.device.seals import SealInventory
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import Worker, WorkerServicer, start_server
from worker_svc.settings import WorkerSettings
from worker_svc.step import (
    AdmittedStep,
    ModelGeometry,
    PoolGeometry,
    SealedBlocks,
    Step,
    StepOutput,
    StepTimings,
    WorkerInfo,
    WorkerLimits,
)

_MAX_MODEL_LEN = 32768
_PR_SET_TIMERSLACK = 29
_PROGRAM = "paced worker"


class Pace(Enum):
    """The side that keeps the time."""

    DEVICE = "device"
    """A device with a queue, such as a GPU: it starts the next step by itself, and a thread waits for each end."""
    HOST = "host"
    """The thread that launches steps: a step begins once that thread wakes up and reports the result, as on the CPU."""


@dataclass(frozen=True, slots=True)
class PacedStep:
    """A step that ends at a given time, in seconds of `time.perf_counter`."""

    step: Step
    queue_us: int
    started: float
    ends: float
    seals: SealInventory
    number: int
    clock: StepClock

    def wait(self) -> StepOutput:
        time.sleep(max(self.ends - time.perf_counter(), 0))
        self.seals.add(self.step.sealed, self.number)
        rows = self.step.batch.samples[:, 0]
        model_us = int((time.perf_counter() - self.started) * 1e6)
        return StepOutput(
            step_id=self.step.step_id,
            rows=rows,
            token_ids=np.full(len(rows), self.clock.token_at(time.monotonic()), np.int32),
            logprobs=None,
            candidates=(),
            failed_rows=(),
            timings=StepTimings(self.queue_us, 0, model_us, 0),
        )


def _wake_on_time() -> None:
    """Makes sleeps of this process end on time: Linux adds up to 50 us, which no device does."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


class PacedRunner:
    """Every row samples the token of the time at which the step ends; a step takes `step_seconds`."""

    def __init__(self, num_blocks: int, pace: Pace, step_seconds: float) -> None:
        self.is_asynchronous = pace is Pace.DEVICE
        self._seals = SealInventory(num_blocks)
        self._num_steps = 0
        self._clock = StepClock()
        self._step_seconds = step_seconds
        self._free_at = 0.0
        _wake_on_time()

    def launch(self, admitted: AdmittedStep, queue_us: int = 0) -> PacedStep:
        self._num_steps += 1
        self._seals.begin_write(admitted.written_blocks, self._num_steps)
        now = time.perf_counter()
        started = max(now, self._free_at) if self.is_asynchronous else now
        self._free_at = started + self._step_seconds
        return PacedStep(admitted.step, queue_us, started, self._free_at, self._seals, self._num_steps, self._clock)

    def sealed_blocks(self) -> SealedBlocks:
        return self._seals.snapshot()

    def release_memory(self) -> None:
        self._seals.clear()


def _info(settings: WorkerSettings) -> WorkerInfo:
    config = json.loads((resolve_model(settings.model) / "config.json").read_text())
    num_blocks = settings.num_gpu_blocks or 65536
    pool = PoolGeometry(settings.block_size, num_blocks, 0, 1, 1, 1, "float32", 8 * settings.block_size)
    model = ModelGeometry(config["architectures"][0], "float32", config["vocab_size"], _MAX_MODEL_LEN, "cpu")
    limits = WorkerLimits(settings.max_num_seqs, settings.max_num_batched_tokens, 2, max_logprobs=0)
    return WorkerInfo(time.time_ns(), rank=0, world_size=1, pool=pool, model=model, limits=limits)


async def _serve(settings: WorkerSettings, pace: Pace, step_seconds: float) -> None:
    servicer, device_loop = WorkerServicer(WorkerMetrics()), DeviceLoop()
    server = await start_server(servicer, settings.listen)
    info = _info(settings)
    runner = PacedRunner(info.pool.num_gpu_blocks, pace, step_seconds)
    device_loop.use(runner)
    device_loop.start()
    servicer.open(Worker(info, runner, device_loop))
    server.set_serving(True)
    await asyncio.Event().wait()


def main(argv: Sequence[str]) -> int:
    pace, milliseconds, *flags = argv

    async def run() -> None:
        settings = load_settings(WorkerSettings, flags, os.environ, program=_PROGRAM)
        await _serve(settings, Pace(pace), float(milliseconds) / 1e3)

    return run_service(run, program=_PROGRAM)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
