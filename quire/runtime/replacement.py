"""Files that other processes read while they are replaced: keys and certificates."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int) -> None:
    """Replaces a file atomically, so that no reader sees a part of it, also after a loss of power.

    A new file gets `mode`. One that replaces another keeps its mode, and its owner and group if this process may set
    them: a service of a user other than the caller could not read it otherwise. Raises OSError if it fails.
    """
    # The path may be a symbolic link.
    target = Path(os.path.realpath(path))
    before = target.stat() if target.exists() else None
    descriptor, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            if before is not None:
                with suppress(PermissionError):
                    os.fchown(descriptor, before.st_uid, before.st_gid)
            os.fchmod(descriptor, mode if before is None else before.st_mode & 0o777)
            file.write(content)
            file.flush()
            os.fsync(descriptor)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink()
        raise
