"""The scheduler's spans where there is nothing to trace."""

from quire.tracing import TraceContext
from scheduler_svc.core.events import ClientEvents
from scheduler_svc.core.request import ClientId
from scheduler_svc.service.request_spans import RequestSpans
from tests.support.core_driver import make_request
from tests.support.tracing import MemoryTraces

SAMPLED = TraceContext(f"00-{'a' * 32}-{'b' * 16}-01")


def no_clock() -> float:
    raise AssertionError("nobody is to ask for the time")


def test_without_a_tracer_nothing_is_made_whatever_gateways_say() -> None:
    spans = RequestSpans(None, no_clock)
    request = make_request(1)
    assert spans.start(request, SAMPLED) is None
    spans.delivered({ClientId(0): ClientEvents(token_ids=[1, 2])})
    spans.aborted(request.key)
    spans.sequence_aborted(request.key)
    spans.close()
    assert len(spans) == 0


def test_what_a_gateway_does_not_trace_or_sample_is_not_traced() -> None:
    traces = MemoryTraces()
    spans = RequestSpans(traces.tracer, no_clock)
    assert spans.start(make_request(1), None) is None
    assert spans.start(make_request(1), TraceContext(f"00-{'a' * 32}-{'b' * 16}-00")) is None
    assert traces.close() == []
