"""A tracer whose spans stay in memory."""

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from quire.tracing.otlp import make_tracer


class MemoryTraces:
    """`tracer` writes spans; ended ones are read once, after which it takes no more."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.tracer = make_tracer("test", self._exporter)

    def close(self) -> list[ReadableSpan]:
        """All spans, in order of their ends."""
        self.tracer.close()
        return list(self._exporter.get_finished_spans())
