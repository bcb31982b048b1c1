"""Processes of a server on this machine, from /proc: the tree of the one that listens at its port."""

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PROC = Path("/proc")
_LISTENS = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    """A process that cannot be mistaken for a later one with its pid.

    Attributes:
        started: Clock ticks from the start of the machine to its own.
    """

    pid: int
    started: int
    parent: int
    command: str

    @property
    def is_standby(self) -> bool:
        """Whether it serves nothing yet and calls itself a standby."""
        with contextlib.suppress(OSError):
            return "standby" in (_PROC / str(self.pid) / "comm").read_text()
        return False

    @property
    def state(self) -> str | None:
        """The letter of /proc: "T" if it is stopped; None if it has ended, also if its parent has not waited for it."""
        fields = stat_of(self.pid)
        return None if fields is None or int(fields[19]) != self.started or fields[0] in "ZX" else fields[0]


def stat_of(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat after the name, beginning with the state."""
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return None


def own_processes() -> dict[int, Process]:
    """All processes of this user, by pid."""
    found: dict[int, Process] = {}
    for place in _PROC.glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if place.stat().st_uid != os.getuid():
                continue
            command = (place / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if (fields := stat_of(int(place.name))) is not None and fields[0] not in "ZX":
                found[int(place.name)] = Process(int(place.name), int(fields[19]), int(fields[1]), command)
    return found


def listener_of(port: int) -> int | None:
    """The pid of a process of this user that listens at a TCP port; None if there is none."""
    sockets: set[str] = set()
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (_PROC / "net" / table).read_text().splitlines()[1:]:
                fields = line.split()
                if fields[3] == _LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                    sockets.add(f"socket:[{fields[9]}]")
    for pid in own_processes():
        with contextlib.suppress(OSError):
            for file in (_PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if file.readlink().name in sockets:
                        return pid
    return None


def root_of(pid: int) -> int:
    """The topmost ancestor of a process that is neither an ancestor of ours nor a shell, such as its supervisor."""
    processes, ours = own_processes(), set[int]()
    above: int | None = os.getpid()
    while above in processes:
        ours.add(above)
        above = processes[above].parent
    root = pid
    while (parent := processes.get(processes[root].parent)) is not None:
        if parent.pid in ours or parent.pid == 1 or _SHELL.match(parent.command):
            break
        root = parent.pid
    return root


_SHELL = re.compile(r"-?(\S*/)?(ba|da|z|fi|k)?sh\b|\S*(tmux|screen|sshd|systemd|login|init)\b")


def tree_of(root: int) -> Mapping[int, Process]:
    """A process and all its descendants, by pid."""
    processes = own_processes()
    tree = {root: processes[root]} if root in processes else {}
    # A child may have a smaller pid than its parent.
    while new := {pid: each for pid, each in processes.items() if each.parent in tree and pid not in tree}:
        tree |= new
    return tree


def named(root: int, name: str) -> list[Process]:
    """The processes of a tree that have this name in their command line before the first flag with two dashes, where
    other processes are named, the nearest to the root first, without standby processes."""
    pattern = re.compile(rf"(?<![a-z]){re.escape(name)}")
    found = [each for each in tree_of(root).values() if pattern.search(each.command.partition(" --")[0])]
    return [each for each in found if not each.is_standby]
