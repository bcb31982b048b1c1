from dataclasses import replace

import numpy as np

from tests.support.steps import int32
from worker_svc.metrics import WorkerMetrics
from worker_svc.step import StepOutput, StepTimings


def test_steps_that_finished_are_counted_with_their_tokens_failures_and_times() -> None:
    metrics = WorkerMetrics()
    value = metrics.registry.get_sample_value
    output = StepOutput(1, int32([0, 1]), np.zeros(2, np.int32), None, (), (1,), StepTimings(10, 20, 3000, 400))
    metrics.step_finished(replace(output, num_computed_tokens=6))
    assert value("quire_worker_tokens_total") == 6
    assert value("quire_worker_sampled_tokens_total") == 1
    assert value("quire_worker_row_failures_total") == 1
    assert value("quire_worker_steps_total") == 1
    assert value("quire_worker_step_seconds_sum", {"stage": "model"}) == 0.003
    # A refused row does not count as a failure of its logits, but a chunk that is not finite does.
    metrics.step_finished(replace(output, failed_rows=(0, 1), refusals={0: "no token fits"}))
    assert value("quire_worker_row_failures_total") == 2
    metrics.step_finished(replace(output, failed_rows=(), non_finite_chunks=(2, 3)))
    assert value("quire_worker_row_failures_total") == 4


def test_each_token_of_a_sample_is_counted() -> None:
    """For example in a step with drafts, or in which the model ran several times."""
    metrics = WorkerMetrics()
    output = StepOutput(1, int32([4, 1]), np.zeros(5, np.int32), None, (), (), StepTimings(10, 20, 3000, 400))
    metrics.step_finished(replace(output, num_tokens=int32([3, 2])))
    assert metrics.registry.get_sample_value("quire_worker_sampled_tokens_total") == 5
    metrics.step_finished(replace(output, num_tokens=int32([3, 2]), failed_rows=(1,)))
    assert metrics.registry.get_sample_value("quire_worker_sampled_tokens_total") == 8
