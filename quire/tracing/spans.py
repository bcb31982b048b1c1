"""Trace contexts as they travel in headers and messages, spans, and tracers, which start spans; without exporters.

Only spans import OpenTelemetry's API, by `propagation`: a service that sends no traces starts without it.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from opentelemetry.util.types import AttributeValue

if TYPE_CHECKING:
    from opentelemetry import trace

_TRACEPARENT, _TRACESTATE = "traceparent", "tracestate"


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The two headers of W3C Trace Context, as they came, unchecked. A span whose parent is malformed starts a trace of
    its own."""

    traceparent: str
    tracestate: str | None = None

    @classmethod
    def from_headers(cls, headers: Iterable[tuple[str, str]]) -> "TraceContext | None":
        """From headers with lower-case names. None without `traceparent`, or with several of them, which W3C says to
        ignore."""
        parents: list[str] = []
        states: list[str] = []
        for name, value in headers:
            if name == _TRACEPARENT:
                parents.append(value)
            elif name == _TRACESTATE:
                states.append(value)
        return cls(parents[0], ",".join(states) or None) if len(parents) == 1 else None


class Span:
    """One piece of work in a trace. No method waits, and none raises."""

    def __init__(self, span: "trace.Span") -> None:
        self._span = span
        self._has_ended = False

    @property
    def context(self) -> TraceContext:
        """The trace context for the processes that continue this span."""
        from quire.tracing import propagation

        carrier = propagation.headers_of(self._span)
        return TraceContext(carrier[_TRACEPARENT], carrier.get(_TRACESTATE))

    @property
    def is_recording(self) -> bool:
        """False for a span that is not sampled, whose attributes and events go nowhere."""
        return self._span.is_recording()

    def set(self, attributes: Mapping[str, AttributeValue]) -> None:
        self._span.set_attributes(attributes)

    def event(self, name: str, at_ns: int, attributes: Mapping[str, AttributeValue] | None = None) -> None:
        """Something that happened at a time, in nanoseconds since 1970."""
        self._span.add_event(name, attributes, at_ns)

    def link(self, context: TraceContext) -> None:
        """Names a span of another trace that belongs to this one; does nothing for a malformed context."""
        from quire.tracing import propagation

        linked = propagation.span_of(_headers(context)).get_span_context()
        if linked.is_valid:
            self._span.add_link(linked)

    def fail(self, description: str) -> None:
        """Marks it as failed by a fault of the server."""
        from opentelemetry.trace import StatusCode

        self._span.set_status(StatusCode.ERROR, description)

    def end(self) -> None:
        """Ends it; it is sent soon. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._span.end()


class Tracer:
    """Starts the spans of one service."""

    def __init__(self, tracer: "trace.Tracer", close: Callable[[], None]) -> None:
        self._tracer = tracer
        self._close = close

    def start(self, name: str, parent: TraceContext | None, attributes: Mapping[str, AttributeValue]) -> Span:
        """A span of another process's request. Without a parent, or with a malformed one, it begins a trace."""
        from quire.tracing import propagation

        return Span(propagation.start_span(self._tracer, name, _headers(parent), attributes))

    def close(self) -> None:
        """Sends finished spans, for two seconds at most, and drops the rest. Blocks."""
        self._close()


def _headers(context: TraceContext | None) -> dict[str, str]:
    if context is None:
        return {}
    state = {} if context.tracestate is None else {_TRACESTATE: context.tracestate}
    return {_TRACEPARENT: context.traceparent} | state
