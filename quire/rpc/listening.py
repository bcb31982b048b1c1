"""Closing a port that gRPC listens on, which gRPC itself does only when it shuts a server down."""

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path

from quire.rpc.address import TcpAddress, UnixAddress


def listening_at(address: TcpAddress | UnixAddress) -> frozenset[int]:
    """The descriptors by which this process listens at a TCP port."""
    if not isinstance(address, TcpAddress):
        return frozenset()
    descriptors = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    return frozenset(each for each in descriptors if _listens(each, address.port))


def stop_listening(descriptors: frozenset[int]) -> None:
    """Connections that came by these listening sockets stay; new ones go to others that share the port."""
    for descriptor in descriptors:
        with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as listener:
            listener.shutdown(socket.SHUT_RDWR)


def _listens(descriptor: int, port: int) -> bool:
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return False
        with socket.socket(fileno=os.dup(descriptor)) as each:
            is_internet = each.family in (socket.AF_INET, socket.AF_INET6)
            listens = bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
            return is_internet and listens and each.getsockname()[1] == port
    except OSError:
        # It is closed by now, as that of the directory listing is.
        return False
