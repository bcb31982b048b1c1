"""Distributed traces: what the services use to write spans, whoever takes them.

Importing this package imports nothing of OpenTelemetry; `open_tracer` does, where an endpoint is configured.
"""

from quire.tracing.context import TraceContext
from quire.tracing.endpoint import check_installed, open_tracer, parse_endpoint
from quire.tracing.spans import AttributeValue, Span, Tracer

__all__ = ["AttributeValue", "Span", "TraceContext", "Tracer", "check_installed", "open_tracer", "parse_endpoint"]
