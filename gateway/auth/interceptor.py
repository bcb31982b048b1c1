"""Authentication of gRPC calls: no method is reached without a key, but those that are named here."""

import functools
from collections.abc import Awaitable, Callable, Collection
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from gateway.auth.caller import set_caller
from gateway.auth.keys import Authenticator
from quire.rpc.errors import PermissionDenied, QuireError
from quire.rpc.health import REFLECTION_SERVICES

_HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"]
# Load balancers and supervisors ask these, and they have no keys.
OPEN_METHODS = frozenset(f"/{_HEALTH.full_name}/{method.name}" for method in _HEALTH.methods)


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls without a valid key before any of their messages is read, and says who the others come from.

    Methods of services that are not named are refused with a key, too: whoever adds a service has to name it.
    """

    def __init__(
        self, authenticator: Authenticator, service_names: Collection[str], on_refusal: Callable[[str], None]
    ) -> None:
        """Keys are good for `service_names` and reflection; `on_refusal` gets the reason of each refusal."""
        self._authenticator = authenticator
        self._service_names = {*service_names, *REFLECTION_SERVICES}
        self._on_refusal = on_refusal

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        method: str = handler_call_details.method
        if method in OPEN_METHODS:
            return await continuation(handler_call_details)
        shown = [value for name, value in handler_call_details.invocation_metadata or () if name == "authorization"]
        try:
            caller = self._authenticator.authenticate(shown)
            handler = await continuation(handler_call_details)
            # An unknown method stays what gRPC makes of it: some clients try several.
            if handler is not None:
                self._check_named(method)
        except QuireError as error:
            self._on_refusal(error.reason)
            return _refusing(error)
        # A call has a task of its own, in which this runs as well as its handler.
        set_caller(caller)
        return handler

    def _check_named(self, method: str) -> None:
        if method.rpartition("/")[0].removeprefix("/") not in self._service_names:
            raise PermissionDenied(f"no API key is good for {method}", reason="METHOD_NOT_ALLOWED")


def _refusing(error: QuireError) -> grpc.RpcMethodHandler:
    """Answers calls of any kind: a handler of streams reads no message before it answers."""
    return grpc.stream_stream_rpc_method_handler(functools.partial(_refuse, error))


async def _refuse(error: QuireError, messages: object, context: grpc.aio.ServicerContext) -> NoReturn:
    raise error
