"""The cost of the scheduler's core alone: schedule and apply of one step, in milliseconds."""

import argparse
import time
from collections import deque

import numpy as np

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.request import ClientId, Handle, Request, RequestKey, RowSampling
from scheduler_svc.core.scheduler import Scheduler
from scheduler_svc.core.step_plan import StepPlan, StepResult

_BLOCK_SIZE, _PROMPT_LEN = 16, 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 256, 1024], help="running sequences")
    parser.add_argument("--steps", type=int, default=600, help="steps to time")


def main(arguments: argparse.Namespace) -> None:
    print(
        f"{'sequences':>9} {'schedule p50':>13} {'p99':>7} {'apply p50':>10} {'p99':>7} {'both p50':>9} {'p99':>7}  ms"
    )
    for num_sequences in arguments.sequences:
        schedule, apply = time_steps(num_sequences, arguments.steps)
        columns = [
            f(x) for x in (schedule, apply, schedule + apply) for f in (np.median, lambda v: np.percentile(v, 99))
        ]
        print(f"{num_sequences:>9} " + "{:13.3f} {:7.3f} {:10.3f} {:7.3f} {:9.3f} {:7.3f}".format(*columns))


def time_steps(num_sequences: int, num_steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Milliseconds of `schedule` and of `apply` for each step of decoding, two steps in flight."""
    scheduler = _filled_scheduler(num_sequences, num_steps + 10)
    plans: deque[StepPlan] = deque()
    times = np.zeros((2, num_steps))
    for step in range(-8, num_steps):
        started = time.perf_counter()
        plan = scheduler.schedule(started)
        planned = time.perf_counter()
        assert plan is not None
        plans.append(plan)
        if len(plans) < 2:
            continue
        oldest = plans.popleft()
        result = StepResult(oldest.step_id, np.full(len(oldest.samples), 7))
        applying = time.perf_counter()
        scheduler.apply(result, applying)
        if step >= 0:
            times[:, step] = planned - started, time.perf_counter() - applying
    return times[0] * 1e3, times[1] * 1e3


def _filled_scheduler(num_sequences: int, num_output_tokens: int) -> Scheduler:
    blocks_each = -(-(_PROMPT_LEN + num_output_tokens) // _BLOCK_SIZE) + 1
    config = SchedulerConfig(
        num_blocks=num_sequences * blocks_each,
        block_size=_BLOCK_SIZE,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=num_sequences * _PROMPT_LEN,
        max_model_len=_PROMPT_LEN + num_output_tokens,
        max_waiting_requests=num_sequences,
        watermark=0.0,
    )
    scheduler = Scheduler(config)
    for index in range(num_sequences):
        key = RequestKey(ClientId(0), Handle(index))
        # Lengths differ, so that blocks fill up at different steps, as they do in real batches.
        prompt = [1] * (1 + index % _PROMPT_LEN)
        scheduler.submit(Request(key, str(index), prompt, RowSampling(index), num_output_tokens, frozenset([2])), 0.0)
    return scheduler
