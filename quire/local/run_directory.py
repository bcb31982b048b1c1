"""The private directory in which the sockets of one `quire serve` lie."""

import fcntl
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Self

_PREFIX = "quire-"
_LOCK = "lock"
# The path of a unix socket has at most 107 bytes, which a long TMPDIR would exceed.
_LONGEST_PARENT_BYTES = 60


class RunDirectory:
    """A directory that is ours for as long as we hold the lock in it.

    A supervisor that is killed leaves its directory behind. Its lock is free then, so that the next one removes it.
    """

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def make(cls) -> Self:
        """Makes one, and removes those that nobody holds any more."""
        parent = Path(tempfile.gettempdir())
        if len(os.fsencode(parent)) > _LONGEST_PARENT_BYTES:
            parent = Path("/tmp")
        _remove_abandoned(parent)
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        # It gets its name once it is locked, so that nobody finds it free before.
        new = path / f"{_LOCK}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        new.rename(path / _LOCK)
        return cls(path, lock)

    def remove(self) -> None:
        """Removes it with all that lies in it. Idempotent."""
        if self._lock is None:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = None


def _remove_abandoned(parent: Path) -> None:
    for path in parent.glob(f"{_PREFIX}*"):
        # What cannot be opened or locked is another's, or in use.
        with suppress(OSError):
            lock = os.open(path / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(lock).st_uid == os.getuid():
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(lock)
