"""Traces in the messages of gateways."""

from quire.scheduler.v1 import scheduler_pb2
from quire.tracing import TraceContext


def trace_context_of(submit: scheduler_pb2.Submit) -> TraceContext | None:
    """The gateway's span of a request; None where it traces none."""
    if not submit.HasField("trace_context"):
        return None
    trace = submit.trace_context
    return TraceContext(trace.traceparent, trace.tracestate if trace.HasField("tracestate") else None)
