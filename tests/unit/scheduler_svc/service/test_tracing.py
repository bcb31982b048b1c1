"""Spans without a trace, and the file of `--trace-steps`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from quire.runtime.settings import ConfigurationError
from quire.tracing import TraceContext
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.request import Request
from scheduler_svc.core.sequence import SequenceGroup
from scheduler_svc.core.step import ClientEvents
from scheduler_svc.service.tracing import RequestSpans, StepTrace
from scheduler_svc.service.worker_messages import step_message
from tests.support.core_driver import Driver, make_config, make_request
from tests.support.tracing import MemoryTraces

SAMPLED = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01")


def no_clock() -> float:
    raise AssertionError("nobody is to ask for the time")


def submit_untraced(request: Request) -> SequenceGroup:
    assert request.traceparent is None
    return SequenceGroup.of(request, 0, 4, 0.0)


def test_without_a_tracer_nothing_is_made_whatever_gateways_say() -> None:
    spans = RequestSpans(None, no_clock)
    request = make_request(1)
    spans.submit(request, SAMPLED, submit_untraced)
    spans.delivered(ClientEvents(token_ids=[1, 2]))
    spans.aborted(request.key)
    spans.sequence_aborted(request.key)
    spans.close()
    assert len(spans) == 0
    # Nor with a tracer, for requests that a gateway does not trace or sample.
    traces = MemoryTraces()
    spans = RequestSpans(traces.tracer, no_clock)
    spans.submit(request, None, submit_untraced)
    spans.submit(request, TraceContext(f"00-{'a' * 32}-{'b' * 16}-00"), submit_untraced)
    assert traces.close() == []


def test_a_file_that_cannot_be_written_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"--trace-steps .*: No such file or directory"):
        StepTrace.open(str(tmp_path / "missing" / "steps.json"))


def test_a_trace_that_was_cut_off_misses_only_its_end(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    trace = StepTrace.open(str(path))
    trace.part("plan", 1, 0.5, 0.501, num_tokens=8)
    trace.close()
    trace.part("plan", 2, 0.6, 0.601, num_tokens=8)
    lines = path.read_text().splitlines()
    assert json.loads("".join(lines[:-2]).rstrip(",") + "]")[-1]["args"] == {"step": 1, "num_tokens": 8}


def test_a_disk_that_is_full_ends_the_trace_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    for num_parts in (1000, 1):  # in the middle, or not before its end
        caplog.clear()
        trace = StepTrace.open("/dev/full")
        for step in range(num_parts):
            trace.part("plan", step, 0.5, 0.501, num_tokens=8)
        trace.close()
        said = "the trace of steps /dev/full ends here: No space left on device"
        assert [record.getMessage() for record in caplog.records] == [said]


def test_a_step_names_the_traces_of_the_rows_that_it_assigns() -> None:
    driver = Driver(make_config())
    for handle, traceparent in enumerate(("00-a-b-01", None, "00-c-d-01")):
        driver.submit(replace(make_request(handle), traceparent=traceparent))
    plan = driver.plan()
    assert plan is not None
    step = worker_pb2.RunRequest.FromString(step_message(plan, epoch=7, generation=9)).step
    named = {traced.row: traced.traceparent for traced in step.traced}
    assert named == {plan.assign[0].row: "00-a-b-01", plan.assign[2].row: "00-c-d-01"}
