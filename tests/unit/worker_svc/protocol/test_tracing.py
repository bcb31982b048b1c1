"""The worker's spans of traced rows, from the messages of a step stream."""

from collections.abc import AsyncIterator, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from quire.arrays import encode_int32
from quire.worker.v1 import worker_pb2
from tests.support.tracing import MemoryTraces
from worker_svc.protocol.tracing import PrefillSpans, StreamWatch

SCHEDULER_SPAN = "b7ad6b7169203331"


def traceparent(number: int = 1) -> str:
    return f"00-{number:032x}-{SCHEDULER_SPAN}-01"


def make_step(
    step_id: int,
    rows: dict[int, int],
    *,
    samples: Sequence[int] = (),
    traced: Iterable[int] = (),
    release: Sequence[int] = (),
) -> worker_pb2.RunRequest:
    """Computes so many tokens of each row. Rows of `traced` enter with it, each in a trace of its number."""
    pairs = [each for row in samples for each in (row, row)]
    batch = worker_pb2.Batch(
        rows=encode_int32(list(rows)), num_new_tokens=encode_int32(list(rows.values())), samples=encode_int32(pairs)
    )
    names = [worker_pb2.TracedRow(row=row, traceparent=traceparent(row)) for row in traced]
    step = worker_pb2.StepRequest(step_id=step_id, batch=batch, traced=names, release=encode_int32(list(release)))
    return worker_pb2.RunRequest(step=step)


def make_answer(step_id: int, model_us: int) -> worker_pb2.RunResponse:
    timings = worker_pb2.StepTimings(model_us=model_us)
    return worker_pb2.RunResponse(result=worker_pb2.StepResult(step_id=step_id, timings=timings))


class Driver:
    """One stream: hands messages over in the order of a test."""

    def __init__(self) -> None:
        self._traces = MemoryTraces()
        self.watch = StreamWatch(self._traces.tracer, rank=0)

    async def send(self, request: worker_pb2.RunRequest) -> None:
        async def one() -> AsyncIterator[worker_pb2.RunRequest]:
            yield request

        assert [each async for each in self.watch.passing(one())] == [request]

    def answer(self, step_id: int, model_us: int = 1000) -> None:
        self.watch.see_response(worker_pb2.RunResponse(heartbeat=worker_pb2.Heartbeat()))
        self.watch.see_response(make_answer(step_id, model_us))

    def close(self) -> list[ReadableSpan]:
        self.watch.close()
        return self._traces.close()


def facts(span: ReadableSpan) -> tuple[object, object, object]:
    attributes = span.attributes or {}
    return attributes["quire.outcome"], attributes["quire.steps"], attributes["quire.computed_tokens"]


async def test_a_prefill_in_chunks_is_one_span_that_ends_with_its_first_token() -> None:
    driver = Driver()
    await driver.send(make_step(1, {4: 100}, traced=[4]))
    await driver.send(make_step(2, {4: 100}))
    driver.answer(1, model_us=3000)
    await driver.send(make_step(3, {4: 7}, samples=[4]))
    # The first decode is sent before the last chunk is answered.
    await driver.send(make_step(4, {4: 1}, samples=[4]))
    driver.answer(2, model_us=2000)
    driver.answer(3, model_us=500)
    driver.answer(4)
    (span,) = driver.close()
    assert facts(span) == ("sampled", 3, 207)
    assert span.parent is not None
    assert (f"{span.parent.span_id:016x}", span.parent.trace_id) == (SCHEDULER_SPAN, 4)
    assert (span.attributes or {})["gen_ai.latency.time_in_model_forward"] == pytest.approx(0.0055)


async def test_a_step_without_the_row_does_not_count_for_it() -> None:
    driver = Driver()
    await driver.send(make_step(1, {1: 16, 2: 1}, traced=[1], samples=[2]))
    await driver.send(make_step(2, {2: 1}, samples=[2]))
    await driver.send(make_step(3, {1: 2, 2: 1}, samples=[2, 1]))
    for step_id in (1, 2, 3):
        driver.answer(step_id)
    (span,) = driver.close()
    assert facts(span) == ("sampled", 2, 18)


async def test_rows_of_one_step_have_spans_in_the_traces_of_their_requests() -> None:
    driver = Driver()
    await driver.send(make_step(1, {1: 5, 2: 6, 3: 7}, samples=[1, 2, 3], traced=[1, 3]))
    driver.answer(1)
    spans = driver.close()
    assert sorted(span.context.trace_id for span in spans) == [1, 3]
    assert sorted(facts(span) for span in spans) == [("sampled", 1, 5), ("sampled", 1, 7)]


async def test_a_row_that_is_released_before_it_samples_ends_its_span() -> None:
    driver = Driver()
    await driver.send(make_step(1, {1: 5}, traced=[1]))
    await driver.send(make_step(2, {2: 1}, release=[1]))
    (span,) = driver.close()
    assert facts(span) == ("released", 0, 0)


async def test_a_late_answer_for_the_sequence_before_does_not_end_the_span_of_the_next_one() -> None:
    driver = Driver()
    await driver.send(make_step(1, {1: 5}, samples=[1], traced=[1]))
    await driver.send(make_step(2, {1: 9}, traced=[1], release=[1]))
    driver.answer(1)
    driver.answer(2)
    await driver.send(make_step(3, {1: 1}, samples=[1]))
    driver.answer(3)
    first, second = driver.close()
    assert (facts(first), facts(second)) == (("released", 0, 0), ("sampled", 2, 10))


async def test_spans_end_with_the_stream() -> None:
    driver = Driver()
    await driver.send(make_step(1, {1: 5}, traced=[1]))
    (span,) = driver.close()
    assert facts(span)[0] == "stream ended"


async def test_the_answer_of_a_rank_without_timings_ends_the_span_all_the_same() -> None:
    driver = Driver()
    await driver.send(make_step(1, {1: 5}, samples=[1], traced=[1]))
    driver.watch.see_response(worker_pb2.RunResponse(result=worker_pb2.StepResult(step_id=1)))
    (span,) = driver.close()
    assert facts(span) == ("sampled", 1, 5)
    assert "gen_ai.latency.time_in_model_forward" not in (span.attributes or {})


async def test_decodes_of_rows_that_nobody_traces_leave_nothing_behind() -> None:
    driver = Driver()
    for step_id in range(1, 50):
        await driver.send(make_step(step_id, {1: 1, 2: 1}, samples=[1, 2]))
        driver.answer(step_id)
    assert not driver.watch._in_flight
    assert driver.close() == []


async def test_a_malformed_step_passes_for_the_session_to_refuse() -> None:
    driver = Driver()
    step = make_step(1, {1: 5}, traced=[1])
    step.step.batch.rows = b"odd"
    await driver.send(step)
    short = make_step(2, {1: 5, 2: 5}, traced=[1, 2])
    short.step.batch.num_new_tokens = encode_int32([5])
    await driver.send(short)
    driver.answer(2)
    assert {facts(span)[0] for span in driver.close()} == {"stream ended"}


async def test_a_malformed_context_of_a_row_begins_a_trace() -> None:
    driver = Driver()
    step = make_step(1, {1: 5}, samples=[1], traced=[1])
    step.step.traced[0].traceparent = "nonsense"
    await driver.send(step)
    driver.answer(1)
    (span,) = driver.close()
    assert span.parent is None


async def test_other_methods_are_not_watched() -> None:
    details: Any = SimpleNamespace(method="/quire.worker.v1.WorkerService/GetInfo", invocation_metadata=())
    handler = object()

    async def continuation(_: object) -> object:
        return handler

    spans = PrefillSpans(MemoryTraces().tracer, rank=0)
    assert await spans.intercept_service(continuation, details) is handler
