"""Server reflection, as tools ask for it: by either version of the protocol, and for methods too."""

from collections.abc import Sequence
from typing import Any, cast

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2

SERVICE_NAMES = ("grpc.reflection.v1.ServerReflection", reflection.SERVICE_NAME)
"""The newer version, which tools ask for first, and the older. Their messages are the same."""


class _Pool:
    """A pool of descriptors that knows which file a method is in, as the protocol wants it; protobuf's own does not."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)

    def FindFileContainingSymbol(self, symbol: str) -> FileDescriptor:  # noqa: N802  (the pool's name for it)
        try:
            return self._pool.FindFileContainingSymbol(symbol)
        except KeyError:
            service, _, method = symbol.rpartition(".")
            found = self._pool.FindServiceByName(service)
            if method not in found.methods_by_name:
                raise
            return found.file


def add_reflection(service_names: Sequence[str], server: grpc.aio.Server) -> None:
    """Tells of these services, and of reflection itself."""
    pool = cast(DescriptorPool, _Pool(descriptor_pool.Default()))
    names = (*service_names, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server, pool=pool)
    servicer = reflection.aio.ReflectionServicer(names, pool=pool)
    answer = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = {"ServerReflectionInfo": answer}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAMES[0], handlers),))
