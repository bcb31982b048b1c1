"""The inventory of sealed blocks: blocks of the KV pool whose content is final, with their hashes. Needs no torch."""

import threading
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from worker_svc.step import HASH_BYTES, Int32Array, SealedBlocks


class SealInventory:
    """The blocks of the GPU pool whose content is final, with the hash that the scheduler gave them.

    A later scheduler takes them into its prefix cache, so a seal must never outlive its content: a block loses its seal
    before it is written, and gets one only after the step that finished it. Steps have a number that rises over all
    sessions. A step may be launched before an earlier one has finished, so a block is sealed only if no later step
    has begun to write it. On a GPU two threads use an inventory.
    """

    def __init__(self, num_gpu_blocks: int, held: tuple[NDArray[np.uint8], NDArray[np.uint8]] | None = None) -> None:
        """`held` is memory that may outlive this process, which may be killed at any moment: [n] whether a block is
        sealed, 0 if not, and the hashes [n, HASH_BYTES]. Without it no block is sealed."""
        self._lock = threading.Lock()
        nothing = np.zeros(num_gpu_blocks, dtype=np.uint8), np.zeros((num_gpu_blocks, HASH_BYTES), dtype=np.uint8)
        self._sealed, self._hashes = nothing if held is None else held
        self._last_written = np.zeros(num_gpu_blocks, dtype=np.int64)
        # The number of writes of each block that began.
        self._num_writes = np.zeros(num_gpu_blocks, dtype=np.int64)
        self._is_short_lived = np.zeros(num_gpu_blocks, dtype=np.bool_)

    def begin_write(self, block_ids: NDArray[np.integer], step_number: int) -> None:
        """A step is about to write these blocks."""
        with self._lock:
            self._sealed[block_ids] = 0
            self._last_written[block_ids] = step_number
            self._num_writes[block_ids] += 1

    def add(self, sealed: SealedBlocks, step_number: int) -> None:
        """A step has finished, and these blocks are final. A block that was sealed before gets the new hash."""
        if not len(sealed.block_ids):
            return
        with self._lock:
            is_current = self._last_written[sealed.block_ids] <= step_number
            block_ids = sealed.block_ids[is_current]
            # A process that is killed in between leaves no seal with half a hash.
            self._sealed[block_ids] = 0
            self._hashes[block_ids] = sealed.hashes[is_current]
            self._is_short_lived[block_ids] = np.isin(block_ids, sealed.short_lived)
            self._sealed[block_ids] = 1

    def num_writes(self, block_ids: NDArray[np.integer]) -> NDArray[np.int64]:
        """Number of writes of each of these blocks that began: a final block is unchanged while this is unchanged."""
        with self._lock:
            return self._num_writes[block_ids]

    def begin_transfer(self, block_ids: NDArray[np.integer]) -> None:
        """Marks blocks that a transfer fills; no step writes them until `end_transfer` or a later step of their own."""
        with self._lock:
            self._sealed[block_ids] = 0
            self._num_writes[block_ids] += 1

    def end_transfer(self, sealed: SealedBlocks) -> None:
        """The content is there, and final."""
        self.add(sealed, int(self._last_written[sealed.block_ids].max()))

    def clear(self) -> None:
        """No block is final, since all have other content now."""
        with self._lock:
            self._sealed[:] = 0
            self._num_writes += 1

    def keep_all(self) -> None:
        """No block is short-lived any more: the scheduler that would seal some of them again has gone."""
        with self._lock:
            self._is_short_lived[:] = False

    def sealed_since(self, seen: NDArray[np.int64]) -> tuple[SealedBlocks, NDArray[np.int64]]:
        """The sealed ones of the first `len(seen)` blocks whose number of writes is not that in `seen`, and theirs.
        Without short-lived blocks."""
        with self._lock:
            number = len(seen)
            is_new = (self._sealed[:number] != 0) & (self._num_writes[:number] != seen) & ~self._is_short_lived[:number]
            block_ids = np.flatnonzero(is_new).astype(np.int32)
            return SealedBlocks(block_ids, self._hashes[block_ids]), self._num_writes[block_ids]

    def snapshot(self) -> SealedBlocks:
        """All sealed blocks by rising block id."""
        block_ids = np.flatnonzero(self._sealed).astype(np.int32)
        return SealedBlocks(block_ids, self._hashes[block_ids])


class BlockStore(Protocol):
    """`PoolBlocks`, or a fake: contents of whole blocks, [n, block_bytes]."""

    seals: SealInventory
    block_bytes: int

    def read(self, blocks: Int32Array) -> NDArray[np.uint8]: ...
    def write(self, blocks: Int32Array, contents: NDArray[np.uint8]) -> None: ...
