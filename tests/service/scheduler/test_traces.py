"""The scheduler's spans as a collector gets them."""

import secrets
from collections.abc import AsyncIterator

import pytest

from quire.messages.arrays import encode_int32
from quire.scheduler.v1 import scheduler_pb2
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from tests.support.processes import until_true
from tests.support.scheduler_process import (
    GatewayStream,
    attached_scheduler,
    make_submit,
    running_scheduler,
    wait_attached,
    wait_nothing_in_use,
)
from tests.support.trace_collector import CollectedSpan, TraceCollector, trace_collector

OK, ERROR = 0, 2
TIGHT = FakeWorkerConfig(num_blocks=9, num_host_blocks=16, block_size=4, failing_seeds=frozenset({13}))
"""Nine blocks of four tokens: two growing requests do not fit."""


@pytest.fixture
async def collector(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[TraceCollector]:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    async with trace_collector() as running:
        yield running


@pytest.fixture
async def worker() -> AsyncIterator[FakeWorker]:
    fake = FakeWorker(TIGHT)
    await fake.start()
    yield fake
    await fake.stop()


@pytest.fixture
async def scheduler(worker, tmp_path, collector, request):
    settings = getattr(request, "param", {})
    socket = str(tmp_path / "s.sock")
    async with running_scheduler(socket, worker.address, otlp_traces_endpoint=collector.endpoint, **settings) as stub:
        await wait_attached(stub)
        yield stub
        await wait_nothing_in_use(stub)


def traced_submit(handle: int, **fields) -> tuple[scheduler_pb2.Submit, str, str]:
    """A submission, and its ids of trace and span."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    context = scheduler_pb2.TraceContext(traceparent=f"00-{trace_id}-{span_id}-01")
    return make_submit(handle, trace_context=context, **fields), trace_id, span_id


async def span_of(collector: TraceCollector, trace_id: str) -> CollectedSpan:
    return (await collector.trace(trace_id, 1))["quire-scheduler"]


async def test_a_request_tells_its_times_in_order_and_what_was_cached(stream, collector) -> None:
    traces: list[tuple[str, str]] = []
    for handle in (7, 8):
        submit, *names = traced_submit(handle, prompt_len=9)
        submit.prompt_token_ids = encode_int32(range(9))
        traces.append((names[0], names[1]))
        await stream.submit(submit)
        await stream.read_until_over(handle)
    spans = [await span_of(collector, trace_id) for trace_id, _ in traces]
    span = spans[0]
    assert (span.name, span.parent_id, span.status) == ("schedule", traces[0][1], OK)
    assert span.event_names == ["queued", "scheduled", "first token"]
    assert span.attributes["gen_ai.request.id"] == "request-7"
    assert span.attributes["gen_ai.usage.input_tokens"] == 9
    assert span.attributes["gen_ai.usage.output_tokens"] == 8
    latency = {name.rpartition(".")[2]: value for name, value in span.attributes.items() if ".latency." in name}
    assert latency["time_in_queue"] + latency["time_in_model_inference"] == pytest.approx(latency["e2e"])
    prefill, decode = latency["time_in_model_prefill"], latency["time_in_model_decode"]
    assert prefill + decode == pytest.approx(latency["time_in_model_inference"])
    assert latency["time_in_queue"] + prefill == pytest.approx(latency["time_to_first_token"])
    assert dict(spans[1].events)["scheduled"] == {"quire.cached_tokens": 8}


@pytest.mark.parametrize("scheduler", [{"preemption_mode": "swap"}], indirect=True)
async def test_a_preemption_and_what_follows_are_events(scheduler, stream, collector) -> None:
    submits = [traced_submit(handle, prompt_len=4, max_tokens=20) for handle in (1, 2)]
    for submit, _, _ in submits:
        await stream.submit(submit)
    await stream.read_until_over(1, 2)
    spans = [await span_of(collector, trace_id) for _, trace_id, _ in submits]
    preempted = [span for span in spans if span.attributes["quire.preemptions"]]
    assert preempted
    for span in preempted:
        names = span.event_names
        count = span.attributes["quire.preemptions"]
        assert names.count("preempted") == names.count("resumed") == count
        assert names.index("preempted") < names.index("resumed")
        assert [details for name, details in span.events if name == "preempted"] == [
            {"quire.preemption.mode": "swap"}
        ] * count


async def test_a_request_that_fails_or_is_refused_says_why(stream, collector) -> None:
    failing, failed_trace, _ = traced_submit(13)
    long, refused_trace, parent = traced_submit(7, prompt_len=100)
    await stream.submit(failing)
    await stream.submit(long)
    await stream.read_until_over(13, 7)
    span = await span_of(collector, failed_trace)
    assert (span.status, span.attributes["quire.outcome"]) == (ERROR, "failed")
    assert span.attributes["error.type"] == stream.failed[13].reason
    span = await span_of(collector, refused_trace)
    assert (span.parent_id, span.attributes["quire.outcome"]) == (parent, "refused")
    assert span.attributes["error.type"] == "NEVER_FITS"


async def test_aborted_requests_tell_how_far_they_came_and_one_ends_with_its_last_sequence(
    scheduler, stream, collector, worker
) -> None:
    worker.hang.set()
    first, first_trace, _ = traced_submit(1, prompt_len=20, max_tokens=4, n=2)
    second, second_trace, _ = traced_submit(2, prompt_len=30, max_tokens=4)
    await stream.submit(first)
    await until_true(lambda: worker.num_steps)
    await stream.submit(second)
    await stream.abort(2)
    span = await span_of(collector, second_trace)
    assert (span.event_names, span.attributes["quire.outcome"]) == (["queued"], "aborted")
    assert "gen_ai.latency.time_in_queue" not in span.attributes
    for index in (0, 1):
        await stream.abort(1, sequence_index=index)
    span = await span_of(collector, first_trace)
    assert (span.event_names, span.attributes["quire.outcome"]) == (["queued", "scheduled"], "aborted")
    await wait_nothing_in_use(scheduler)


async def test_a_scheduler_that_stops_sends_what_it_knows_of_live_requests(worker, tmp_path, collector) -> None:
    endpoint = collector.endpoint
    async with attached_scheduler(tmp_path, worker.address, otlp_traces_endpoint=endpoint) as stub:
        stream, _ = await GatewayStream.open(stub, grace_period_ms=60_000)
        worker.hang.set()
        submit, trace_id, _ = traced_submit(1)
        await stream.submit(submit)
        await until_true(lambda: worker.num_steps)
    worker.hang.clear()
    span = await span_of(collector, trace_id)
    assert (span.event_names, span.attributes["quire.outcome"]) == (["queued", "scheduled"], "left")
