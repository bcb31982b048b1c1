"""One trace goes through gateway, scheduler and worker, as a collector gets it."""

import asyncio
import secrets
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.channel import open_channel
from tests.support.serving import Served, serving
from tests.support.trace_collector import CollectedSpan, TraceCollector, trace_collector

pytestmark = pytest.mark.extended

OK, ERROR = 0, 2


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def collector() -> AsyncIterator[TraceCollector]:
    async with trace_collector() as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def served(collector: TraceCollector) -> AsyncIterator[Served]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
        patch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=abc")
        async with serving(num_gpu_blocks=256, otlp_traces_endpoint=collector.endpoint) as running:
            yield running


@pytest_asyncio.fixture(loop_scope="session")
async def generation(served: Served) -> AsyncIterator[generation_pb2_grpc.GenerationServiceStub]:
    async with open_channel(served.server.grpc_address) as channel:
        yield generation_pb2_grpc.GenerationServiceStub(channel)


def make_traceparent() -> tuple[str, str, str]:
    """The header, and the ids of trace and span in it."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-01", trace_id, span_id


def make_request(*, max_tokens: int, **fields) -> generation_pb2.GenerateStreamRequest:
    request = generation_pb2.GenerateStreamRequest(text="Once upon a time", **fields)
    request.stopping.max_tokens = max_tokens
    request.stopping.ignore_eos = True
    return request


def assert_chain(spans: dict[str, CollectedSpan], root: str) -> None:
    """Each service's span follows the one of the service that asked it, and lies within its time."""
    gateway, scheduler, worker = (spans[f"quire-{name}"] for name in ("gateway", "scheduler", "worker"))
    assert [gateway.parent_id, scheduler.parent_id, worker.parent_id] == [root, gateway.span_id, scheduler.span_id]
    assert gateway.start_ns <= scheduler.start_ns <= worker.start_ns <= worker.end_ns <= scheduler.end_ns


async def test_a_grpc_request_without_context_is_a_trace_of_all_services(
    generation: generation_pb2_grpc.GenerationServiceStub, collector: TraceCollector
) -> None:
    responses = [each async for each in generation.GenerateStream(make_request(max_tokens=8, request_id="mine"))]
    usage = responses[-1].completed.usage
    gateway = await collector.until(
        lambda spans: next((s for s in spans if s.attributes.get("gen_ai.request.id") == "mine"), None)
    )
    spans = await collector.trace(gateway.trace_id, 3)
    assert_chain(spans, "")
    scheduler, worker = spans["quire-scheduler"], spans["quire-worker"]
    assert {span.status for span in spans.values()} == {OK}
    assert scheduler.event_names == ["queued", "scheduled", "first token"]
    assert scheduler.attributes["quire.outcome"] == "completed"
    assert scheduler.attributes["gen_ai.usage.output_tokens"] == 8
    assert scheduler.attributes["gen_ai.latency.time_in_queue"] * 1e3 == pytest.approx(usage.queue_ms, abs=0.01)
    assert scheduler.attributes["gen_ai.latency.time_to_first_token"] < scheduler.attributes["gen_ai.latency.e2e"]
    assert worker.attributes["quire.outcome"] == "sampled"
    assert worker.attributes["quire.computed_tokens"] == usage.prompt_tokens - usage.cached_tokens
    assert worker.attributes["quire.steps"] == 1
    assert 0 < worker.attributes["gen_ai.latency.time_in_model_forward"] < 10
    assert all(metadata["x-collector-key"] == "abc" for metadata in collector.metadata)


async def test_a_call_that_resumes_a_durable_request_links_to_the_trace_in_which_that_goes_on(
    generation: generation_pb2_grpc.GenerationServiceStub, collector: TraceCollector
) -> None:
    (first_header, first_trace, _), (second_header, second_trace, second_caller) = (make_traceparent() for _ in "ab")
    request = make_request(max_tokens=100, request_id="durable-1", durable=True)
    call = generation.GenerateStream(request, metadata=(("traceparent", first_header),))
    await call.read()
    call.cancel()
    resumption = generation_pb2.ResumeStreamRequest(request_id="durable-1")
    resumed = generation.ResumeStream(resumption, metadata=(("traceparent", second_header),))
    async with asyncio.timeout(60):
        assert [each async for each in resumed][-1].HasField("completed")
    first = await collector.trace(first_trace, 3)
    assert first["quire-scheduler"].attributes["quire.outcome"] == "completed"
    assert first["quire-scheduler"].attributes["gen_ai.usage.output_tokens"] == 100
    second = await collector.trace(second_trace, 1)
    assert second.keys() == {"quire-gateway"}
    assert second["quire-gateway"].name.startswith("resume ")
    assert second["quire-gateway"].parent_id == second_caller
    assert second["quire-gateway"].linked_traces == [first_trace]
