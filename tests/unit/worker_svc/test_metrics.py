from dataclasses import replace

import numpy as np

from tests.support.steps import int32
from worker_svc.metrics import WorkerMetrics
from worker_svc.step import StepOutput, StepTimings


def test_steps_that_finished_are_counted_with_their_tokens_failures_and_times() -> None:
    metrics = WorkerMetrics()
    output = StepOutput(1, int32([0, 1]), np.zeros(2, np.int32), None, (), (1,), StepTimings(10, 20, 3000, 400))
    metrics.step_finished(replace(output, num_computed_tokens=6))
    value = metrics.registry.get_sample_value
    assert value("quire_worker_tokens_total") == 6
    assert value("quire_worker_sampled_tokens_total") == 1
    assert value("quire_worker_row_failures_total") == 1
    assert value("quire_worker_steps_total") == 1
    assert value("quire_worker_step_seconds_sum", {"stage": "model"}) == 0.003


def test_a_row_that_was_refused_is_no_failure_of_its_logits_and_a_chunk_that_is_not_finite_is_one() -> None:
    metrics = WorkerMetrics()
    output = StepOutput(1, int32([0, 1]), np.zeros(2, np.int32), None, (), (0, 1), StepTimings(0, 0, 0, 0))
    metrics.step_finished(replace(output, refusals={0: "no token fits"}))
    assert metrics.registry.get_sample_value("quire_worker_row_failures_total") == 1
    metrics.step_finished(replace(output, failed_rows=(), non_finite_chunks=(2, 3)))
    assert metrics.registry.get_sample_value("quire_worker_row_failures_total") == 3
