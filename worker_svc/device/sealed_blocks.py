"""Blocks of the GPU pool whose content is final, with the hash that the scheduler gave them.

A later scheduler adopts them into its prefix cache, so a seal must never outlive its content: a block that is written
loses its seal before the write, and gets one only after the step that finished it.
"""

import threading

import numpy as np
from numpy.typing import NDArray

from worker_svc.steps import HASH_BYTES, SealedBlocks


class SealInventory:
    """The seals of one pool.

    Steps are named by a number that rises over all sessions. One step may be launched before an earlier one has
    finished, so a seal is taken only where no later step has begun to write. On a GPU two threads do these things.
    """

    def __init__(self, num_gpu_blocks: int) -> None:
        self._lock = threading.Lock()
        self._sealed = np.zeros(num_gpu_blocks, dtype=bool)
        self._last_written = np.zeros(num_gpu_blocks, dtype=np.int64)
        self._hashes = np.zeros((num_gpu_blocks, HASH_BYTES), dtype=np.uint8)

    def begin_write(self, block_ids: NDArray[np.integer], step_number: int) -> None:
        """A step is about to write these blocks."""
        with self._lock:
            self._sealed[block_ids] = False
            self._last_written[block_ids] = step_number

    def add(self, sealed: SealedBlocks, step_number: int) -> None:
        """A step has finished, and these blocks are final. A block that was sealed already gets the new hash."""
        with self._lock:
            still = self._last_written[sealed.block_ids] <= step_number
            self._hashes[sealed.block_ids[still]] = sealed.hashes[still]
            self._sealed[sealed.block_ids[still]] = True

    def snapshot(self) -> SealedBlocks:
        """All sealed blocks by rising block id."""
        block_ids = np.flatnonzero(self._sealed).astype(np.int32)
        return SealedBlocks(block_ids, self._hashes[block_ids])
