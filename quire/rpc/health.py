"""The standard services of every server: health (grpc.health.v1), reflection, and channelz on a separate port."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from functools import cached_property
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from quire.rpc.errors import NotFound, Unavailable

HEALTH_SERVICE: str = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION_SERVICES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)
"""The newer version, which tools try first, and the older. Their messages are the same."""

_Response = health_pb2.HealthCheckResponse


class HealthServicer(health_pb2_grpc.HealthServicer):
    """The health of a server whose services all share one state: "" (the server as a whole) and each named service.
    NOT_SERVING at first.

    The servicer of grpcio keeps Watch streams open while the server stops, so that each stop with a watcher takes its
    whole grace period. This one ends them.
    """

    def __init__(self, service_names: Sequence[str]) -> None:
        self._service_names = ("", *service_names)
        self._serving = False
        self._closed = False
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Sets the status of all later answers."""
        self._serving = serving
        announced, self._changed = self._changed, asyncio.Event()
        announced.set()

    def close(self) -> None:
        """Says NOT_SERVING for good and ends all Watch streams."""
        self._closed = True
        self.set_serving(False)

    async def Check(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._service_names:
            raise NotFound(f'no service "{request.service}" here', reason="UNKNOWN_SERVICE")
        return _Response(status=self._status_of(request.service))

    async def Watch(  # noqa: N802
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

    def _status_of(self, service: str) -> _Response.ServingStatus:  # pyrefly: ignore[not-a-type]
        if service not in self._service_names:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if self._serving else _Response.NOT_SERVING


class _Pool:
    """A pool of descriptors that finds the file of a method too, as the protocol wants it; protobuf's own does not. It
    also has the newer version of reflection, whose generated code grpcio-reflection lacks."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    @cached_property
    def _reflection(self) -> DescriptorPool:
        """Made at its first use: it takes 6 ms, and few callers of a server need it."""
        older = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(older)
        older.name = "grpc/reflection/v1alpha/reflection.proto"
        newer = text_format.MessageToString(older).replace("v1alpha", "v1")
        made = DescriptorPool()
        made.Add(text_format.Parse(newer, FileDescriptorProto()))
        return made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileByName(self, name: str) -> FileDescriptor:  # noqa: N802  (the pool's name for it)
        is_reflection = name.startswith("grpc/reflection/v1/")
        return (self._reflection if is_reflection else self._pool).FindFileByName(name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802
        if symbol.startswith("grpc.reflection.v1."):
            # A method of a service is found by the name of the service.
            return self._reflection.FindFileContainingSymbol(symbol.removesuffix(".ServerReflectionInfo"))
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            found = self._pool.FindServiceByName(service)
            if method not in found.methods_by_name:
                raise
            return found.file


def add_reflection(service_names: Sequence[str], server: grpc.aio.Server) -> None:
    """Server reflection of these services and of itself, by either version of the protocol."""
    pool = cast(DescriptorPool, _Pool(descriptor_pool.Default()))
    names = (*service_names, *REFLECTION_SERVICES)
    reflection.enable_server_reflection(names, server, pool=pool)
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    answer = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": answer}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_SERVICES[0], handlers),))
