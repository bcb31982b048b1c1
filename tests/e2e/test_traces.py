"""One trace through gateway, scheduler and worker, as a collector gets it."""

import pytest

from quire.gateway.v1 import generation_pb2, generation_pb2_grpc
from quire.rpc.channel import open_channel
from tests.support.serving import serving
from tests.support.trace_collector import trace_collector

pytestmark = pytest.mark.extended

OK = 0
TRACE, OTHER, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", 32 * "a", "00f067aa0ba902b7"


async def test_a_durable_request_is_one_trace_of_all_services_to_which_its_resumption_links(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=abc")
    request = generation_pb2.GenerateStreamRequest(text="Once upon a time", request_id="mine", durable=True)
    request.stopping.max_tokens = 8
    request.stopping.ignore_eos = True
    async with (
        trace_collector() as collector,
        serving(num_gpu_blocks=256, otlp_traces_endpoint=collector.endpoint) as served,
        open_channel(served.server.grpc_address) as channel,
    ):
        stub = generation_pb2_grpc.GenerationServiceStub(channel)
        call = stub.GenerateStream(request, metadata=(("traceparent", f"00-{TRACE}-{CALLER}-01"),))
        usage = [each async for each in call][-1].completed.usage
        spans = await collector.trace(TRACE, 3)
        resumption = generation_pb2.ResumeStreamRequest(request_id="mine")
        call = stub.ResumeStream(resumption, metadata=(("traceparent", f"00-{OTHER}-{CALLER}-01"),))
        assert [each async for each in call][-1].HasField("completed")
        (resumed,) = (await collector.trace(OTHER, 1)).values()
    gateway, scheduler, worker = (spans[f"quire-{name}"] for name in ("gateway", "scheduler", "worker"))
    # Each service's span is a child of the calling service's span, and lies within its time.
    assert [gateway.parent_id, scheduler.parent_id, worker.parent_id] == [CALLER, gateway.span_id, scheduler.span_id]
    assert gateway.start_ns <= scheduler.start_ns <= worker.start_ns <= worker.end_ns <= scheduler.end_ns
    assert {span.status for span in spans.values()} == {OK}
    assert gateway.attributes["gen_ai.request.id"] == "mine"
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
    # A call that resumes it has a trace of its own.
    assert (resumed.parent_id, resumed.linked_traces) == (CALLER, [TRACE])
    assert resumed.name.startswith("resume ")
