"""A gRPC server as all services run it: health, reflection, error mapping, limits, keepalive, drain."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Self

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from quire.rpc.address import AddressInUse, TcpAddress, UnixAddress, check_bindable, parse_address
from quire.rpc.admin import AdminServer
from quire.rpc.arrivals import Arrivals
from quire.rpc.health_servicer import SERVICE_NAME as HEALTH_SERVICE_NAME
from quire.rpc.health_servicer import HealthServicer
from quire.rpc.interceptors import ErrorInterceptor
from quire.rpc.limits import ConnectionLimits
from quire.rpc.listening import listening_at, start_all, stop_listening
from quire.rpc.reflection import add_reflection
from quire.rpc.roles import role_interceptors
from quire.rpc.tls import ServerTls

__all__ = ["DEFAULT_MAX_MESSAGE_BYTES", "UNLIMITED_MESSAGE_BYTES", "AddressInUse", "RpcServer"]

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
UNLIMITED_MESSAGE_BYTES = -1
"""But for what protobuf can hold, 2 GiB."""
_NO_LIMITS = ConnectionLimits()
_LONGEST_WAIT_FOR_A_PAUSE_S = 0.5


class RpcServer:
    """A running server, made by `start`. It serves at once; health says NOT_SERVING until `set_serving(True)`.

    Its local socket has a server of its own, which serves on when the port is handed over.
    """

    def __init__(
        self,
        servers: Sequence[grpc.aio.Server],
        address: str,
        arrivals: Arrivals,
        health: HealthServicer,
        admin: AdminServer | None,
        listeners: frozenset[int],
    ) -> None:
        self.address = address
        self.admin = admin
        self._servers = tuple(servers)
        self._arrivals = arrivals
        self._health = health
        self._listeners = listeners

    @classmethod
    async def start(
        cls,
        address: str,
        register: Callable[[grpc.aio.Server], None],
        service_names: Sequence[str],
        *,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        reuse_port: bool = False,
        local_socket: Path | None = None,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        tls: ServerTls | None = None,
        limits: ConnectionLimits = _NO_LIMITS,
        admin_port: int | None = None,
        admin_tls: ServerTls | None = None,
    ) -> Self:
        """Listens and serves.

        Args:
            address: "HOST:PORT" (port 0 picks a free one) or "unix:PATH".
            register: Adds the servicers to a server; called for each address.
            service_names: Full names of those services, for health and reflection.
            max_message_bytes: Larger requests are refused with RESOURCE_EXHAUSTED. Answers have no limit.
            reuse_port: Share the port with other processes, over which the kernel spreads connections.
            local_socket: A unix socket that leads to this process alone, also where the port is shared.
            interceptors: See calls of all services before their handlers do, health included; the first one first.
            tls: How to encrypt a TCP address, and who may call; a unix socket is never encrypted.
            limits: How much connections may take, those to `local_socket` counted apart.
            admin_port, admin_tls: Where to show channelz, on loopback, and to whom; port 0 picks a free one.

        Raises ConfigurationError: an address is malformed, in use (AddressInUse) or not ours, or files of TLS are bad.
        """
        wanted = _checked(address, local_socket, reuse_port=reuse_port)
        arrivals = Arrivals()
        guards = (arrivals, *role_interceptors(wanted[0], tls), ErrorInterceptor(), *interceptors)
        options = _options(max_message_bytes, limits, reuse_port=reuse_port, is_watched=admin_port is not None)
        servers = [grpc.aio.server(interceptors=guards, options=options) for _ in wanted]
        health = _add_services(servers, register, service_names)
        async with _admin_server(admin_port, admin_tls) as admin:
            bound, listeners = await _listen(servers, wanted, tls)
        return cls(servers, str(bound), arrivals, health, admin, listeners)

    def set_serving(self, serving: bool) -> None:
        """What health answers from now on, for the server as a whole and for each service."""
        self._health.set_serving(serving)

    async def hand_over(self, grace_s: float) -> None:
        """Leaves the port to those who share it: closes it between two calls, and has clients make their next ones over
        a new connection. Returns once the calls that came by it are over; after `grace_s` seconds it cancels them."""
        # First nobody new, then those who are told to connect anew: they must not reach this process again.
        stop_listening(self._listeners, parse_address(self.address))
        await self._arrivals.wait_for_a_pause(_LONGEST_WAIT_FOR_A_PAUSE_S)
        await self._servers[0].stop(grace_s)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running ones `grace_s` seconds, cancels the rest. Idempotent."""
        self._health.close()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        if self.admin is not None:
            await self.admin.stop()


def _checked(address: str, local_socket: Path | None, *, reuse_port: bool) -> list[TcpAddress | UnixAddress]:
    """All addresses to listen at, the main one first."""
    wanted = parse_address(address)
    check_bindable(wanted, reuse_port=reuse_port)
    if local_socket is None:
        return [wanted]
    local = UnixAddress(local_socket)
    check_bindable(local)
    return [wanted, local]


@contextlib.asynccontextmanager
async def _admin_server(port: int | None, tls: ServerTls | None) -> AsyncIterator[AdminServer | None]:
    """Runs on behind the block, and stops where the block fails."""
    admin = None if port is None else await AdminServer.start(port, tls)
    try:
        yield admin
    except BaseException:
        if admin is not None:
            await admin.stop()
        raise


def _add_services(
    servers: Sequence[grpc.aio.Server],
    register: Callable[[grpc.aio.Server], None],
    service_names: Sequence[str],
) -> HealthServicer:
    """Those of `register`, health and reflection, to each server. Returns what says how they are."""
    health = HealthServicer(service_names)
    for server in servers:
        register(server)
        health_pb2_grpc.add_HealthServicer_to_server(health, server)
        add_reflection((*service_names, HEALTH_SERVICE_NAME), server)
    return health


async def _listen(
    servers: Sequence[grpc.aio.Server], wanted: Sequence[TcpAddress | UnixAddress], tls: ServerTls | None
) -> tuple[TcpAddress | UnixAddress, frozenset[int]]:
    """Serves at all addresses, or at none where one of them cannot be had. Returns the main one, as `_bind` does, and
    our own sockets that listen there."""
    # Others of this process may share the port.
    others = listening_at(wanted[0])
    bound = [_bind(server, address, tls) for server, address in zip(servers, wanted, strict=True)]
    await start_all(*servers)
    return bound[0], listening_at(bound[0]) - others


def _bind(
    server: grpc.aio.Server, address: TcpAddress | UnixAddress, tls: ServerTls | None
) -> TcpAddress | UnixAddress:
    """The address that it has then, with the port that was picked."""
    try:
        if isinstance(address, UnixAddress):
            server.add_insecure_port(str(address))
            return address
        if tls is None:
            return TcpAddress(address.host, server.add_insecure_port(str(address)))
        return TcpAddress(address.host, server.add_secure_port(str(address), tls.credentials()))
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {address}: the port is in use") from error


def _options(
    max_message_bytes: int, limits: ConnectionLimits, *, reuse_port: bool, is_watched: bool
) -> list[tuple[str, int]]:
    return [
        *limits.options(),
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
