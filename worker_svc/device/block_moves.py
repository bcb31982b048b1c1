"""The moves of whole blocks of the pool before a step.

They are swap out, swap in and copy-on-write, in this order. Swaps have a stream of their own:

* A swap out reads its blocks after all earlier steps. The step waits for it only if it writes one of these blocks.
* A swap in writes its blocks after the steps that may still use them. A step that frees blocks releases or forks a row,
  or copies a shared block. Only before such a step may the previous one use a block that is free now.
* A swap in is done before the step computes.
"""

import numpy as np
import torch

from quire_kernels import ops
from worker_svc.device.kv_pool import KvPool
from worker_svc.step import AdmittedStep, Int32Array
from worker_svc.streams import Mark, Stream


class BlockMoves:
    """Queues the moves of all steps, in their order. Used only by the device thread."""

    def __init__(self, pool: KvPool, compute: Stream, swaps: Stream) -> None:
        self._pool = pool
        self._compute = compute
        self._swaps = swaps
        # Blocks that are being copied to the host, and when they are; oldest first, and they end in this order.
        self._saves: list[tuple[Int32Array, Mark]] = []
        # After all work that may use blocks which are free when the next step is planned, unless that step frees some.
        self._free_since = compute.mark()

    def run(self, admitted: AdmittedStep) -> None:
        """Queues all moves of a step. Work that is queued on the compute stream afterwards sees them done."""
        operations = admitted.step.cache_operations
        start, free_since = self._compute.mark(), self._free_since
        if len(operations.swap_out):
            self._swap_out(operations.swap_out, start)
        if len(operations.swap_in):
            self._swap_in(operations.swap_in, start if _frees_blocks(admitted) else free_since)
        if self._saves:
            self._wait_for_saves(admitted.written_blocks)
        self._free_since = start
        if len(operations.copy):
            # The pairs are on the host, so it is known that no block is both read and written, and no buffer is needed.
            ops.copy_blocks(self._pool.gpu, torch.from_numpy(operations.copy.astype(np.int64)))
            # The source may be free by now.
            self._free_since = self._compute.mark()

    def _swap_out(self, pairs: Int32Array, start: Mark) -> None:
        self._swaps.wait_for(start)
        with self._swaps.used():
            ops.swap_blocks(self._pool.gpu, self._pool.host, torch.from_numpy(pairs.astype(np.int64)))
        self._saves.append((pairs[:, 0], self._swaps.mark()))

    def _swap_in(self, pairs: Int32Array, start: Mark) -> None:
        self._swaps.wait_for(start)
        with self._swaps.used():
            ops.swap_blocks(self._pool.host, self._pool.gpu, torch.from_numpy(pairs.astype(np.int64)))
        self._compute.wait_for(self._swaps.mark())
        # All earlier swaps out are done by then.
        self._saves.clear()

    def _wait_for_saves(self, written: Int32Array) -> None:
        while self._saves and self._saves[0][1].is_passed():
            del self._saves[0]
        overwritten = [index for index, (saved, _) in enumerate(self._saves) if np.isin(written, saved).any()]
        if overwritten:
            last = overwritten[-1]
            self._compute.wait_for(self._saves[last][1])
            del self._saves[: last + 1]


def _frees_blocks(admitted: AdmittedStep) -> bool:
    """Whether blocks that the previous step uses may have been freed."""
    changes = admitted.step.row_changes
    return any(len(each) > 0 for each in (changes.release, changes.fork, admitted.step.cache_operations.copy))
