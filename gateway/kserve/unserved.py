"""Methods that Triton has in the same service and this server does not: refused in words that help."""

from collections.abc import Mapping
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf.descriptor import ServiceDescriptor

from gateway.request.violations import shortened
from quire.rpc.errors import Unimplemented

_SHARED_MEMORY = "elements of tensors come and go in the messages"
_FIXED = "the model is the one that the server was started with"
_WAYS_OUT: Mapping[str, str] = {
    "RepositoryModelLoad": _FIXED,
    "RepositoryModelUnload": _FIXED,
    **{f"SystemSharedMemory{each}": _SHARED_MEMORY for each in ("Status", "Register", "Unregister")},
    **{f"CudaSharedMemory{each}": _SHARED_MEMORY for each in ("Status", "Register", "Unregister")},
}


class UnservedMethods(grpc.GenericRpcHandler):
    """Answers calls of the service that no other handler took; it is to be added after those."""

    def __init__(self, service: ServiceDescriptor) -> None:
        self._prefix = f"/{service.full_name}/"
        self._served = ", ".join(method.name for method in service.methods)

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler | None:
        method: str = handler_call_details.method
        if not method.startswith(self._prefix):
            return None
        name = method.removeprefix(self._prefix)
        way_out = _WAYS_OUT.get(name, f"the methods are {self._served}")

        async def refuse(request: bytes, context: grpc.aio.ServicerContext) -> NoReturn:
            raise Unimplemented(f"{shortened(name)} is not served here; {way_out}")

        return grpc.unary_unary_rpc_method_handler(refuse)
