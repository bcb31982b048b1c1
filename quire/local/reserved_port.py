"""A TCP port that is kept for the processes that share it, also while none of them runs."""

import errno
import socket
from contextlib import ExitStack, suppress
from typing import Self

from quire.rpc.address import AddressInUse, TcpAddress, check_bindable
from quire.settings import ConfigurationError

# A port that is free at one address of a host may be taken at another one.
_MAX_PICKS = 20


class ReservedPort:
    """Sockets that are bound with SO_REUSEPORT and never listen, so that no connection comes to them.

    Whoever of our user asks for SO_REUSEPORT too can listen at the port. Everyone else is refused, a second server of
    ours that looks whether the port is free included.
    """

    def __init__(self, address: TcpAddress, sockets: ExitStack) -> None:
        self.address = address
        self._sockets = sockets

    @classmethod
    def reserve(cls, host: str, port: int) -> Self:
        """Reserves it at all addresses of `host` that this machine has; port 0 picks a free one.

        Raises:
            AddressInUse: somebody listens there or has reserved it, whether or not they would share it.
            ConfigurationError: this machine has no such address, or it cannot be bound for another reason.
        """
        for _ in range(0 if port else _MAX_PICKS - 1):
            with suppress(AddressInUse):
                return cls._reserve(TcpAddress(host, port))
        return cls._reserve(TcpAddress(host, port))

    @classmethod
    def _reserve(cls, wanted: TcpAddress) -> Self:
        # Not with SO_REUSEPORT, which would take us in among those who share the port already.
        check_bindable(wanted)
        with ExitStack() as sockets:
            port = wanted.port
            for family, _, _, _, sockaddr in socket.getaddrinfo(
                wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            ):
                bound = _bind(family, (sockaddr[0], port, *sockaddr[2:]), wanted)
                if bound is not None:
                    port = sockets.enter_context(bound).getsockname()[1]
            return cls(TcpAddress(wanted.host, port), sockets.pop_all())

    def release(self) -> None:
        """Lets go of it. Idempotent."""
        self._sockets.close()


def _bind(family: int, sockaddr: tuple[object, ...], wanted: TcpAddress) -> socket.socket | None:
    """None where this machine has no such address; check_bindable has seen that it has one of them."""
    try:
        return _bound(family, sockaddr, reuse_address=False)
    except OSError as error:
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return None
        if error.errno != errno.EADDRINUSE:
            raise ConfigurationError(f"cannot listen on {wanted}: {error.strerror}") from error
    # Closed connections of a server that did not share the port may linger there, and keep it from us unless we allow
    # reuse. Then other servers notice us only once somebody listens.
    try:
        return _bound(family, sockaddr, reuse_address=True)
    except OSError as error:
        raise AddressInUse(f"cannot listen on {wanted}: the port is in use") from error


def _bound(family: int, sockaddr: tuple[object, ...], *, reuse_address: bool) -> socket.socket:
    with ExitStack() as undo:
        bound = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse_address))
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        bound.bind(sockaddr)
        undo.pop_all()
        return bound
