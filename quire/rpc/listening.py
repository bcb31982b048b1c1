"""Starting servers so that a cancellation does no harm, and closing a port that gRPC listens on, which gRPC itself does
only when it shuts a server down."""

import asyncio
import os
import socket
import stat
from pathlib import Path

import grpc.aio

from quire.rpc.address import TcpAddress, UnixAddress


def listening_at(address: TcpAddress | UnixAddress) -> frozenset[int]:
    """The descriptors by which this process listens at a TCP port."""
    if not isinstance(address, TcpAddress):
        return frozenset()
    descriptors = [int(each.name) for each in Path("/proc/self/fd").iterdir()]
    return frozenset(each for each in descriptors if _listens(each, address.port))


def stop_listening(descriptors: frozenset[int], address: TcpAddress | UnixAddress) -> None:
    """Closes these listening sockets at a TCP port. Connections that came by them stay; new ones go to others that
    share the port.

    gRPC keeps the descriptors and closes them in the end, so each becomes that of another listening socket, which
    nobody can reach. A socket that is only shut down makes gRPC accept from it, and log that it failed.
    """
    remaining = descriptors & listening_at(address)
    if not remaining:
        return
    with socket.socket(socket.AF_UNIX) as unreachable:
        # By a name that the kernel picks, and that nobody is told.
        unreachable.bind("")
        unreachable.listen(0)
        unreachable.setblocking(False)
        for descriptor in remaining:
            os.dup2(unreachable.fileno(), descriptor, inheritable=False)


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


async def start_all(*servers: grpc.aio.Server) -> None:
    """Starts servers, all or none. Where it is cancelled they are stopped first: gRPC neither ends the start of a
    server that is cancelled, nor the loop that it runs in, without errors, and may hang."""
    starting = asyncio.gather(*(server.start() for server in servers))
    try:
        await asyncio.shield(starting)
    except asyncio.CancelledError:
        await starting
        await asyncio.gather(*(server.stop(0) for server in servers))
        raise
