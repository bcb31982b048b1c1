"""Addresses of services: "HOST:PORT", "[IPV6]:PORT" or "unix:PATH", and "dns:///NAME:PORT" for all addresses of a name;
and reserved ports that processes share."""

import errno
import ipaddress
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from quire.runtime.settings import ConfigurationError

_UNIX_PREFIX = "unix:"
_DNS_PREFIX = "dns:///"
_LOOPBACK = "127.0.0.1"
ALL_IPV6 = "::"
"""All addresses of a machine: a server that listens there takes connections by IPv4, too."""
_MAX_UNIX_PATH_BYTES = 107
# A port that is free at one address of a host may be taken at another one.
_MAX_PICKS = 20


class AddressInUse(ConfigurationError):  # noqa: N818
    """Another process listens at the address."""


@dataclass(frozen=True, slots=True)
class TcpAddress:
    """A host name or IP address and a port; port 0 stands for any free one."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True, slots=True)
class UnixAddress:
    """The path of a unix socket."""

    path: Path

    def __str__(self) -> str:
        return f"{_UNIX_PREFIX}{self.path}"


@dataclass(frozen=True, slots=True)
class DnsName:
    """A host name, each of whose addresses is a service of its own at this port."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{_DNS_PREFIX}{TcpAddress(self.host, self.port)}"


def parse_target(text: str) -> TcpAddress | UnixAddress | DnsName:
    """Reads an address, or a name that stands for several. ConfigurationError when it is malformed."""
    if not text.startswith("dns:"):
        return parse_address(text)
    host, separator, port = text.removeprefix(_DNS_PREFIX).rpartition(":")
    is_port = port.isascii() and port.isdigit() and 0 < int(port) <= 65535
    if not (text.startswith(_DNS_PREFIX) and separator and is_port) or not host or "/" in host or ":" in host:
        raise ConfigurationError(f'address "{text}" is not dns:///NAME:PORT (port 1 to 65535)')
    return DnsName(host, int(port))


def parse_address(text: str) -> TcpAddress | UnixAddress:
    """Reads an address. ConfigurationError when it is malformed."""
    if text.startswith(_UNIX_PREFIX):
        path = text.removeprefix(_UNIX_PREFIX)
        if not path:
            raise ConfigurationError(f'address "{text}" has no path; expected unix:PATH')
        return UnixAddress(Path(path))
    host, separator, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ConfigurationError(f'address "{text}" is not HOST:PORT (port 0 to 65535) or unix:PATH')
    return TcpAddress(host, int(port))


def check_address(flag: str, text: str) -> TcpAddress | UnixAddress:
    """The address that a flag has. ValueError with the name of the flag when it is malformed."""
    try:
        return parse_address(text)
    except ConfigurationError as error:
        raise ValueError(f"{flag}: {error}") from error


def is_local(text: str) -> bool:
    """True for a unix socket, a loopback address and localhost."""
    if text.startswith(_UNIX_PREFIX):
        return True
    host = text.rpartition(":")[0].removeprefix("[").removesuffix("]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_bindable(address: TcpAddress | UnixAddress, *, reuse_port: bool = False) -> None:
    """Binds `address` and releases it again: gRPC itself reports a failure in several log lines and without its cause.

    With `reuse_port` an address counts as free if its listeners share it, too.

    Raises:
        AddressInUse: another process listens there.
        ConfigurationError: the address cannot be bound for another reason.
    """
    if isinstance(address, UnixAddress):
        _check_unix(address)
        return
    lacking: OSError | None = None
    is_bindable = False
    for family, sockaddr in _resolve(address):
        try:
            _bind(family, sockaddr, reuse_port=reuse_port).close()
            is_bindable = True
        except OSError as error:
            lacking = _lack_of_address(error, address)
    # gRPC listens on all addresses of a name and is content with one, so one that this machine lacks is no failure.
    if not is_bindable and lacking is not None:
        raise ConfigurationError(f"cannot listen on {address}: {lacking.strerror}") from lacking


class ReservedPort:
    """A TCP port that is kept for the processes that share it, also while none of them runs.

    It holds sockets that are bound and never listen, so that no connection comes to them. The sockets of `reserve` are
    bound with SO_REUSEPORT: every process of this user that sets SO_REUSEPORT, too, can listen at the port. All other
    processes are refused, and so is a second server of ours, which first checks that the port is free.
    """

    def __init__(self, address: TcpAddress, sockets: ExitStack) -> None:
        self.address = address
        self._sockets = sockets

    @classmethod
    def reserve(cls, host: str, port: int) -> Self:
        """Reserves the port at all addresses of `host` that this machine has; port 0 picks a free one.

        Raises:
            AddressInUse: another process listens there or has reserved it, whether or not it would share it.
            ConfigurationError: this machine has no such address, or it cannot be bound for another reason.
        """
        for _ in range(0 if port else _MAX_PICKS - 1):
            with suppress(AddressInUse):
                return cls._reserve(TcpAddress(host, port))
        return cls._reserve(TcpAddress(host, port))

    @classmethod
    def lend(cls) -> Self:
        """Reserves a free port of 127.0.0.1 for one process that sets SO_REUSEADDR and does not share the port, as most
        servers do. The system gives it to no other process that requests any free port."""
        with ExitStack() as sockets:
            # A process that does set SO_REUSEPORT can listen there, too.
            bound = sockets.enter_context(_bind(socket.AF_INET, (_LOOPBACK, 0), reuse_port=True))
            return cls(TcpAddress(_LOOPBACK, bound.getsockname()[1]), sockets.pop_all())

    @classmethod
    def _reserve(cls, wanted: TcpAddress) -> Self:
        # Without SO_REUSEPORT, which would succeed if other processes already share the port.
        check_bindable(wanted)
        with ExitStack() as sockets:
            port = wanted.port
            for family, sockaddr in _resolve(wanted):
                bound = _bind_shared(family, (sockaddr[0], port, *sockaddr[2:]), wanted)
                if bound is not None:
                    port = sockets.enter_context(bound).getsockname()[1]
            return cls(TcpAddress(wanted.host, port), sockets.pop_all())

    def release(self) -> None:
        """Idempotent."""
        self._sockets.close()


def _bind_shared(family: int, sockaddr: tuple[object, ...], wanted: TcpAddress) -> socket.socket | None:
    """None if this machine has no such address; check_bindable has found one that it has."""
    try:
        return _bind(family, sockaddr, reuse_port=True, reuse_address=False)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            _lack_of_address(error, wanted)
            return None
    # Closed connections of a server that did not share the port may linger there, and block it without SO_REUSEADDR.
    # With it, other servers notice us only once a process listens.
    try:
        return _bind(family, sockaddr, reuse_port=True)
    except OSError as error:
        raise AddressInUse(f"cannot listen on {wanted}: the port is in use") from error


def _resolve(address: TcpAddress) -> Iterator[tuple[int, tuple[object, ...]]]:
    """The family and the socket address of each IP address of the host."""
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error.strerror or error}") from error
    return ((family, sockaddr) for family, _, _, _, sockaddr in found)


def _bind(family: int, sockaddr: tuple[object, ...], *, reuse_port: bool, reuse_address: bool = True) -> socket.socket:
    with ExitStack() as undo:
        bound = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, int(reuse_port))
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(reuse_address))
        if family == socket.AF_INET6:
            bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(sockaddr[0] != ALL_IPV6))
        bound.bind(sockaddr)
        undo.pop_all()
        return bound


def _lack_of_address(error: OSError, address: TcpAddress) -> OSError:
    """The error if it says that this machine has no such address; raises any other error."""
    if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
        return error
    if error.errno == errno.EADDRINUSE:
        raise AddressInUse(f"cannot listen on {address}: the port is in use") from error
    raise ConfigurationError(f"cannot listen on {address}: {error.strerror}") from error


def _check_unix(address: UnixAddress) -> None:
    """Checks the path. gRPC removes any socket at it, also a live one, so the check connects to it first."""
    if len(os.fsencode(address.path)) > _MAX_UNIX_PATH_BYTES:
        raise ConfigurationError(f"cannot listen on {address}: the path is longer than {_MAX_UNIX_PATH_BYTES} bytes")
    if not address.path.parent.is_dir():
        raise ConfigurationError(f"cannot listen on {address}: no such directory {address.path.parent}")
    if not address.path.exists():
        return
    if not stat.S_ISSOCK(address.path.stat().st_mode):
        raise AddressInUse(f"cannot listen on {address}: the path is taken by something that is not a socket")
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(address.path))
        except (ConnectionRefusedError, FileNotFoundError):
            return  # left behind by a dead process, or gone by now
        except (BlockingIOError, TimeoutError):
            """A process that takes no further connection, since it is busy or stands still."""
        except OSError as error:
            raise ConfigurationError(f"cannot listen on {address}: {error.strerror}") from error
    raise AddressInUse(f"cannot listen on {address}: the socket is in use")
