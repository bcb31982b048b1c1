"""An OTLP collector: takes spans over real gRPC, and lets a test wait for the spans that it wants."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span


@dataclass(frozen=True)
class CollectedSpan:
    """A span, and the service that sent it. Ids are hexadecimal; a root's parent is empty."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    status: int
    start_ns: int
    end_ns: int
    attributes: dict[str, Any]
    events: list[tuple[str, dict[str, Any]]]
    linked_traces: list[str]

    @classmethod
    def of(cls, span: Span, service: str) -> "CollectedSpan":
        return cls(
            service,
            span.name,
            span.trace_id.hex(),
            span.span_id.hex(),
            span.parent_span_id.hex(),
            span.status.code,
            span.start_time_unix_nano,
            span.end_time_unix_nano,
            _values(span.attributes),
            [(event.name, _values(event.attributes)) for event in span.events],
            [link.trace_id.hex() for link in span.links],
        )

    @property
    def event_names(self) -> list[str]:
        return [name for name, _ in self.events]


@dataclass
class TraceCollector(trace_service_pb2_grpc.TraceServiceServicer):
    """`address` is the collector's address, and `spans` are the spans so far."""

    address: str = ""
    spans: list[CollectedSpan] = field(default_factory=list)
    metadata: list[dict[str, Any]] = field(default_factory=list)
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def endpoint(self) -> str:
        return f"http://{self.address}"

    async def Export(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self.metadata.append(dict(context.invocation_metadata() or ()))
        for resource_spans in request.resource_spans:
            service = _values(resource_spans.resource.attributes)["service.name"]
            for scope_spans in resource_spans.scope_spans:
                self.spans += [CollectedSpan.of(span, service) for span in scope_spans.spans]
        self._news.set()
        return trace_service_pb2.ExportTraceServiceResponse()

    async def until(self, found: Callable[[list[CollectedSpan]], Any], timeout_s: float = 30) -> Any:
        """The first true value of `found` for the spans."""
        async with asyncio.timeout(timeout_s):
            while not (value := found(self.spans)):
                self._news.clear()
                await self._news.wait()
        return value

    async def trace(self, trace_id: str, num_spans: int) -> dict[str, CollectedSpan]:
        """The spans of a trace by service, once there are `num_spans` of them."""
        spans = await self.until(lambda spans: _enough([s for s in spans if s.trace_id == trace_id], num_spans))
        return {span.service: span for span in spans}


@contextlib.asynccontextmanager
async def trace_collector(credentials: grpc.ServerCredentials | None = None) -> AsyncIterator[TraceCollector]:
    """A collector on loopback, with TLS if it is given credentials."""
    collector = TraceCollector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    collector.address = f"127.0.0.1:{port}"
    try:
        yield collector
    finally:
        await server.stop(0)


def _enough(spans: list[CollectedSpan], num_spans: int) -> list[CollectedSpan] | None:
    return spans if len(spans) >= num_spans else None


def _values(attributes: Any) -> dict[str, Any]:
    return {attribute.key: _value(attribute.value) for attribute in attributes}


def _value(value: AnyValue) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_value(each) for each in value.array_value.values]
    return None if kind is None else getattr(value, kind)
