"""The disk of a worker's blocks in a world: the product's own file and tier, over bytes that outlive processes.

Slowness, lack of space, failures and bit rot are drawn. A killed process loses its last writes from some point on; a
machine that loses power may lose any of its recent writes. The work of a disk thread is a job of its process, in parts,
and steps run between these parts.
"""

import errno
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from tests.sim.world.watch import CheckedSeals
from tests.sim.world.world import Node, World
from tests.support.fake_pool import FakeBlocks
from worker_svc.device import disk_tier
from worker_svc.device.disk_tier import BlockFile, Count, DiskFailsError, DiskTier
from worker_svc.step import Int32Array, SealedBlocks

T = TypeVar("T")

_SHORT = 0.05
"""The share of writes that take a part of what they are given."""
_WRITE_S = 0.003
"""Seconds before a kill whose writes may be lost."""
_UNSYNCED_S = 3.0
"""Seconds before a power failure whose writes may be lost."""
_LOOK_S, _READ_S = 0.05, 0.004
_FLAG = "/tmp/quire-world.kv"


@dataclass(frozen=True, slots=True)
class _Write:
    at_s: float
    start: int
    before: bytes
    after: bytes


class BlockDisk:
    """The bytes of a worker's file of blocks.

    Attributes:
        chance: Draws the fate of writes.
    """

    def __init__(self, world: World, host: str) -> None:
        self.chance = world.generator(f"block disk of {host}")
        self._world, self._host = world, host
        self._data = bytearray()
        self._trouble: tuple[float, int] = (0.0, 0)
        self._slow: tuple[float, float] = (0.0, 0.0)
        self._writes: deque[_Write] = deque()
        self.written: dict[bytes, None] = {}
        """The blocks on the disk in the order in which they were written; empty if that is unknown."""

    # Faults

    def fail(self, error: int, seconds: float) -> None:
        """Refuses writes with this error for `seconds`; reads, too, unless the error is a full disk."""
        self._world.note("block disk", self._host, errno.errorcode[error])
        self._trouble = self._world.now + seconds, error

    def slow(self, job_s: float, seconds: float) -> None:
        """Each job takes up to `job_s` for `seconds`."""
        self._world.note("slow disk", self._host)
        self._slow = self._world.now + seconds, job_s

    def rot(self, number: int) -> None:
        """Flips bits at random places."""
        self._world.note("rot", self._host)
        for _ in range(number if self._data else 0):
            place = self.chance.randrange(len(self._data))
            self._data[place] ^= 1 << self.chance.randrange(8)

    def process_ended(self, *, has_power: bool) -> None:
        """The process ends by a kill, perhaps in the middle of a write, or by a loss of power."""
        recent_s = _WRITE_S if has_power else _UNSYNCED_S
        writes = [each for each in self._writes if each.at_s > self._world.now - recent_s]
        self._writes.clear()
        if writes:
            self.written.clear()
        for each in reversed(writes):
            self._put(each.start, each.before)
        num_kept = self.chance.randint(0, len(writes)) if self.chance.random() < 0.5 else len(writes)
        for number, each in enumerate(writes):
            is_kept = number < num_kept if has_power else self.chance.random() < 0.7
            is_torn = number == num_kept if has_power else self.chance.random() < 0.2
            if is_kept or is_torn:
                self._put(each.start, each.after[: self.chance.randrange(len(each.after)) if is_torn else None])

    def _put(self, start: int, data: bytes) -> None:
        self._data[start : start + len(data)] = data

    def job_s(self) -> float:
        """Duration of a job that begins now."""
        until, job_s = self._slow
        return self.chance.uniform(0, job_s if self._world.now < until else _READ_S)

    # The surface of `os`

    def _check_works(self, *, writes: bool) -> None:
        until, error = self._trouble
        if self._world.now < until and (writes or error != errno.ENOSPC):
            raise OSError(error, os.strerror(error))

    def pread(self, count: int, start: int) -> bytes:
        self._check_works(writes=False)
        return bytes(self._data[start : start + count])

    def preadv(self, buffers: list[Any], start: int) -> int:
        self._check_works(writes=False)
        length = 0
        for buffer in buffers:
            view = memoryview(buffer).cast("B")
            part = self._data[start + length : start + length + len(view)]
            view[: len(part)] = part
            length += len(part)
        return length

    def pwrite(self, data: Any, start: int) -> int:
        self._check_works(writes=True)
        content = bytes(data)
        if self.chance.random() < _SHORT:
            content = content[: self.chance.randint(1, len(content))]
        self._extend(start + len(content))
        self._writes.append(_Write(self._world.now, start, bytes(self._data[start : start + len(content)]), content))
        while self._writes[0].at_s < self._world.now - _UNSYNCED_S:
            self._writes.popleft()
        self._put(start, content)
        return len(content)

    def ftruncate(self, size: int) -> None:
        self._check_works(writes=True)
        self._writes.clear()
        del self._data[size:]
        self._extend(size)

    def _extend(self, size: int) -> None:
        self._data += bytes(max(size - len(self._data), 0))

    def fstat(self) -> Any:
        return SimpleNamespace(st_size=len(self._data))


@contextmanager
def simulated_block_disks() -> Iterator[None]:
    """Inside the block, a `BlockDisk` takes the place of a worker's file descriptor."""
    calls = ("pread", "preadv", "pwrite", "ftruncate", "fstat")
    fake = SimpleNamespace(close=lambda disk: None)
    for name in calls:
        setattr(fake, name, lambda disk, *arguments, name=name: getattr(disk, name)(*arguments))
    with patch.object(disk_tier, "os", fake):
        yield


def open_tier(
    disk: BlockDisk, node: Node, blocks: FakeBlocks, num_blocks: int, namespace: bytes, space: int
) -> "SimDiskTier | None":
    """The tier of a worker that starts; None if the disk fails."""
    with patch.object(disk_tier, "open_alone", lambda *_, **__: disk):
        try:
            file = _OrderedFile(space, namespace, blocks.block_bytes, disk, node)
        except DiskFailsError:
            return None
    return SimDiskTier(file, blocks, num_blocks, disk, node)


class _OrderedFile(BlockFile):
    """A file that evicts the least recently used block; after a restart, the block that was written first."""

    def __init__(self, space: int, namespace: bytes, block_bytes: int, disk: BlockDisk, node: Node) -> None:
        super().__init__(Path(_FLAG), space, namespace, block_bytes)
        self._node, self._written = node, disk.written
        self._used = dict.fromkeys(reversed(self.names))
        places = {name: place for place, name in enumerate(self._written)}
        known = [places[name] for name in self._used if name in places]
        self._demand(known == sorted(known), "it is forgotten in which order blocks were written to disk")

    def write(self, name: bytes, content: Any) -> None:
        before = set(self._slots)
        try:
            super().write(name, content)
        finally:
            for gone in before - self._slots.keys():
                self._demand(gone == next(iter(self._used)), "a block on disk makes way before one that is older")
                self._forget(gone)
            self._check_slots()
        self._use(name)
        self._written.pop(name, None)
        self._written[name] = None

    def read(self, name: bytes, into: NDArray[np.uint8]) -> bool:
        is_read = super().read(name, into)
        if is_read:
            self._use(name)
        else:
            self._forget(name)
        self._check_slots()
        return is_read

    def _check_slots(self) -> None:
        is_whole = len(self._slots) + len(self._free) == self._num_used
        self._demand(is_whole, "a slot of a disk has no block, and gets none")

    def renew(self, name: bytes) -> None:
        super().renew(name)
        if name in self._slots:
            self._use(name)

    def check_renewed(self, names: list[bytes]) -> None:
        """Checks the order of blocks that begin sequences and were just renewed; the first block is the newest."""
        newest = list(dict.fromkeys(name for name in names if name in self._slots))
        self._demand(self.names[: len(newest)] == newest, "blocks that are used grow old on disk")

    def _use(self, name: bytes) -> None:
        self._used.pop(name, None)
        self._used[name] = None

    def _forget(self, name: bytes) -> None:
        self._used.pop(name, None)
        self._written.pop(name, None)

    def _demand(self, holds: bool, otherwise: str) -> None:
        if not holds:
            self._node.fail(AssertionError(otherwise))


class _Late:
    """A pool as a thread sees it: it knows blocks that were sealed a while ago, and reads their present contents."""

    def __init__(self, blocks: FakeBlocks, sealed: tuple[SealedBlocks, NDArray[np.int64]]) -> None:
        self.seals: Any = self
        self.block_bytes, self.read, self.num_writes = blocks.block_bytes, blocks.read, blocks.seals.num_writes
        self.snapshot = blocks.seals.snapshot
        self._sealed = sealed

    def sealed_since(self, seen: NDArray[np.int64]) -> tuple[SealedBlocks, NDArray[np.int64]]:
        return self._sealed

    def write(self, blocks: Int32Array, contents: NDArray[np.uint8]) -> None:
        raise AssertionError("who writes behind writes no block")


class SimDiskTier(DiskTier):
    """The tier of a process with its threads as jobs: one reads, and one writes when blocks are sealed."""

    def __init__(self, file: _OrderedFile, blocks: FakeBlocks, num_blocks: int, disk: BlockDisk, node: Node) -> None:
        super().__init__(file, blocks, num_blocks)
        self._ordered = file
        self._disk, self._node, self._blocks = disk, node, blocks
        self._calls: deque[tuple[Future[Any], Callable[[], None]]] = deque()
        self._is_reading = self._is_due = False

    @property
    def entries(self) -> dict[int, bytes]:
        """The slot and the name of each block."""
        return dict(self._file.entries())

    def start(self, count: Count) -> None:
        self._count = count
        assert isinstance(self._blocks.seals, CheckedSeals)
        self._blocks.seals.on_add = self._sealed
        self._sealed()

    def _renew(self) -> None:
        hits = list(self._hits)
        super()._renew()
        if hits:
            sealed = self._store.seals.snapshot()
            names = dict(zip(sealed.block_ids.tolist(), map(bytes, sealed.hashes), strict=True))
            blocks = np.concatenate(hits).tolist()
            self._ordered.check_renewed([names[block] for block in blocks if block in names])

    def _sealed(self) -> None:
        if not self._is_due and not self._stopping.is_set():
            self._is_due = True
            self._node.run_job(self._look, self._disk.chance.uniform(0, _LOOK_S))

    def _look(self) -> None:
        self._is_due = False
        sealed = self._blocks.seals.sealed_since(self._saved)
        if len(sealed[0].block_ids):
            self._is_due = True
            self._node.run_job(lambda: self._write(sealed), self._disk.job_s())

    def _write(self, sealed: tuple[SealedBlocks, NDArray[np.int64]]) -> None:
        self._is_due = False
        if self._stopping.is_set():
            return
        self._store = _Late(self._blocks, sealed)
        try:
            self.write_behind()
        finally:
            self._store = self._blocks
        # Some blocks were sealed meanwhile.
        if self._is_writing and len(self._blocks.seals.sealed_since(self._saved)[0].block_ids):
            self._sealed()

    def submit(self, call: Callable[[], T]) -> "Future[T]":
        future: Future[T] = Future()

        def run() -> None:
            try:
                result = call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            self._read_next()

        self._calls.append((future, run))
        if not self._is_reading:
            self._read_next()
        return future

    def _read_next(self) -> None:
        """Calls that have begun are not cancelled any more, however long the disk takes."""
        self._is_reading = False
        while self._calls and not self._is_reading:
            future, run = self._calls.popleft()
            if self._stopping.is_set():
                future.cancel()
            elif future.set_running_or_notify_cancel():
                self._is_reading = True
                self._node.run_job(run, self._disk.job_s())
