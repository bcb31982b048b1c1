"""The standard health service (grpc.health.v1) of a server whose services all share one state.

The servicer that comes with grpcio keeps Watch streams open while the server stops, so that each stop with a watcher
would take its whole grace period. This one ends them.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.rpc.errors import NotFound, Unavailable

SERVICE_NAME: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """Answers for "" (the server as a whole) and each named service; NOT_SERVING at first."""

    def __init__(self, service_names: Sequence[str]) -> None:
        self._service_names = ("", *service_names)
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """What all answers say from now on."""
        self._serving = serving
        self._announce()

    def close(self) -> None:
        """Says NOT_SERVING for good and ends all Watch streams."""
        self._closed = True
        self.set_serving(False)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._service_names:
            raise NotFound(f'no service "{request.service}" here', reason="UNKNOWN_SERVICE")
        return _Response(status=self._status_of(request.service))

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last: int | None = None
        while True:
            changed = self._changed
            status = self._status_of(request.service)
            if status != last:
                last = status
                yield _Response(status=status)
            if self._closed:
                raise Unavailable("the server shuts down", reason="SHUTTING_DOWN")
            await changed.wait()

    def _status_of(self, service: str) -> _Response.ServingStatus:
        if service not in self._service_names:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if self._serving else _Response.NOT_SERVING

    def _announce(self) -> None:
        announced, self._changed = self._changed, asyncio.Event()
        announced.set()
