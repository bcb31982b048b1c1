"""One decode step of the model runner: everything that a worker does, except the messages."""

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from bench.gpu_figures import Figure, bandwidth
from bench.gpu_model import config_of, make_model, step_bytes
from bench.gpu_rig import BLOCK_SIZE, Rig
from worker_svc.device.replay import CudaGraphRecorder, GraphRecorder
from worker_svc.models.decoder import Decoder

CONTEXT = 1024
NUM_STEPS = 40
_WARM_UP = 6


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step, means over many."""

    whole: float
    """From step to step with two in flight, as the host measures it."""
    model: float
    """The model without the host's work, as the device measures it."""


def step_figures(memory: float, *, with_graphs: bool, shape: str = "llama-8b") -> Iterator[Figure]:
    """Decode steps, compared with the time to read weights and contexts once at `memory` GB/s."""
    device = torch.device("cuda", torch.cuda.current_device())
    model = make_model(config_of(shape), device)
    for num_rows in (1, 64):
        run = DecodeRun(model, num_rows, CONTEXT, CudaGraphRecorder(device) if with_graphs else None)
        times = run.measure(NUM_STEPS)
        title = f"{shape}, batch {num_rows}, context {CONTEXT}, {'graphs' if with_graphs else 'eager'}"
        yield bandwidth(f"decode step, {title}", run.step_bytes, times.whole, memory)
        yield bandwidth(f"  the model alone, {title}", run.step_bytes, times.model, memory)
        del run
        torch.cuda.empty_cache()


class DecodeRun:
    """Rows of one length, in a pool of random keys and values, that decode greedily.

    Args:
        recorder: if given, decodes are replayed.
    """

    def __init__(self, model: Decoder, num_rows: int, context: int, recorder: GraphRecorder | None) -> None:
        blocks = -(-(context + NUM_STEPS + _WARM_UP + 1) // BLOCK_SIZE)
        self._rig = Rig(model, num_rows=num_rows, num_blocks=num_rows * blocks, recorder=recorder)
        for layer in self._rig.pool.gpu:
            layer.normal_()
        token_bytes = self._rig.pool.geometry.block_bytes // BLOCK_SIZE
        self.step_bytes = step_bytes(model) + num_rows * context * token_bytes
        """Bytes of weights, keys and values that a step reads."""
        self._rows = range(num_rows)
        self._context = context
        rng = np.random.default_rng(0)
        tables = rng.permutation(num_rows * blocks).reshape(num_rows, blocks).tolist()
        # Rows begin as if all of their contexts had been computed.
        self._assign = {row: (rng.integers(3, 1000, context).tolist(), tables[row]) for row in self._rows}

    def measure(self, num_steps: int) -> StepTimes:
        """Times of at most `NUM_STEPS` steps after a few warm-up steps. RuntimeError if logits are not finite."""
        self._run(_WARM_UP)
        self._rig.drain()
        started = time.perf_counter()
        self._run(num_steps)
        outputs = self._rig.drain()
        whole = (time.perf_counter() - started) / num_steps
        if any(output.failed_rows for output in outputs):
            raise RuntimeError("logits of the random model are not finite")
        return StepTimes(whole, statistics.fmean(output.timings.model_us for output in outputs) / 1e6)

    def _run(self, num_steps: int) -> None:
        for _ in range(num_steps):
            num_rows = len(self._rows)
            self._rig.step(self._rows, [1] * num_rows, [self._context - 1] * num_rows, assign=self._assign)
            self._assign = {}
            self._context += 1
