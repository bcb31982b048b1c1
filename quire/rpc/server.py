"""A gRPC server as all services run it: health, reflection, error mapping, limits, keepalive, drain."""

from collections.abc import Callable, Sequence
from typing import Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from quire.rpc.address import AddressInUse, TcpAddress, UnixAddress, check_bindable, parse_address
from quire.rpc.admin import AdminServer
from quire.rpc.health_servicer import SERVICE_NAME as HEALTH_SERVICE_NAME
from quire.rpc.health_servicer import HealthServicer
from quire.rpc.interceptors import ErrorInterceptor
from quire.rpc.limits import ConnectionLimits
from quire.rpc.roles import RoleInterceptor
from quire.rpc.tls import ServerTls

__all__ = ["DEFAULT_MAX_MESSAGE_BYTES", "AddressInUse", "RpcServer"]

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
_NO_LIMITS = ConnectionLimits()


class RpcServer:
    """A running server, made by `start`. It serves at once; health says NOT_SERVING until `set_serving(True)`."""

    def __init__(
        self, server: grpc.aio.Server, address: str, health: HealthServicer, admin: AdminServer | None
    ) -> None:
        self.address = address
        self.admin = admin
        self._server = server
        self._health = health

    @classmethod
    async def start(
        cls,
        address: str,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        reuse_port: bool = False,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: ServerTls | None = None,
        limits: ConnectionLimits = _NO_LIMITS,
        admin_port: int | None = None,
    ) -> Self:
        """Listens and serves.

        Args:
            address: "HOST:PORT" (port 0 picks a free one) or "unix:PATH".
            register: Adds the servicers to the server.
            service_names: Full names of those services, for health and reflection.
            max_message_bytes: Larger requests are refused with RESOURCE_EXHAUSTED. Answers have no limit.
            reuse_port: Several processes share the port, and the kernel spreads connections over them.
            admin_port: Where to show this process's connections by channelz, on loopback; 0 picks a free port.
            tls: How to encrypt a TCP address, and who may call; a unix socket is never encrypted.
            limits: How much connections may take.
            interceptors: See calls of all services before their handlers do, health included; the first one first.

        Raises:
            AddressInUse: another process listens there.
            ConfigurationError: the address is malformed or cannot be bound.
        """
        wanted = parse_address(address)
        check_bindable(wanted, reuse_port=reuse_port)
        admin = None if admin_port is None else await AdminServer.start(admin_port)
        try:
            server = grpc.aio.server(
                interceptors=(ErrorInterceptor(), *_role_interceptors(wanted, tls), *interceptors),
                options=[
                    *_options(max_message_bytes, reuse_port=reuse_port, is_watched=admin_port is not None),
                    *limits.options(),
                ],
            )
            register(server)
            health = HealthServicer(service_names)
            health_pb2_grpc.add_HealthServicer_to_server(health, server)
            reflected = (*service_names, HEALTH_SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(reflected, server)
            port = _bind(server, wanted, tls)
            await server.start()
        except BaseException:
            if admin is not None:
                await admin.stop()
            raise
        bound = TcpAddress(wanted.host, port) if isinstance(wanted, TcpAddress) else wanted
        return cls(server, str(bound), health, admin)

    def set_serving(self, serving: bool) -> None:
        """What health answers from now on, for the server as a whole and for each service."""
        self._health.set_serving(serving)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running ones `grace_s` seconds, cancels the rest. Idempotent."""
        self._health.close()
        await self._server.stop(grace_s)
        if self.admin is not None:
            await self.admin.stop()


def _bind(server: grpc.aio.Server, address: TcpAddress | UnixAddress, tls: ServerTls | None) -> int:
    """The port that the server has then."""
    try:
        if tls is None or not isinstance(address, TcpAddress):
            return server.add_insecure_port(str(address))
        return server.add_secure_port(str(address), tls.credentials())
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {address}: the port is in use") from error


def _role_interceptors(address: TcpAddress | UnixAddress, tls: ServerTls | None) -> list[RoleInterceptor]:
    if tls is None or tls.roles is None or not isinstance(address, TcpAddress):
        return []
    return [RoleInterceptor(tls.roles)]


def _options(max_message_bytes: int, *, reuse_port: bool, is_watched: bool) -> list[tuple[str, int]]:
    return [
        ("grpc.enable_channelz", int(is_watched)),
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # A client may ping every 5 s while a long unary call or an idle channel has nothing to say.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
        # Clients that vanished without a word are noticed and their requests aborted.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]
