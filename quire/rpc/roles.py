"""Who may call a service under mutual TLS, by the role that the caller's certificate names."""

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
import grpc.aio

from quire.rpc.errors import PermissionDenied
from quire.rpc.interceptors import Behavior, is_generator, remake
from quire.rpc.tls import ROLE_URI, Role

_HEALTH = "/grpc.health.v1.Health/"


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every method but health to callers of other roles: PERMISSION_DENIED, reason WRONG_ROLE."""

    def __init__(self, roles: Collection[Role]) -> None:
        self._roles = frozenset(roles)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(_HEALTH):
            return handler
        return remake(handler, self._guarded, request_deserializer=handler.request_deserializer)

    def _guarded(self, behavior: Behavior) -> Behavior:
        if is_generator(behavior):

            async def generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                self._check(context)
                responses = behavior(request, context)
                try:
                    async for response in responses:
                        yield response
                finally:
                    await responses.aclose()

            return generator

        async def coroutine(request: Any, context: grpc.aio.ServicerContext) -> Any:
            self._check(context)
            return await behavior(request, context)

        return coroutine

    def _check(self, context: grpc.aio.ServicerContext) -> None:
        shown = roles_of(context.auth_context())
        if not self._roles & shown:
            wanted, had = " or ".join(sorted(self._roles)), ", ".join(sorted(shown)) or "no role"
            raise PermissionDenied(f"this is for {wanted}; the caller's certificate names {had}", reason="WRONG_ROLE")


def roles_of(auth_context: Any) -> frozenset[Role]:
    """The roles that a peer's certificate names, as gRPC's authentication context has it."""
    names = {
        name.decode(errors="replace")
        for property_name in ("x509_subject_alternative_name", "x509_uri")
        for name in auth_context.get(property_name, ())
    }
    shown = {name.removeprefix(ROLE_URI) for name in names if name.startswith(ROLE_URI)}
    return frozenset(role for role in Role if role in shown)
