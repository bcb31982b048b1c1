"""The worker's spans of traced rows, from the steps of a stream."""

from collections.abc import Iterable, Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan

from tests.support.steps import int32, make_batch, make_changes, make_step
from tests.support.tracing import MemoryTraces
from worker_svc.protocol.tracing import PrefillSpans
from worker_svc.step import StepOutput, StepTimings

SCHEDULER_SPAN = "b7ad6b7169203331"


def traceparent(number: int = 1) -> str:
    return f"00-{number:032x}-{SCHEDULER_SPAN}-01"


class Driver:
    """One stream: reports steps in the order of a test."""

    def __init__(self) -> None:
        self._traces = MemoryTraces()
        self.spans = PrefillSpans(self._traces.tracer, rank=0)

    def start(
        self,
        step_id: int,
        rows: dict[int, int],
        *,
        samples: Sequence[int] = (),
        traced: Iterable[int] = (),
        release: Sequence[int] = (),
        parents: dict[int, str] | None = None,
    ) -> None:
        """Computes `rows[row]` tokens of each row. Rows of `traced` enter with it, each in a trace of its number."""
        batch = make_batch(list(rows), list(rows.values()), [0] * len(rows), [(row, row) for row in samples])
        step = make_step(make_changes(release=release), batch, step_id=step_id)
        self.spans.step_starts(step, parents or {row: traceparent(row) for row in traced})

    def end(self, step_id: int, model_us: int = 1000) -> None:
        self.spans.step_ends(StepOutput(step_id, int32(()), int32(()), None, (), (), StepTimings(0, 0, model_us, 0)))

    def close(self) -> list[ReadableSpan]:
        self.spans.close()
        return self._traces.close()


def facts(span: ReadableSpan) -> tuple[object, object, object]:
    attributes = span.attributes or {}
    return attributes["quire.outcome"], attributes["quire.steps"], attributes["quire.computed_tokens"]


def test_a_prefill_in_chunks_is_one_span_that_ends_with_its_first_token() -> None:
    driver = Driver()
    driver.start(1, {4: 100}, traced=[4])
    driver.start(2, {4: 100})
    driver.end(1, model_us=3000)
    driver.start(3, {4: 7}, samples=[4])
    # The first decode starts before the last chunk ends.
    driver.start(4, {4: 1}, samples=[4])
    driver.end(2, model_us=2000)
    driver.end(3, model_us=500)
    driver.end(4)
    (span,) = driver.close()
    assert facts(span) == ("sampled", 3, 207)
    assert span.parent is not None
    assert (f"{span.parent.span_id:016x}", span.parent.trace_id) == (SCHEDULER_SPAN, 4)
    assert (span.attributes or {})["gen_ai.latency.time_in_model_forward"] == pytest.approx(0.0055)


def test_rows_of_one_step_have_spans_in_the_traces_of_their_requests() -> None:
    driver = Driver()
    driver.start(1, {1: 5, 2: 6, 3: 7}, samples=[1, 2, 3], traced=[1, 3])
    driver.end(1)
    spans = driver.close()
    assert sorted(span.context.trace_id for span in spans) == [1, 3]
    assert sorted(facts(span) for span in spans) == [("sampled", 1, 5), ("sampled", 1, 7)]


def test_a_step_of_the_sequence_before_that_ends_late_does_not_end_the_span_of_the_next_one() -> None:
    driver = Driver()
    driver.start(1, {1: 5}, samples=[1], traced=[1])
    driver.start(2, {1: 9}, traced=[1], release=[1])
    driver.end(1)
    driver.end(2)
    driver.start(3, {1: 1}, samples=[1])
    driver.end(3)
    # Decodes without a trace leave no state, and open spans end with the stream.
    assert not driver.spans._in_flight
    driver.start(4, {2: 5}, traced=[2])
    first, second, third = driver.close()
    assert [facts(span) for span in (first, second)] == [("released", 0, 0), ("sampled", 2, 10)]
    assert facts(third)[0] == "stream ended"
