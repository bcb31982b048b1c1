"""Sends spans and metrics by OTLP. The only module that imports OpenTelemetry's SDK and exporter.

OpenTelemetry's variables set everything without a flag: sampler, headers, certificates, queue, resource.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from opentelemetry.exporter.otlp.proto.grpc.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import MetricExportResult, MetricsData, PeriodicExportingMetricReader
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult

from quire.runtime import entropy
from quire.tracing.spans import Tracer
from quire.version import VERSION

_CLOSE_TIMEOUT_S = 2.0
_logger = logging.getLogger(__name__)


def make_tracer(service: str, exporter: SpanExporter) -> Tracer:
    """A tracer whose spans a thread sends in batches. Its queue is bounded: further spans are dropped."""
    # A provider of our own, never the process's: libraries that look for that one would write spans, too.
    provider = TracerProvider(
        resource=_resource_of(service),
        shutdown_on_exit=False,
        # Events are rare, and links rarer; the default limits hold for both.
        span_limits=SpanLimits(max_span_attribute_length=1024),
    )
    provider.add_span_processor(BatchSpanProcessor(exporter))

    def close() -> None:
        # The exporter would retry a lost collector for much longer.
        giving_up = threading.Timer(_CLOSE_TIMEOUT_S, exporter.shutdown)
        giving_up.daemon = True
        giving_up.start()
        provider.shutdown()
        giving_up.cancel()

    return Tracer(provider.get_tracer("quire", VERSION), close)


def make_meter(service: str, endpoint: str) -> tuple[Meter, Callable[[], None]]:
    """A meter whose values a thread sends, every 60 s or OTEL_METRIC_EXPORT_INTERVAL; and a function that sends the
    last values and ends the thread."""
    exporter = _MetricExporter(endpoint, insecure=urlsplit(endpoint).scheme == "http")
    exporter.reports = _Reports("metrics", endpoint)
    provider = MeterProvider([PeriodicExportingMetricReader(exporter)], _resource_of(service), shutdown_on_exit=False)
    return provider.get_meter("quire", VERSION), lambda: provider.shutdown(_CLOSE_TIMEOUT_S * 1000)


def open_exporter(endpoint: str) -> SpanExporter:
    """Sends to a collector's OTLP port over gRPC; the scheme says whether by TLS."""
    is_plain = urlsplit(endpoint).scheme == "http"
    return ReportingExporter(OTLPSpanExporter(endpoint, insecure=is_plain), endpoint)


class _Reports:
    """Logs once that a collector cannot be reached, and once that it is back. OpenTelemetry would log every failure."""

    def __init__(self, what: str, endpoint: str) -> None:
        self._what = what
        self._endpoint = endpoint
        self._is_failing = False

    def add(self, *, has_failed: bool) -> None:
        """The result of an export."""
        if has_failed and not self._is_failing:
            _logger.warning(
                "%s cannot be sent to %s; they are dropped until it accepts them", self._what, self._endpoint
            )
        elif self._is_failing and not has_failed:
            _logger.info("%s are sent to %s again", self._what, self._endpoint)
        self._is_failing = has_failed


class _MetricExporter(OTLPMetricExporter):
    reports: _Reports

    def export(self, metrics_data: MetricsData, timeout_millis: float = 10_000, **kwargs: object) -> MetricExportResult:
        result = super().export(metrics_data, timeout_millis, **kwargs)
        self.reports.add(has_failed=result is not MetricExportResult.SUCCESS)
        return result


class ReportingExporter(SpanExporter):
    """Logs once that a collector cannot be reached, and once that it is back.

    One thread at a time calls it, except for `shutdown`.
    """

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._reports = _Reports("traces", endpoint)
        self._is_shut_down = threading.Event()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        if self._is_shut_down.is_set():
            return SpanExportResult.FAILURE
        try:
            result = self._exporter.export(spans)
        except Exception:  # a closed channel, a wrong header: no request may notice
            _logger.debug("traces could not be sent", exc_info=True)
            result = SpanExportResult.FAILURE
        self._reports.add(has_failed=result is not SpanExportResult.SUCCESS)
        return result

    def shutdown(self) -> None:
        if not self._is_shut_down.is_set():
            self._is_shut_down.set()
            self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _resource_of(service: str) -> Resource:
    """The attributes of the process; OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have precedence."""
    ours = Resource(
        {
            SERVICE_NAME: f"quire-{service}",
            "service.namespace": "quire",
            "service.version": VERSION,
            "service.instance.id": str(entropy.random_uuid()),
        }
    )
    theirs = dict(Resource.create().attributes)
    if str(theirs.get(SERVICE_NAME, "")).startswith("unknown_service"):
        del theirs[SERVICE_NAME]
    return ours.merge(Resource(theirs))
