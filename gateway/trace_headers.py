"""Where a call belongs in a trace, by its headers. It travels with the call's task, as its caller does."""

from collections.abc import Awaitable, Callable
from contextvars import ContextVar
from typing import Any

import grpc
import grpc.aio
from starlette.types import ASGIApp, Receive, Scope, Send

from quire.tracing import TraceContext

_incoming: ContextVar[TraceContext | None] = ContextVar("trace context", default=None)


def incoming_context() -> TraceContext | None:
    """What the headers of the call that runs say; None where they say nothing, and outside of calls."""
    return _incoming.get()


class TraceInterceptor(grpc.aio.ServerInterceptor):
    """Reads the metadata of gRPC calls."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        metadata = handler_call_details.invocation_metadata or ()
        # A call has a task of its own, in which this runs as well as its handler.
        _incoming.set(TraceContext.from_headers((name, value) for name, value in metadata if isinstance(value, str)))
        return await continuation(handler_call_details)


class TraceMiddleware:
    """Reads the headers of HTTP requests."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
            _incoming.set(TraceContext.from_headers(headers))
        await self._app(scope, receive, send)
