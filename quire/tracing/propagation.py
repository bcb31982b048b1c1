"""Spans of OpenTelemetry's API from the headers of W3C Trace Context, and back."""

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_PROPAGATOR = TraceContextTextMapPropagator()


def headers_of(span: trace.Span) -> dict[str, str]:
    """The headers for the processes that continue a span."""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
    return carrier


def span_of(headers: Mapping[str, str]) -> trace.Span:
    """The span that headers name; an invalid one if they name none, never the current span of this task."""
    outside = trace.set_span_in_context(trace.INVALID_SPAN)
    return trace.get_current_span(_PROPAGATOR.extract(headers, outside)) if headers else trace.INVALID_SPAN


def start_span(
    tracer: trace.Tracer, name: str, parent: Mapping[str, str], attributes: Mapping[str, AttributeValue]
) -> trace.Span:
    """A span of another process's request, whose headers are `parent`."""
    context = trace.set_span_in_context(span_of(parent))
    return tracer.start_span(name, context, kind=trace.SpanKind.SERVER, attributes=attributes)
