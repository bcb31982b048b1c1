"""Sealed KV blocks in a file on disk, which outlives the pool, the worker and `quire serve`.

A thread writes blocks to the file soon after they are sealed. A worker that starts reads the newest ones back into its
pool, and reports the others to its scheduler, which has them read if a prompt needs them. Blocks are
found by their hash; a new block replaces the one that was written, read or found in the pool longest ago.

    0                   `_HEADER`: magic, version, bytes of a block, digest of the `KvNamespace`
    4096 + slot * size  `_SLOT`: CRC-32 of hash and content, a number that rises with each write, the hash, and the
                        CRC-32 of all that; the content

The head of a slot is erased before the slot is written, and written after the content, so that a process that is killed
leaves an empty slot. The CRC-32 detects damage by a power loss or a faulty disk.
"""

import logging
import os
import struct
import threading
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from quire.model_files.progress import shown_bytes
from quire.runtime.settings import ConfigurationError
from worker_svc.device.file_lock import open_alone
from worker_svc.device.seals import BlockStore
from worker_svc.step import HASH_BYTES, SealedBlocks

_HEADER = struct.Struct("<8sIQ32s")
_MAGIC, _VERSION = b"quirekvd", 1
_SLOTS_AT = 4096
_SLOT = struct.Struct(f"<IQ{HASH_BYTES}sI")
_HEAD_CRC_BYTES = 4
_EMPTY = bytes(_SLOT.size)
_EVERY_S = 0.05
_AT_ONCE = 16
_MAX_HITS = 1024
"""Steps whose hits wait for the disk, which may hang."""
T = TypeVar("T")
Buffer = bytes | bytearray | memoryview
_logger = logging.getLogger(__name__)


class DiskFailsError(Exception):
    """The disk is full or fails: workers go on without it."""


def file_of_rank(directory: Path, rank: int) -> Path:
    """Where a rank keeps its parts of blocks."""
    return directory / (f"blocks-{rank}.kv" if rank else "blocks.kv")


def remove_files_of_more_ranks(directory: Path, num_ranks: int) -> None:
    """Removes the files of earlier workers, which no worker would use. For rank 0, which has its own file open."""
    used = {file_of_rank(directory, rank) for rank in range(num_ranks)}
    for path in set(directory.glob("blocks-*.kv")) - used:
        with suppress(OSError):
            path.unlink()
            _logger.info("%s is removed: there are %d ranks now", path, num_ranks)


class BlockFile:
    """Blocks by their hashes, in a file that only this process uses. For one thread at a time.

    Attributes:
        num_slots: The number of blocks that fit.
    """

    def __init__(self, path: Path, space: int, namespace: bytes, block_bytes: int) -> None:
        """Takes over the content of the same namespace; any other content of the file is erased.

        Args:
            path: its directory is made with mode 0700, the file with 0600.
            space: Bytes that the file takes at most.
            namespace: the digest of the `KvNamespace`, 32 bytes.

        Raises:
            ConfigurationError: the file cannot be opened, another process has it, or no block fits.
            DiskFailsError: it can be neither read nor written, for example since the disk is full.
        """
        self._block_bytes, self._slot_bytes = block_bytes, _SLOT.size + block_bytes
        self.num_slots = (space - _SLOTS_AT) // self._slot_bytes
        if self.num_slots < 1:
            raise ConfigurationError(
                f"--kv-disk-space is {shown_bytes(space)} for each worker and one block takes "
                f"{shown_bytes(self._slot_bytes)}; raise it"
            )
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"--kv-disk {path.parent} cannot be made: {error.strerror}") from error
        # Other content of the file is erased, so the path may not be a link.
        self._file = open_alone(path, "--kv-disk", may_be_link=False)
        try:
            header = _HEADER.pack(_MAGIC, _VERSION, block_bytes, namespace)
            if os.pread(self._file, _HEADER.size, 0) != header:
                os.ftruncate(self._file, 0)
                os.pwrite(self._file, header, 0)
            # A file of more space than it has now loses the slots behind its end.
            os.ftruncate(self._file, min(os.fstat(self._file).st_size, self._offset(self.num_slots)))
            self._slots = self._read_index()
        except OSError as error:
            os.close(self._file)
            raise DiskFailsError(f"--kv-disk: {path} cannot be used: {error.strerror}") from error

    def _offset(self, slot: int) -> int:
        return _SLOTS_AT + slot * self._slot_bytes

    def _read_index(self) -> OrderedDict[bytes, int]:
        """The slot of each block, in the order of writing."""
        self._changes: dict[int, bytes | None] = {}
        number = max(0, -(-(os.fstat(self._file).st_size - _SLOTS_AT) // self._slot_bytes))
        heads = ((slot, _unpack(os.pread(self._file, _SLOT.size, self._offset(slot)))) for slot in range(number))
        found = sorted((head[1], head[2], slot) for slot, head in heads if head is not None)
        slots = OrderedDict((name, slot) for _, name, slot in found)
        self._newest = found[-1][0] if found else 0
        taken = set(slots.values())
        self._free = [slot for slot in range(number) if slot not in taken]
        self._num_used = number
        return slots

    def close(self) -> None:
        """Discards the index: the file has no block from now on."""
        self._slots.clear()
        os.close(self._file)

    def __contains__(self, name: bytes) -> bool:
        return name in self._slots

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def names(self) -> list[bytes]:
        """The hashes of all blocks, the latest written or read first."""
        return list(reversed(self._slots))

    def entries(self) -> list[tuple[int, bytes]]:
        """The slot and the hash of each block."""
        return [(slot, name) for name, slot in self._slots.items()]

    def take_changes(self) -> list[tuple[int, bytes | None]]:
        """The slots that changed since the last call, with the hashes that they have now; None without a block."""
        changes, self._changes = list(self._changes.items()), {}
        return changes

    def write(self, name: bytes, content: Buffer) -> None:
        """Keeps a block that it does not have. OSError if the disk does not take it: then the block is not there."""
        assert name not in self._slots, "a block is written once"
        slot = self._take_slot()
        start = self._offset(slot)
        try:
            self._write(_EMPTY, start)
            self._write(content, start + _SLOT.size)
            self._newest += 1
            self._write(_pack(_crc32(name, content), self._newest, name), start)
        except OSError:
            self._empty(slot)
            raise
        self._slots[name], self._changes[slot] = slot, name

    def _empty(self, slot: int) -> None:
        self._free.append(slot)
        self._changes[slot] = None

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if self._num_used < self.num_slots:
            self._num_used += 1
            return self._num_used - 1
        return self._slots.popitem(last=False)[1]

    def _write(self, data: Buffer, start: int) -> None:
        written = 0
        while written < len(data):
            written += os.pwrite(self._file, memoryview(data)[written:], start + written)

    def renew(self, name: bytes) -> None:
        """Marks a block as just read. No effect if it is missing."""
        if name in self._slots:
            self._slots.move_to_end(name)

    def read(self, name: bytes, into: NDArray[np.uint8]) -> bool:
        """Reads the content of a block. Returns False if the file does not have it, or not as it was written."""
        if (slot := self._slots.get(name)) is None:
            return False
        head, length = bytearray(_SLOT.size), 0
        try:
            length = os.preadv(self._file, [head, into.data], self._offset(slot))
        except OSError as error:
            _logger.warning("a KV block on disk cannot be read: %s", error.strerror)
        if length == self._slot_bytes:
            found = _unpack(head)
            if found is not None and found[2] == name and found[0] == _crc32(name, into.data):
                self._slots.move_to_end(name)
                return True
        del self._slots[name]
        self._empty(slot)
        return False


def _pack(crc: int, number: int, name: bytes) -> bytes:
    head = _SLOT.pack(crc, number, name, 0)[:-_HEAD_CRC_BYTES]
    return head + zlib.crc32(head).to_bytes(_HEAD_CRC_BYTES, "little")


def _unpack(head: Buffer) -> tuple[int, int, bytes] | None:
    """CRC-32, number and hash of a slot; None for an empty or damaged one."""
    if len(head) < _SLOT.size or head == _EMPTY:
        return None
    crc, number, name, own_crc = _SLOT.unpack(head)
    return (crc, number, name) if own_crc == zlib.crc32(head[:-_HEAD_CRC_BYTES]) else None


def _crc32(name: bytes, content: Buffer) -> int:
    return zlib.crc32(content, zlib.crc32(name))


Count = Callable[[str, int], object]
"""Called with an outcome ("written", "read" or "failed") and its number of bytes."""

OnChanges = Callable[[Sequence[tuple[int, bytes | None]]], object]
"""Receives, in any thread, the block that each of these slots holds now; None for a slot without a block."""


def _ignore(changes: Sequence[tuple[int, bytes | None]]) -> None:
    """No scheduler is attached."""


class DiskTier:
    """Fills a file with the blocks that a pool seals, during its steps, and reads them back."""

    def __init__(self, file: BlockFile, store: BlockStore, num_blocks: int) -> None:
        """`num_blocks` is the number of the pool's blocks that sequences may have."""
        self._count: Count = lambda what, num_bytes: None
        self._on_changes: OnChanges = _ignore
        self._num_restored = 0
        self._file, self._store, self._num_blocks = file, store, num_blocks
        self._saved = np.full(num_blocks, -1, np.int64)
        self._is_writing = True
        # Blocks of the pool that sequences began with since the thread looked last.
        self._hits = deque[NDArray[np.int32]](maxlen=_MAX_HITS)
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        # Held while the file is used. One thread reads, so that a disk that hangs takes no other ones.
        self._lock = threading.Lock()
        self._reader = ThreadPoolExecutor(1, "kv-disk-read")

    def restore(self) -> int:
        """Fills blocks of the pool that are not final with the newest blocks of the file, before the first step.
        Returns their number."""
        sealed = self._store.seals.snapshot()
        held = {each.tobytes() for each in sealed.hashes}
        free = np.setdiff1d(np.arange(self._num_blocks, dtype=np.int32), sealed.block_ids).tolist()
        names = [name for name in self._file.names if name not in held][: len(free)]
        number, content = 0, np.empty((1, self._store.block_bytes), np.uint8)
        # Those written first get the first blocks.
        for name in reversed(names):
            if not self._file.read(name, content[0]):
                continue
            blocks = np.array([free[number]], np.int32)
            self._store.seals.begin_transfer(blocks)
            self._store.write(blocks, content)
            self._store.seals.end_transfer(SealedBlocks(blocks, np.frombuffer(name, np.uint8).reshape(1, -1)))
            number += 1
        self._num_restored = number
        if names:
            _logger.info("%d of %d KV blocks on disk are in the pool", number, len(self._file))
        return number

    def start(self, count: Count) -> None:
        """Writes from now on, in a thread."""
        self._count = count
        count("read", self._num_restored * self._store.block_bytes)
        self._thread = threading.Thread(target=self._run, name="kv-disk", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Writes the final blocks, and closes the file. For a worker that takes no more steps."""
        self._stopping.set()
        self._reader.shutdown(wait=False, cancel_futures=True)
        if self._thread is not None:
            self._thread.join()
        self.write_behind()
        with self._lock:
            self._file.close()

    def follow(self, on_changes: OnChanges) -> None:
        """A scheduler is attached: calls `on_changes` with all slots that hold a block, and with later changes; ends
        earlier callbacks."""
        self._on_changes = on_changes
        self._store.seals.keep_all()

        def begin() -> None:
            with self._lock:
                if self._on_changes == on_changes:
                    self._file.take_changes()
                    on_changes(self._file.entries())

        self.submit(begin)

    def unfollow(self, on_changes: OnChanges) -> None:
        """Stops the calls of `on_changes`. No effect if another callback follows."""
        if self._on_changes == on_changes:
            self._on_changes = _ignore

    def hit(self, blocks: NDArray[np.int32]) -> None:
        """Sequences begin with these blocks of the pool: on disk they are as if read, at the thread's next look."""
        if len(blocks):
            self._hits.append(blocks)

    def _renew(self) -> None:
        hits = [self._hits.popleft() for _ in range(len(self._hits))]
        if not hits:
            return
        sealed = self._store.seals.snapshot()
        names = dict(zip(sealed.block_ids.tolist(), sealed.hashes, strict=True))
        with self._lock:
            # The end of a prefix is of no use without its beginning.
            for block in np.concatenate(hits)[::-1].tolist():
                if block in names:
                    self._file.renew(names[block].tobytes())

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Runs something that reads, one after the other."""
        return self._reader.submit(call)

    def read(self, name: bytes, into: NDArray[np.uint8]) -> bool:
        """Reads the content of a block. Returns False if it is not there, or not as it was written. May take long."""
        with self._lock:
            is_read = self._file.read(name, into)
            self._report_changes()
        if is_read:
            self._count("read", len(into))
        return is_read

    def _report_changes(self) -> None:
        if changes := self._file.take_changes():
            self._on_changes(changes)

    def _run(self) -> None:
        while not self._stopping.wait(_EVERY_S):
            self.write_behind()

    def write_behind(self) -> None:
        """Writes the blocks that became final since the last call. If the disk fails, it raises nothing and writes no
        more."""
        self._renew()
        if not self._is_writing:
            return
        sealed, writes = self._store.seals.sealed_since(self._saved)
        # Most blocks that the file has already were read from it.
        is_new = np.array([each.tobytes() not in self._file for each in sealed.hashes], bool)
        self._saved[sealed.block_ids[~is_new]] = writes[~is_new]
        new = np.flatnonzero(is_new)
        for start in range(0, len(new), _AT_ONCE):
            part = new[start : start + _AT_ONCE]
            blocks, names = sealed.block_ids[part], [each.tobytes() for each in sealed.hashes[part]]
            contents = self._store.read(blocks)
            # A block that is written again meanwhile may be half of each.
            is_current = self._store.seals.num_writes(blocks) == writes[part]
            with self._lock:
                try:
                    for index in np.flatnonzero(is_current):
                        if names[index] not in self._file:
                            self._file.write(names[index], contents[index].data)
                            self._count("written", self._store.block_bytes)
                except OSError as error:
                    self._is_writing = False
                    self._count("failed", self._store.block_bytes)
                    _logger.warning("no more KV blocks go to disk: %s", error.strerror)
                    return
                finally:
                    self._report_changes()
            self._saved[blocks] = writes[part]
