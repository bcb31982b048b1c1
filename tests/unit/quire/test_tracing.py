"""Traces: their endpoints, the contexts that they continue, and the effect of none."""

import logging
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gateway.settings import GatewaySettings
from quire.rpc.tls import Role
from quire.runtime.settings import ConfigurationError, load_settings
from quire.tracing import TraceContext, open_tracer, parse_endpoint
from quire.tracing.otlp import ReportingExporter, make_tracer
from quire_cli.supervisor.server import check_servable
from quire_cli.supervisor.settings import ServeSettings
from scheduler_svc.settings import SchedulerSettings
from tests.support.certificates import make_certificates
from tests.support.trace_collector import trace_collector
from tests.support.tracing import MemoryTraces
from worker_svc.settings import WorkerSettings

ALL_SETTINGS = (GatewaySettings, SchedulerSettings, WorkerSettings, ServeSettings)
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = TraceContext(f"00-{TRACE_ID}-{SPAN_ID}-01")


class StubbornExporter(SpanExporter):
    """Fails, succeeds or blocks as the test says."""

    def __init__(self) -> None:
        self.result: SpanExportResult | Exception = SpanExportResult.SUCCESS
        self.is_shut_down = threading.Event()
        self.num_batches = 0
        self.blocks = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.num_batches += 1
        if self.blocks:
            self.is_shut_down.wait(30)
        if isinstance(self.result, Exception):
            raise self.result
        return self.result

    def shutdown(self) -> None:
        self.is_shut_down.set()


# Endpoints


WRONG_ENDPOINTS = [
    "localhost:4317",
    "grpc://localhost:4317",
    "http://:4317",
    "http://localhost",
    "http://localhost:99999",
    "http://localhost:4318/v1/traces",
    "http://user:secret@localhost:4317",
]


def test_an_endpoint_is_taken_as_it_is_or_refused() -> None:
    for text in ("http://localhost:4317", "https://collector.example:443", "http://[::1]:4317"):
        assert parse_endpoint(text) == parse_endpoint(f"{text}/") == text
    for text in WRONG_ENDPOINTS:
        with pytest.raises(ValueError):
            parse_endpoint(text)
    for cls in ALL_SETTINGS:
        with pytest.raises(ConfigurationError, match=r"^--otlp-traces-endpoint: "):
            load_settings(cls, ["--otlp-traces-endpoint=collector"], {}, program="q")
        given = load_settings(cls, [], {"QUIRE_OTLP_TRACES_ENDPOINT": "http://c:4317"}, program="q")
        assert given.otlp_traces_endpoint == "http://c:4317"


def test_without_an_endpoint_there_is_no_tracer_and_without_the_package_an_error_that_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert open_tracer(None, "gateway") is None
    monkeypatch.delitem(sys.modules, "quire.tracing.otlp")
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(ConfigurationError, match=r"^--otlp-traces-endpoint needs .* install quire-llm\[tracing\]$"):
        open_tracer("http://localhost:4317", "gateway")
    with pytest.raises(ConfigurationError, match=r"quire-llm\[tracing\]"):
        check_servable(ServeSettings(otlp_traces_endpoint="http://localhost:4317"))


# Contexts


def test_a_span_continues_the_trace_that_it_is_given_and_links_to_another() -> None:
    traces = MemoryTraces()
    span = traces.tracer.start("work", TraceContext(PARENT.traceparent, "vendor=1"), {"a": 1})
    assert span.is_recording
    assert span.context.traceparent.startswith(f"00-{TRACE_ID}-")
    assert span.context.tracestate == "vendor=1"
    other = TraceContext(f"00-{'1' * 32}-{SPAN_ID}-01")
    span.link(other)
    span.end()
    span.end()
    (ended,) = traces.close()
    assert [f"{link.context.trace_id:032x}" for link in ended.links] == ["1" * 32]
    assert ended.parent is not None
    assert f"{ended.parent.span_id:016x}" == SPAN_ID
    assert ended.resource.attributes["service.name"] == "quire-test"


@pytest.mark.parametrize(
    "traceparent",
    [
        "",
        "\u00e9",
        f"00-{'0' * 32}-{SPAN_ID}-01",
        f"ff-{TRACE_ID}-{SPAN_ID}-01",
        f"00-{TRACE_ID}-{SPAN_ID}",
        "x" * 100_000,
    ],
)
def test_a_malformed_context_begins_a_trace_and_links_nothing(traceparent: str) -> None:
    traces = MemoryTraces()
    span = traces.tracer.start("work", TraceContext(traceparent), {})
    span.link(TraceContext(traceparent))
    span.end()
    (ended,) = traces.close()
    assert (ended.parent, list(ended.links)) == (None, [])


def test_an_unsampled_context_is_followed_and_handed_on() -> None:
    traces = MemoryTraces()
    span = traces.tracer.start("work", TraceContext(f"00-{TRACE_ID}-{SPAN_ID}-00"), {})
    assert not span.is_recording
    assert span.context.traceparent.startswith(f"00-{TRACE_ID}-")
    assert span.context.traceparent.endswith("-00")
    span.end()
    assert traces.close() == []


def test_headers_name_a_context_if_one_alone_names_a_parent() -> None:
    assert TraceContext.from_headers([("host", "x")]) is None
    assert TraceContext.from_headers([("tracestate", "a=1")]) is None
    assert TraceContext.from_headers([("traceparent", "a"), ("traceparent", "b")]) is None
    both = [("tracestate", "a=1"), ("traceparent", "p"), ("tracestate", "b=2")]
    assert TraceContext.from_headers(both) == TraceContext("p", "a=1,b=2")


def test_the_names_of_opentelemetrys_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "mine")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment.name=test")
    traces = MemoryTraces()
    traces.tracer.start("work", None, {}).end()
    attributes = traces.close()[0].resource.attributes
    assert (attributes["service.name"], attributes["deployment.environment.name"]) == ("mine", "test")


# Collectors


def test_a_collector_that_fails_is_told_of_once_and_once_when_it_is_back(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    inner = StubbornExporter()
    exporter = ReportingExporter(inner, "http://c:4317")
    for result in (SpanExportResult.FAILURE, ValueError("closed"), SpanExportResult.FAILURE):
        inner.result = result
        assert exporter.export(()) is SpanExportResult.FAILURE
    inner.result = SpanExportResult.SUCCESS
    exporter.export(())
    exporter.export(())
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]
    assert all("http://c:4317" in record.message for record in caplog.records)


def test_closing_gives_up_on_a_collector_that_does_not_answer() -> None:
    inner = StubbornExporter()
    inner.blocks = True
    tracer = make_tracer("test", ReportingExporter(inner, "http://c:4317"))
    for _ in range(2000):
        tracer.start("work", None, {}).end()
    tracer.close()
    assert inner.is_shut_down.is_set()
    # The remaining spans were dropped, not retried batch by batch.
    assert inner.num_batches == 1


async def test_https_encrypts_and_believes_the_authority_that_opentelemetrys_variable_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path)
    name = Role.GATEWAY.value
    pair = ((tmp_path / f"{name}.key").read_bytes(), (tmp_path / f"{name}.pem").read_bytes())
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_CERTIFICATE", str(tmp_path / "ca.pem"))
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    async with trace_collector(grpc.ssl_server_credentials([pair])) as collector:
        tracer = open_tracer(f"https://{collector.address}", "gateway")
        assert tracer is not None
        tracer.start("work", None, {}).end()
        assert [span.service for span in await collector.until(lambda spans: spans)] == ["quire-gateway"]
        tracer.close()


def test_a_variable_that_makes_no_sense_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "100000")
    with pytest.raises(ConfigurationError, match=r"^--otlp-traces-endpoint http://c:4317: "):
        open_tracer("http://c:4317", "gateway")
