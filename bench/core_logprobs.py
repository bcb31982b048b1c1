"""Steps of the scheduler with log probabilities of outputs, with the messages from the worker and to the gateway."""

import time
from collections import deque
from collections.abc import Iterator

import numpy as np

from bench.core_load import Load, steady_load
from quire.messages.arrays import encode_int32, encode_logprobs
from quire.messages.logprob_columns import LogprobColumns
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.step import StepPlan
from scheduler_svc.service.gateway_messages import events_message
from scheduler_svc.service.outbox import Outgoing
from scheduler_svc.service.worker_messages import step_answer

NUMBERS_OF_TOP = (None, 0, 5, 20)
"""Numbers of most likely tokens to report in addition to the chosen one; None reports no log probability."""

_VOCAB_SIZE = 32_000
_WARM_UP = 8


def time_logprob_steps(num_sequences: int, num_top: int | None, num_steps: int) -> np.ndarray:
    """Milliseconds of each step, float64[steps]: schedule, apply, and the conversion of both messages."""
    load = steady_load(num_sequences, num_steps + _WARM_UP + 4, logprobs=num_top)
    return np.fromiter(_steps(load, num_top), float, num_steps + _WARM_UP)[_WARM_UP:] * 1e3


def _steps(load: Load, num_top: int | None) -> Iterator[float]:
    results: deque[bytes] = deque()
    while True:
        started = time.perf_counter()
        plan = load.scheduler.schedule(started)
        seconds = time.perf_counter() - started
        assert plan is not None, "the load lasts for all steps"
        results.append(_result_message(plan, num_top))
        if len(results) < 2:
            continue
        started = time.perf_counter()
        answer = step_answer(worker_pb2.StepResult.FromString(results.popleft()), _VOCAB_SIZE)
        events = load.scheduler.apply(answer.result, started)
        for batch in events.values():
            events_message(Outgoing(step_id=answer.result.step_id, batches=[batch])).SerializeToString()
        yield seconds + time.perf_counter() - started


def _result_message(plan: StepPlan, num_top: int | None) -> bytes:
    count = len(plan.samples)
    message = worker_pb2.StepResult(
        step_id=plan.step_id, rows=encode_int32(plan.samples[:, 0]), token_ids=encode_int32(np.full(count, 7))
    )
    if num_top is not None:
        top_ids = np.tile(np.arange(num_top, dtype=np.int32), (count, 1))
        columns = LogprobColumns.of_lines(
            np.full(count, -0.5, np.float32), np.ones(count, np.int32), top_ids, -top_ids.astype(np.float32)
        )
        message.token_logprobs.samples = encode_int32(np.arange(count))
        encode_logprobs(columns, message.token_logprobs)
    return message.SerializeToString()
