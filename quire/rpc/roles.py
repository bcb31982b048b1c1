"""Who may call a service under mutual TLS, by the role that the caller's certificate names."""

import functools
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Mapping
from typing import Any

import grpc
import grpc.aio

from quire.rpc.address import TcpAddress, UnixAddress
from quire.rpc.errors import PermissionDenied
from quire.rpc.interceptors import Behavior, abort_with, is_generator, remake
from quire.rpc.tls import ROLE_URI, Role, ServerTls

_HEALTH = "/grpc.health.v1.Health/"


class RoleInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every method but health to callers of other roles: PERMISSION_DENIED, reason WRONG_ROLE.

    To come before ErrorInterceptor, which decodes: nothing of what a wrong caller sends is parsed.
    """

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
        guard = functools.partial(self._guarded, method=handler_call_details.method)
        return remake(handler, guard, request_deserializer=handler.request_deserializer)

    def _guarded(self, behavior: Behavior, *, method: str) -> Behavior:
        if is_generator(behavior):

            async def generator(request: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
                await self._check(context, method)
                responses = behavior(request, context)
                try:
                    async for response in responses:
                        yield response
                finally:
                    await responses.aclose()

            return generator

        async def coroutine(request: Any, context: grpc.aio.ServicerContext) -> Any:
            await self._check(context, method)
            return await behavior(request, context)

        return coroutine

    async def _check(self, context: grpc.aio.ServicerContext, method: str) -> None:
        shown = roles_of(context.auth_context())
        if not self._roles & shown:
            wanted, had = " or ".join(sorted(self._roles)), ", ".join(sorted(shown)) or "no role"
            message = f"this is for {wanted}; the caller's certificate names {had}"
            await abort_with(PermissionDenied(message, reason="WRONG_ROLE"), context, method)


def role_interceptors(address: TcpAddress | UnixAddress, tls: ServerTls | None) -> list[RoleInterceptor]:
    """What checks the callers of a server at this address, if anything does; callers of unix sockets show nothing."""
    if tls is None or tls.roles is None or not isinstance(address, TcpAddress):
        return []
    return [RoleInterceptor(tls.roles)]


def roles_of(auth_context: Any) -> frozenset[Role]:
    """The roles that a peer's certificate names, as gRPC's authentication context has it."""
    return roles_among(
        name.decode(errors="replace")
        for property_name in ("x509_subject_alternative_name", "x509_uri")
        for name in auth_context.get(property_name, ())
    )


def roles_of_certificate(certificate: Mapping[str, Any] | None) -> frozenset[Role]:
    """The roles that a peer's certificate names, as `ssl.SSLSocket.getpeercert` has it; none without one."""
    names = (certificate or {}).get("subjectAltName", ())
    return roles_among(name for kind, name in names if kind == "URI")


def roles_among(names: Iterable[str]) -> frozenset[Role]:
    """Those of a certificate's names that are roles."""
    shown = {name.removeprefix(ROLE_URI) for name in names if name.startswith(ROLE_URI)}
    return frozenset(role for role in Role if role in shown)
