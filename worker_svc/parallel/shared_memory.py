"""Memory that the ranks of one machine share."""

import logging
import mmap
import os
import secrets
from pathlib import Path
from typing import Protocol

import torch

from kernels import exchange
from kernels.exchange import MAX_RANKS

_SHARED_MEMORY = Path("/dev/shm")
_NO_FILE = "none"
_logger = logging.getLogger(__name__)


class Store(Protocol):
    """What ranks that have met tell each other by: `get` waits until the key is set."""

    def set(self, key: str, value: str) -> None: ...

    def get(self, key: str) -> bytes: ...


def share_memory(store: Store, rank: int, size: int) -> torch.Tensor | None:
    """Memory that all ranks have mapped; None, for all of them, where one cannot have it. To be called once by each."""
    if rank == 0:
        path, memory = _make(size)
        store.set("shared_memory", _NO_FILE if path is None else path.name)
    else:
        memory, path = _open(store.get("shared_memory").decode(), size), None
    store.set(f"shared_memory/{rank}", "no" if memory is None else "yes")
    have_all = all(store.get(f"shared_memory/{other}") == b"yes" for other in range(size))
    if path is not None:
        # Nobody else is to come, and what is mapped stays until the last rank is gone.
        path.unlink()
    return memory if have_all else None


def _make(size: int) -> tuple[Path | None, torch.Tensor | None]:
    if size > MAX_RANKS or not exchange.can_exchange():
        return None, None
    # A name that no other machine and no other group has: who finds it has the same memory.
    path = _SHARED_MEMORY / f"quire-{secrets.token_hex(16)}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except OSError as error:
        _logger.warning("ranks cannot share memory: %s", error)
        return None, None
    try:
        # Not only its size: memory that is missing later would end the process.
        os.posix_fallocate(file, 0, exchange.shared_bytes(size))
        return path, _mapped(file, size)
    except OSError as error:
        _logger.warning("ranks cannot share memory: %s: %s", path, error)
        path.unlink()
        return None, None
    finally:
        os.close(file)


def _open(name: str, size: int) -> torch.Tensor | None:
    if name == _NO_FILE or not exchange.can_exchange():
        return None
    try:
        file = os.open(_SHARED_MEMORY / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        _logger.info("this rank does not share memory with the first: %s", error)
        return None
    try:
        return _mapped(file, size)
    finally:
        os.close(file)


def _mapped(file: int, size: int) -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(file, exchange.shared_bytes(size)), dtype=torch.uint8)
