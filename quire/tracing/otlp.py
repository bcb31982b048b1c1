"""Tracing by OpenTelemetry. Nothing else here imports it."""

import logging
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Self
from urllib.parse import urlsplit

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from quire.tracing.context import TRACEPARENT, TRACESTATE, TraceContext
from quire.tracing.spans import AttributeValue, Span
from quire.version import VERSION

_CLOSE_TIMEOUT_S = 2.0
_PROPAGATOR = TraceContextTextMapPropagator()
_logger = logging.getLogger(__name__)


class OtlpTracer:
    """A service's spans, sent in batches by a thread of their own. Its queue is bounded: what does not fit is dropped.

    OpenTelemetry's variables hold for what has no flag: sampler, headers, certificates, queue, resource.
    """

    def __init__(self, service: str, exporter: SpanExporter) -> None:
        self._exporter = exporter
        # Of our own and never the process's: libraries that look for that one would write spans, too.
        self._provider = TracerProvider(
            resource=_resource_of(service),
            shutdown_on_exit=False,
            # Events are rare, and links rarer; the default limits hold for both.
            span_limits=SpanLimits(max_span_attribute_length=1024),
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("quire", VERSION)

    @classmethod
    def open(cls, endpoint: str, service: str) -> Self:
        """Sends to a collector's OTLP port over gRPC; the scheme says whether by TLS."""
        is_plain = urlsplit(endpoint).scheme == "http"
        return cls(service, ReportingExporter(OTLPSpanExporter(endpoint, insecure=is_plain), endpoint))

    def start(self, name: str, parent: TraceContext | None, attributes: Mapping[str, AttributeValue]) -> Span:
        context = trace.set_span_in_context(_span_of(parent))
        return _OtlpSpan(self._tracer.start_span(name, context, kind=trace.SpanKind.SERVER, attributes=attributes))

    def close(self) -> None:
        # A collector that is gone would be tried for much longer.
        giving_up = threading.Timer(_CLOSE_TIMEOUT_S, self._exporter.shutdown)
        giving_up.daemon = True
        giving_up.start()
        self._provider.shutdown()
        giving_up.cancel()


class _OtlpSpan:
    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._has_ended = False

    @property
    def context(self) -> TraceContext:
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
        return TraceContext(carrier[TRACEPARENT], carrier.get(TRACESTATE))

    @property
    def is_recording(self) -> bool:
        return self._span.is_recording()

    def set(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, at_ns: int, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        self._span.add_event(name, attributes, at_ns)

    def link(self, context: TraceContext) -> None:
        linked = _span_of(context).get_span_context()
        if linked.is_valid:
            self._span.add_link(linked)

    def fail(self, description: str) -> None:
        self._span.set_status(trace.StatusCode.ERROR, description)

    def end(self) -> None:
        if not self._has_ended:
            self._has_ended = True
            self._span.end()


class ReportingExporter(SpanExporter):
    """Says once that a collector cannot be reached, and once that it is back. Called by one thread at a time, but for
    `shutdown`."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._is_failing = False
        self._is_shut_down = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_shut_down.is_set():
            return SpanExportResult.FAILURE
        result = self._export(spans)
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            _logger.warning("traces cannot be sent to %s; they are dropped until it takes them", self._endpoint)
        elif self._is_failing and not is_failing:
            _logger.info("traces are sent to %s again", self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down.is_set():
            self._is_shut_down.set()
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        try:
            return self._exporter.export(spans)
        except Exception:  # whatever a closed channel or a wrong header makes of it, no request is to notice
            _logger.debug("traces could not be sent", exc_info=True)
            return SpanExportResult.FAILURE


def _resource_of(service: str) -> Resource:
    """What the spans' process is; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES win."""
    ours = Resource(
        {
            SERVICE_NAME: f"quire-{service}",
            "service.namespace": "quire",
            "service.version": VERSION,
            "service.instance.id": str(uuid.uuid4()),
        }
    )
    theirs = dict(Resource.create().attributes)
    if str(theirs.get(SERVICE_NAME, "")).startswith("unknown_service"):
        del theirs[SERVICE_NAME]
    return ours.merge(Resource(theirs))


def _span_of(context: TraceContext | None) -> trace.Span:
    """The span that a context names; an invalid one where it names none, and never the one that happens to be current
    in this task."""
    if context is None:
        return trace.INVALID_SPAN
    carrier = {TRACEPARENT: context.traceparent}
    if context.tracestate is not None:
        carrier[TRACESTATE] = context.tracestate
    return trace.get_current_span(_PROPAGATOR.extract(carrier, trace.set_span_in_context(trace.INVALID_SPAN)))
