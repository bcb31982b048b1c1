"""Where a service listens: "HOST:PORT", "[IPV6]:PORT" or "unix:PATH"."""

import errno
import ipaddress
import os
import socket
import stat
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from quire.settings import ConfigurationError

_UNIX_PREFIX = "unix:"


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


def parse_address(text: str) -> TcpAddress | UnixAddress:
    """Reads an address; ConfigurationError when it is none."""
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
    """Tries to listen at `address` and lets go of it again.

    gRPC itself reports a bind failure by several lines in its log and no cause. With `reuse_port` an address counts as
    free when those who listen there share it too.

    Raises:
        AddressInUse: someone listens there.
        ConfigurationError: the address cannot be bound for another reason.
    """
    if isinstance(address, UnixAddress):
        _check_unix(address)
        return
    try:
        found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigurationError(f"cannot listen on {address}: {error.strerror or error}") from error
    # gRPC listens on all addresses of a name and is content with one, so one that this machine lacks is no failure.
    failures = [_try_bind(family, sockaddr, address, reuse_port=reuse_port) for family, _, _, _, sockaddr in found]
    missing = [failure for failure in failures if failure is not None]
    if len(missing) == len(failures):
        raise ConfigurationError(f"cannot listen on {address}: {missing[0].strerror}") from missing[0]


def _try_bind(family: int, sockaddr: tuple[object, ...], address: TcpAddress, *, reuse_port: bool) -> OSError | None:
    """The reason why this machine has no such address; raises for all other reasons."""
    try:
        with closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if reuse_port:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            probe.bind(sockaddr)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"cannot listen on {address}: the port is in use") from error
        if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
            return error
        raise ConfigurationError(f"cannot listen on {address}: {error.strerror}") from error
    return None


def _check_unix(address: UnixAddress) -> None:
    """gRPC removes whatever socket is at the path, also a live one; so ask it first."""
    if len(os.fsencode(address.path)) > 107:
        raise ConfigurationError(f"cannot listen on {address}: the path is longer than 107 bytes")
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
        except OSError:
            return  # left behind by a dead process
    raise AddressInUse(f"cannot listen on {address}: the socket is in use")


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind((host, 0))
        return probe.getsockname()[1]
