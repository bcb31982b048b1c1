"""Files of `--trace-steps` as a worker with known costs would make them."""

from pathlib import Path

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.step import StepPlan, StepWork
from scheduler_svc.service.tracing import StepTrace

CONFIG = SchedulerConfig(num_blocks=64, block_size=16, max_num_seqs=16, max_num_batched_tokens=256, max_model_len=512)
IDLE_S = 0.003
EMPTY = np.zeros((0, 2), np.int64)


def true_seconds(work: StepWork) -> float:
    return 0.004 + 2e-4 * min(work.num_tokens, 16) + 5e-5 * max(work.num_tokens - 16, 0) + 1e-6 * work.context_tokens


def make_plan(step_id: int, num_new: np.ndarray, num_computed: np.ndarray) -> StepPlan:
    rows = np.arange(len(num_new))
    return StepPlan(
        step_id=step_id,
        swap_out=EMPTY,
        swap_in=EMPTY,
        copy=EMPTY,
        release=EMPTY[:, 0],
        assign=(),
        fork=EMPTY,
        reseed=(),
        set_tokens=np.zeros((0, 3), np.int64),
        block_table_deltas=np.zeros((0, 3), np.int64),
        rows=rows,
        num_new_tokens=num_new,
        num_computed_tokens=num_computed,
        samples=np.stack((rows, rows), axis=1),
        sealed=(),
    )


def write_trace(path: Path, num_steps: int, noise: float = 0.0, seed: int = 0) -> Path:
    """As the service writes it: steps overlap by one, and now and then the worker is idle."""
    rng = np.random.default_rng(seed)
    trace = StepTrace.open(str(path))
    trace.attached(CONFIG, vocab_size=1000)
    received, now = 0.0, 0.0
    for step_id in range(1, num_steps + 1):
        num_rows = int(rng.integers(1, 16))
        num_new = np.where(rng.random(num_rows) < 0.1, rng.integers(2, 60, num_rows), 1)
        plan = make_plan(step_id, num_new, rng.integers(0, 400, num_rows))
        is_idle = rng.random() < 0.1
        now = received + 0.01 if is_idle else max(received - 0.002, 0.0)
        took = true_seconds(StepWork.of(plan)) * (1 + noise * rng.standard_normal())
        received = now + IDLE_S + took if is_idle else received + took
        trace.planned(plan, now, now + 1e-4)
        trace.part("send", step_id, now + 1e-4, now + 2e-4)
        trace.answered(step_id, (0, 0, 1000, 10), received)
        trace.part("apply", step_id, received, received + 1e-4)
    trace.close()
    return path
