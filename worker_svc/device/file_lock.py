"""Files of a worker that no other process uses at the same time. Needs no torch."""

import errno
import fcntl
import os
import stat
from contextlib import suppress
from pathlib import Path

from quire.runtime import clock
from quire.runtime.settings import ConfigurationError

_LOCK_TIMEOUT_S, _LOCK_EVERY_S = 5.0, 0.1
_LOCKS = Path("/proc/locks")


def open_alone(path: Path, flag: str, *, may_be_link: bool = True) -> int:
    """The descriptor of a file, made with mode 0600, that only this process uses until it closes it or ends. Waits a
    moment for another process that uses it: a worker that was killed may still end.

    Raises:
        ConfigurationError: it cannot be opened, is no regular file, or another process keeps it; `flag` named it.
    """
    deadline = clock.monotonic() + _LOCK_TIMEOUT_S
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | (0 if may_be_link else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags, 0o600)
    except OSError as error:
        why = "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror
        raise ConfigurationError(f"{flag} {path} cannot be opened: {why}") from error
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise ConfigurationError(f"{flag} {path} is not a regular file")
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return file
        except BlockingIOError as error:
            if clock.monotonic() > deadline:
                holder = _holder(os.fstat(file))
                os.close(file)
                raise ConfigurationError(
                    f"{flag} {path} is in use by {holder}; each worker needs its own: stop that one, or name another "
                    "place"
                ) from error
            clock.sleep(_LOCK_EVERY_S)


def _holder(file: os.stat_result) -> str:
    """The process that locks a file, if the system names it. A line is "1: FLOCK ADVISORY WRITE 4711 08:02:131 0 EOF":
    the process, then device and inode."""
    name = f"{os.major(file.st_dev):02x}:{os.minor(file.st_dev):02x}:{file.st_ino}"
    with suppress(OSError):
        for line in _LOCKS.read_text().splitlines():
            match line.split():
                # In a container, processes outside of it have no number.
                case [_, "FLOCK", _, "WRITE", process, where, *_] if where == name and process.isdecimal():
                    return f"process {process}" if int(process) else "a process outside of this container"
                case _:
                    """Another lock, or one that waits."""
    return "another process"
