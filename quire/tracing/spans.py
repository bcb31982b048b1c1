"""Trace contexts as they travel in headers and messages, spans, and tracers, which start spans; without exporters."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

_TRACEPARENT, _TRACESTATE = "traceparent", "tracestate"
_PROPAGATOR = TraceContextTextMapPropagator()


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

    def __init__(self, span: trace.Span) -> None:
        self._span = span
        self._has_ended = False

    @property
    def context(self) -> TraceContext:
        """The trace context for the processes that continue this span."""
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(self._span))
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
        linked = _span_of(context).get_span_context()
        if linked.is_valid:
            self._span.add_link(linked)

    def fail(self, description: str) -> None:
        """Marks it as failed by a fault of the server."""
        self._span.set_status(trace.StatusCode.ERROR, description)

    def end(self) -> None:
        """Ends it; it is sent soon. Idempotent."""
        if not self._has_ended:
            self._has_ended = True
            self._span.end()


class Tracer:
    """Starts the spans of one service."""

    def __init__(self, tracer: trace.Tracer, close: Callable[[], None]) -> None:
        self._tracer = tracer
        self._close = close

    def start(self, name: str, parent: TraceContext | None, attributes: Mapping[str, AttributeValue]) -> Span:
        """A span of another process's request. Without a parent, or with a malformed one, it begins a trace."""
        context = trace.set_span_in_context(_span_of(parent))
        return Span(self._tracer.start_span(name, context, kind=trace.SpanKind.SERVER, attributes=attributes))

    def close(self) -> None:
        """Sends finished spans, for two seconds at most, and drops the rest. Blocks."""
        self._close()


def _span_of(context: TraceContext | None) -> trace.Span:
    """The span that a context names; an invalid one if it names none, never the current span of this task."""
    if context is None:
        return trace.INVALID_SPAN
    carrier = {_TRACEPARENT: context.traceparent}
    if context.tracestate is not None:
        carrier[_TRACESTATE] = context.tracestate
    return trace.get_current_span(_PROPAGATOR.extract(carrier, trace.set_span_in_context(trace.INVALID_SPAN)))
