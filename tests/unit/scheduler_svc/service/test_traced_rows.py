"""Rows that are traced, in the step that assigns them."""

from dataclasses import replace

from quire.worker.v1 import worker_pb2
from scheduler_svc.service.worker_messages import step_message
from tests.support.core_driver import Driver, make_config, make_request


def test_a_step_names_the_traces_of_the_rows_that_it_assigns() -> None:
    driver = Driver(make_config())
    for handle, traceparent in enumerate(("00-a-b-01", None, "00-c-d-01")):
        driver.submit(replace(make_request(handle), traceparent=traceparent))
    plan = driver.plan()
    assert plan is not None
    step = worker_pb2.RunRequest.FromString(step_message(plan, epoch=7, generation=9)).step
    named = {traced.row: traced.traceparent for traced in step.traced}
    assert named == {plan.assign[0].row: "00-a-b-01", plan.assign[2].row: "00-c-d-01"}
