"""The sockets of processes, from /proc."""

import os
from pathlib import Path


def ports_to(pid: int, port: int) -> set[int]:
    """The local ports of the connections that a process and its group have to a port of this machine."""
    own = _sockets_of_group(pid)
    return {local for inode, (local, remote) in _connections().items() if remote == port and inode in own}


def has_connection(pid: int, port: int, peers: set[int]) -> bool:
    """Whether a process or its group accepted at `port` a connection from one of the ports `peers`."""
    own = _sockets_of_group(pid)
    return any(local == port and remote in peers and inode in own for inode, (local, remote) in _connections().items())


def _connections() -> dict[int, tuple[int, int]]:
    """The local and the remote port of all established TCP connections, by the inode of the socket."""
    found: dict[int, tuple[int, int]] = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            _, local, remote, state, *_, inode = line.split()[:10]
            if state == "01":
                found[int(inode)] = (int(local.rpartition(":")[2], 16), int(remote.rpartition(":")[2], 16))
    return found


def _sockets_of_group(pid: int) -> set[int]:
    """The inodes of the sockets of all processes in the group of `pid`."""
    found: set[int] = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.getpgid(int(process.name)) != os.getpgid(pid):
                continue
            links = [str(each.readlink()) for each in (process / "fd").iterdir()]
        except OSError:
            continue
        found.update(int(link[len("socket:[") : -1]) for link in links if link.startswith("socket:["))
    return found
