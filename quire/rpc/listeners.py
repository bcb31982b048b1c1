"""Listening TCP sockets, which a process opens or inherits.

A process inherits the socket from systemd or from `quire serve`, which hold it as well. While the process is being
started again, connections wait in the socket instead of being refused.
"""

import os
import socket
from collections.abc import Mapping

from quire.rpc.address import ALL_IPV6, TcpAddress
from quire.runtime.settings import ConfigurationError

BACKLOG = 2048
"""The maximum number of connections that wait in a socket."""
INHERITED_DESCRIPTOR = 3
"""The descriptor of an inherited socket, as sd_listen_fds(3) has it."""


def listen(host: str, port: int, *, reuse_port: bool = False) -> socket.socket:
    """Listens at the first address of `host`; port 0 picks a free one. `::` means all addresses of the machine, also
    of IPv4, as for gRPC. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    is_dual = host == ALL_IPV6 and socket.has_dualstack_ipv6()
    return _without_delay(
        socket.create_server(
            (host, port), family=family, backlog=BACKLOG, reuse_port=reuse_port, dualstack_ipv6=is_dual
        )
    )


def inherited_listener(environ: Mapping[str, str]) -> socket.socket | None:
    """The socket that the process which started this one passes to it by systemd's protocol, sd_listen_fds(3); None if
    it passes none.

    Raises:
        ConfigurationError: there are several sockets, or it does not listen at a TCP address.
    """
    if environ.get("LISTEN_PID") != str(os.getpid()):
        return None
    count = environ.get("LISTEN_FDS")
    if count != "1":
        raise ConfigurationError(f"LISTEN_FDS is {count}; pass one socket, for HTTP")
    try:
        listener = socket.socket(fileno=INHERITED_DESCRIPTOR)
        listens = listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ConfigurationError(f"descriptor {INHERITED_DESCRIPTOR} is not a socket: {error.strerror}") from error
    is_tcp = listener.family in (socket.AF_INET, socket.AF_INET6) and listener.type == socket.SOCK_STREAM
    if not (is_tcp and listens):
        with listener:
            raise ConfigurationError(f"the inherited socket is {listener}; it must listen at a TCP address")
    listener.set_inheritable(False)
    return _without_delay(listener)


def _without_delay(listener: socket.socket) -> socket.socket:
    # Connections inherit the option. Without it, a client with delayed acknowledgements waits 40 ms for each body of an
    # answer. uvloop sets it by itself, asyncio only for sockets that it creates.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def address_of(listener: socket.socket) -> TcpAddress:
    """Where a socket listens."""
    return TcpAddress(*listener.getsockname()[:2])
