"""The gateway's spans as a collector gets them, and the trace contexts that it sends to schedulers.

Tests of tracers cover malformed contexts and a collector that is down.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest

from quire.gateway.v1 import generation_pb2
from tests.support.fake_scheduler import FakeScheduler
from tests.support.gateway_process import RunningGateway, collect, error_of, running_gateway, stream_request
from tests.support.trace_collector import CollectedSpan, TraceCollector, trace_collector

OK, ERROR = 0, 2


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TraceCollector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with trace_collector() as running:
        yield running


@pytest.fixture
async def traced(scheduler: FakeScheduler, collector: TraceCollector) -> AsyncIterator[RunningGateway]:
    async with running_gateway(scheduler, otlp_traces_endpoint=collector.endpoint) as running:
        yield running


def make_traceparent(*, sampled: bool = True) -> tuple[str, str, str]:
    """The header, and its ids of trace and span."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{'01' if sampled else '00'}", trace_id, span_id


async def span_of(collector: TraceCollector, trace_id: str) -> CollectedSpan:
    return (await collector.trace(trace_id, 1))["quire-gateway"]


async def test_a_grpc_request_continues_the_trace_of_its_metadata_and_the_scheduler_that_of_the_gateway(
    traced: RunningGateway, scheduler: FakeScheduler, collector: TraceCollector
) -> None:
    header, trace_id, caller = make_traceparent()
    request = stream_request("hello", max_tokens=6, request_id="traced-1")
    request.sampling.temperature = 0.5
    request.sampling.top_p = 0.25
    metadata = (("traceparent", header), ("tracestate", "vendor=value"))
    done = await collect(traced.generation.GenerateStream(request, metadata=metadata))
    span = await span_of(collector, trace_id)
    assert (span.parent_id, span.status) == (caller, OK)
    assert span.name == f"text_completion {traced.gateway._models.default.model.name}"
    assert span.attributes["gen_ai.request.id"] == "traced-1"
    assert span.attributes["gen_ai.request.model"] == traced.gateway._models.default.model.name
    assert span.attributes["gen_ai.request.max_tokens"] == 6
    assert span.attributes["gen_ai.request.temperature"] == 0.5
    assert span.attributes["gen_ai.request.top_p"] == 0.25
    assert span.attributes["gen_ai.request.n"] == 1
    assert span.attributes["gen_ai.usage.input_tokens"] == done.completed.usage.prompt_tokens
    assert span.attributes["gen_ai.usage.output_tokens"] == 6
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert span.attributes["quire.outcome"] == "completed"
    assert 0 < span.attributes["gen_ai.latency.time_to_first_token"] <= span.attributes["gen_ai.latency.e2e"]
    told = scheduler.submits[-1].trace_context
    assert told.traceparent == f"00-{trace_id}-{span.span_id}-01"
    assert told.tracestate == "vendor=value"


async def test_a_caller_that_samples_nothing_is_followed(
    traced: RunningGateway, scheduler: FakeScheduler, collector: TraceCollector
) -> None:
    header, unsampled, _ = make_traceparent(sampled=False)
    await collect(traced.generation.GenerateStream(stream_request(), metadata=(("traceparent", header),)))
    assert scheduler.submits[-1].trace_context.traceparent.endswith("-00")
    header, trace_id, _ = make_traceparent()
    await collect(traced.generation.GenerateStream(stream_request(), metadata=(("traceparent", header),)))
    await span_of(collector, trace_id)
    assert unsampled not in {span.trace_id for span in collector.spans}


async def test_a_request_that_its_caller_got_wrong_tells_its_error_and_is_no_fault_of_the_server(
    traced: RunningGateway, collector: TraceCollector
) -> None:
    header, trace_id, _ = make_traceparent()
    request = stream_request("a secret", max_tokens=100_000)
    error = await error_of(traced.generation.GenerateStream(request, metadata=(("traceparent", header),)))
    span = await span_of(collector, trace_id)
    assert span.attributes["error.type"] == error.reason
    assert span.attributes["quire.outcome"] == "invalid_argument"
    assert span.attributes["rpc.grpc.status_code"] == 3
    assert span.status == OK
    assert "secret" not in repr(span)


@pytest.mark.parametrize(
    ("happens", "status", "attributes"),
    [
        ("fails", ERROR, {"error.type": "NON_FINITE_LOGITS", "quire.outcome": "internal"}),
        ("cancelled", OK, {"error.type": "CANCELLED_BY_ID", "quire.outcome": "cancelled"}),
        ("left", OK, {"quire.outcome": "abandoned"}),
    ],
)
async def test_a_span_says_how_its_request_ended(
    traced: RunningGateway,
    scheduler: FakeScheduler,
    collector: TraceCollector,
    happens: str,
    status: int,
    attributes: dict,
) -> None:
    header, trace_id, _ = make_traceparent()
    scheduler.step_delay_s = 0.02
    if happens == "fails":
        scheduler.emits.clear()
    request = stream_request(max_tokens=500, request_id="mine")
    call = traced.generation.GenerateStream(request, metadata=(("traceparent", header),))
    await (scheduler.until(lambda: scheduler.live) if happens == "fails" else call.read())
    match happens:
        case "fails":
            scheduler.fail(next(iter(scheduler.live)), code=13, reason="NON_FINITE_LOGITS", message="row 3")
        case "cancelled":
            await traced.generation.Cancel(generation_pb2.CancelRequest(request_id="mine"))
        case _:
            call.cancel()
    span = await span_of(collector, trace_id)
    assert span.status == status
    assert attributes.items() <= span.attributes.items()
    # It fails before its first token.
    assert (span.attributes["gen_ai.usage.output_tokens"] >= 1) == (happens != "fails")
    assert ("gen_ai.latency.time_to_first_token" in span.attributes) == (happens != "fails")
    assert "gen_ai.response.finish_reasons" not in span.attributes


async def test_a_request_that_is_submitted_again_stays_in_its_trace(
    traced: RunningGateway, scheduler: FakeScheduler, collector: TraceCollector
) -> None:
    header, trace_id, _ = make_traceparent()
    scheduler.step_delay_s = 0.02
    call = traced.generation.GenerateStream(stream_request(max_tokens=20), metadata=(("traceparent", header),))
    responses = aiter(call)
    assert (await anext(responses)).HasField("chunk")
    scheduler.break_streams()
    await scheduler.until(lambda: len(scheduler.submits) == 2)
    assert scheduler.submits[0].trace_context == scheduler.submits[1].trace_context
    async with asyncio.timeout(30):
        assert [response async for response in responses][-1].HasField("completed")
    span = await span_of(collector, trace_id)
    assert (span.attributes["quire.submissions"], span.attributes["quire.outcome"]) == (2, "completed")


async def test_an_http_request_continues_the_trace_of_its_headers(
    traced: RunningGateway, collector: TraceCollector
) -> None:
    header, trace_id, caller = make_traceparent()
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "n": 1}
    answer = await traced.http.post("/v1/chat/completions", json=body, headers={"traceparent": header})
    assert answer.status_code == 200
    span = await span_of(collector, trace_id)
    assert span.parent_id == caller
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.usage.output_tokens"] == 4
