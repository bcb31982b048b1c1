"""A gRPC server as all services run it: listening, limits, health, reflection, error mapping, keepalive, drain."""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import grpc
import grpc.aio
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2_grpc

from quire.rpc.address import AddressInUse, TcpAddress, UnixAddress, parse_address
from quire.rpc.admin_servicer import ADMIN_SERVICE, AdminServicer
from quire.rpc.health import HEALTH_SERVICE, REFLECTION_SERVICES, HealthServicer, add_reflection
from quire.rpc.interceptors import Arrivals, CallEnds, ErrorInterceptor
from quire.rpc.tls import ServerTls, role_interceptors
from quire.rpc.transport import TRANSPORT

DEFAULT_MAX_MESSAGE_BYTES = 64 * 1024 * 1024
UNLIMITED_MESSAGE_BYTES = -1
"""Up to protobuf's limit, 2 GiB."""
DEFAULT_MAX_STREAMS = 4096
# Twice gRPC's own limits, which every client lives with. A call's memory, and 1.35 times its metadata, is held before
# any of our code runs, so that only this, the calls of a connection and the connections bound it.
_MAX_METADATA_BYTES = 16 * 1024
_ADMIN_HOST = "127.0.0.1"
_CHANNELZ_SERVICE = "grpc.channelz.v1.Channelz"


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a server's connections; None sets no limit.

    Attributes:
        max_connections: Connections at once; further ones are closed.
        max_streams: Calls at once in one connection; a client keeps further ones back until one ends. A call counts
            until our code is done with it, too, which bounds the calls that a client can open and reset: of further
            calls at that moment some are refused, which clients see as UNAVAILABLE.
        handshake_timeout_s: A connection that is not set up by then is closed.
        max_age_s: A client is asked to open a new connection for its next calls when its connection is that old, 10%
            more or less. Calls that run in the old one continue, and none is lost.
    """

    max_connections: int | None = None
    max_streams: int = DEFAULT_MAX_STREAMS
    handshake_timeout_s: float = 10.0
    max_age_s: float | None = None

    def options(self) -> list[tuple[str, int]]:
        """The limits as options of a gRPC server, and the maximum metadata of a call."""
        limits = {
            "grpc.max_allowed_incoming_connections": self.max_connections,
            "grpc.max_connection_age_ms": None if self.max_age_s is None else int(self.max_age_s * 1000),
        }
        return [
            *((name, limit) for name, limit in limits.items() if limit is not None),
            ("grpc.max_concurrent_streams", self.max_streams),
            ("grpc.server_handshake_timeout_ms", int(self.handshake_timeout_s * 1000)),
            ("grpc.max_metadata_size", _MAX_METADATA_BYTES),
            ("grpc.absolute_max_metadata_size", _MAX_METADATA_BYTES * 5 // 4),
        ]


_NO_LIMITS = ConnectionLimits()


class AdminServer:
    """The server of operators' requests to this process, on loopback: its log level, and gRPC's channelz, which shows
    servers, channels and sockets and their statistics.

    Without TLS there is no authentication: every user of the machine can call it.
    """

    def __init__(self, server: grpc.aio.Server, address: str, servicer: AdminServicer) -> None:
        self.address = address
        self._server = server
        self._servicer = servicer

    @classmethod
    async def start(cls, port: int, tls: ServerTls | None = None) -> Self:
        """Listens on a port of 127.0.0.1, 0 for a free one; with `tls`, for callers of its roles only.

        Raises:
            AddressInUse: another process listens there.
            ConfigurationError: the files of `tls` cannot be used.
        """
        from grpc_channelz.v1 import channelz

        wanted = TcpAddress(_ADMIN_HOST, port)
        transport = TRANSPORT.get()
        transport.check_bindable(wanted)
        guards = (*role_interceptors(wanted, tls), ErrorInterceptor())
        server = transport.server(guards, [("grpc.so_reuseport", 0)])
        channelz.add_channelz_servicer(server)
        servicer = AdminServicer()
        servicer.add_to(server)
        add_reflection((_CHANNELZ_SERVICE, ADMIN_SERVICE), server)
        bound = _bind(server, wanted, tls)
        await _start_all(server)
        return cls(server, str(bound), servicer)

    async def stop(self) -> None:
        self._servicer.cancel()
        await self._server.stop(0)


class RpcServer:
    """A running server, made by `start`. It serves at once; health says NOT_SERVING until `set_serving(True)`.

    Its local socket has a server of its own, which keeps serving when the port is handed over.
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
        on_call_end: Callable[[str, grpc.StatusCode], None] | None = None,
    ) -> Self:
        """Listens and serves, at all addresses or at none.

        Args:
            address: "HOST:PORT" (port 0 picks a free one) or "unix:PATH".
            register: Adds the servicers to a server; called for each address.
            service_names: Full names of those services, for health and reflection.
            max_message_bytes: Larger requests are refused with RESOURCE_EXHAUSTED. Answers have no limit.
            reuse_port: Share the port with other processes, over which the kernel spreads connections.
            local_socket: A unix socket that leads to this process only, also where the port is shared.
            interceptors: See calls of all services before their handlers do, health included; the first one first.
            tls: The encryption of a TCP address, and its permitted callers; a unix socket is never encrypted.
            limits: Limits of connections, which count separately for `local_socket`.
            admin_port, admin_tls: The port for operators, on loopback, and its encryption; port 0 picks a free one.
            on_call_end: Called with the method and the status of each call that is over, as `CallEnds` says.

        Raises:
            AddressInUse: another process listens at an address.
            ConfigurationError: an address is malformed or not of this machine, or files of TLS cannot be used.
        """
        wanted = [parse_address(address)]
        transport = TRANSPORT.get()
        transport.check_bindable(wanted[0], reuse_port=reuse_port)
        if local_socket is not None:
            wanted.append(UnixAddress(local_socket))
            transport.check_bindable(wanted[1])
        arrivals, health = Arrivals(), HealthServicer(service_names)
        ends = () if on_call_end is None else (CallEnds(frozenset(_methods_of(service_names)), on_call_end),)
        guards = [(*ends, *role_interceptors(each, tls), ErrorInterceptor(), *interceptors) for each in wanted]
        options = _options(max_message_bytes, limits, reuse_port=reuse_port, is_watched=admin_port is not None)
        # Calls to the local socket do not count: it serves on when the port is handed over.
        servers = [transport.server(each, options) for each in ((arrivals, *guards[0]), *guards[1:])]
        for server in servers:
            register(server)
            health_pb2_grpc.add_HealthServicer_to_server(health, server)
            add_reflection((*service_names, HEALTH_SERVICE), server)
        async with _admin_server(admin_port, admin_tls) as admin:
            # Other servers of this process may share the port.
            others = _listening_at(wanted[0])
            bound, *_ = [_bind(server, each, tls) for server, each in zip(servers, wanted, strict=True)]
            await _start_all(*servers)
        return cls(servers, str(bound), arrivals, health, admin, _listening_at(bound) - others)

    def set_serving(self, serving: bool) -> None:
        """Sets the health of the server as a whole and of each service."""
        self._health.set_serving(serving)

    async def hand_over(self, silence_s: float) -> None:
        """Leaves the port to the processes that share it: closes it, and serves its present connections until no call
        has begun for `silence_s` seconds. Clients that go on calling open new connections at `max_age_s`, so it returns
        soon after that; without a maximum age it returns when they stop calling."""
        # Not by gRPC's shutdown: that ends calls which it holds, or which are on their way in, with CANCELLED, after
        # which no client retries.
        _stop_listening(self._listeners, parse_address(self.address))
        await self._arrivals.wait_for_silence(silence_s)

    async def stop(self, grace_s: float) -> None:
        """Refuses new calls, gives running ones `grace_s` seconds, cancels the rest. Idempotent."""
        self._health.close()
        await asyncio.gather(*(server.stop(grace_s) for server in self._servers))
        if self.admin is not None:
            await self.admin.stop()


def _methods_of(service_names: Sequence[str]) -> Iterator[str]:
    """The methods of services whose generated code is loaded, and of reflection."""
    for name in service_names:
        for method in descriptor_pool.Default().FindServiceByName(name).methods:
            yield f"{name}/{method.name}"
    for name in REFLECTION_SERVICES:
        yield f"{name}/ServerReflectionInfo"


@contextlib.asynccontextmanager
async def _admin_server(port: int | None, tls: ServerTls | None) -> AsyncIterator[AdminServer | None]:
    """Keeps running after the block, and stops where the block fails."""
    admin = None if port is None else await AdminServer.start(port, tls)
    try:
        yield admin
    except BaseException:
        if admin is not None:
            await admin.stop()
        raise


def _bind(
    server: grpc.aio.Server, address: TcpAddress | UnixAddress, tls: ServerTls | None
) -> TcpAddress | UnixAddress:
    """The address with the port that was picked."""
    try:
        if isinstance(address, UnixAddress):
            server.add_insecure_port(str(address))
            return address
        if tls is None:
            return TcpAddress(address.host, server.add_insecure_port(str(address)))
        return TcpAddress(address.host, server.add_secure_port(str(address), tls.credentials()))
    except RuntimeError as error:
        raise AddressInUse(f"cannot listen on {address}: the port is in use") from error


async def _start_all(*servers: grpc.aio.Server) -> None:
    """Starts all servers or no server. On cancellation they finish their start and are stopped: after a cancelled start
    gRPC cannot end without errors, nor can its event loop, and it may hang."""
    starting = asyncio.gather(*(server.start() for server in servers))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await starting
        await asyncio.gather(*(server.stop(0) for server in servers))
        raise


def _options(
    max_message_bytes: int, limits: ConnectionLimits, *, reuse_port: bool, is_watched: bool
) -> list[tuple[str, int]]:
    return [
        *limits.options(),
        ("grpc.enable_channelz", int(is_watched)),
        ("grpc.so_reuseport", int(reuse_port)),
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),
        # gRPC unpacks a whole message before it looks at its size: 4 MiB of gzip may become 4 GiB.
        ("grpc.compression_enabled_algorithms_bitset", 1 << grpc.Compression.NoCompression),
        # Clients may ping as they like. Where gRPC counts pings against them, it closes a connection only once no write
        # is under way, which a flood of pings prevents, and keeps 2 kB for each further ping: a gigabyte in 4 s. Its
        # acknowledgements are bounded: it reads no further where 10,000 wait.
        ("grpc.http2.max_ping_strikes", 0),
        # Finds clients that vanished without closing their connection, whose requests are aborted then.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
        ("grpc.http2.max_pings_without_data", 0),
    ]


# gRPC closes a port only when it shuts the server down. To hand a port over, its sockets are found and replaced.


def _listening_at(address: TcpAddress | UnixAddress) -> frozenset[int]:
    """The descriptors by which this process listens at a TCP port."""
    if not isinstance(address, TcpAddress):
        return frozenset()
    descriptors = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    return frozenset(each for each in descriptors if _listens(each, address.port))


def _listens(descriptor: int, port: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as each:
            is_internet = each.family in (socket.AF_INET, socket.AF_INET6)
            listens = bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            return is_internet and listens and each.getsockname()[1] == port
    except OSError:
        # Closed in the meantime, as the descriptor of the directory listing is.
        return False


def _stop_listening(descriptors: frozenset[int], address: TcpAddress | UnixAddress) -> None:
    """Closes these listening sockets at a TCP port. Open connections stay; new ones go to others that share the port.

    gRPC keeps the descriptors and closes them in the end, so each becomes a descriptor of another listening socket that
    no client can reach. On a socket that is only shut down, gRPC would call accept and log its failure.
    """
    remaining = descriptors & _listening_at(address)
    if not remaining:
        return
    with socket.socket(socket.AF_UNIX) as unreachable:
        # Bound to a name that the kernel picks.
        unreachable.bind("")
        unreachable.listen(0)
        unreachable.setblocking(False)
        for descriptor in remaining:
            os.dup2(unreachable.fileno(), descriptor, inheritable=False)
