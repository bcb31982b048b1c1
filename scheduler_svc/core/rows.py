"""The worker's persistent batch as the scheduler sees it: counters of all running sequences as arrays over rows.

Planning a step and applying its result touch only these arrays; Python looks at single sequences only where one changes
state. That keeps a step of hundreds of sequences well under a millisecond.
"""

import heapq

import numpy as np

from scheduler_svc.core.sequence import Sequence


class RowTable:
    """One entry per row of the worker. Entries of rows that are not `active` mean nothing.

    num_tokens    int64: tokens of the sequence, those included that steps in flight will sample
    num_computed  int64: tokens whose keys and values are in the pool once all steps in flight are done
    num_slots     int64: slots of the sequence's block table
    num_sealed    int64: blocks at the start of the block table that are sealed, or need not be
    max_len       int64: the sequence ends at this many tokens; the last one is never computed
    arrival       int64: arrival number of the group
    incarnation   int64: rises whenever the row is released, so that results for its past are told apart
    """

    def __init__(self, max_num_rows: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_num_rows
        self.active = np.zeros(max_num_rows, dtype=bool)
        self.num_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self.num_computed = np.zeros(max_num_rows, dtype=np.int64)
        self.num_slots = np.zeros(max_num_rows, dtype=np.int64)
        self.num_sealed = np.zeros(max_num_rows, dtype=np.int64)
        self.max_len = np.zeros(max_num_rows, dtype=np.int64)
        self.arrival = np.zeros(max_num_rows, dtype=np.int64)
        self.incarnation = np.zeros(max_num_rows, dtype=np.int64)
        self._free = list(range(max_num_rows))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, sequence: Sequence, arrival: int, block_size: int, num_cached: int) -> int:
        """Puts a sequence into the lowest free row and returns that. Its first `num_cached` tokens are computed."""
        row = heapq.heappop(self._free)
        self.sequences[row] = sequence
        self.active[row] = True
        self.num_tokens[row] = sequence.num_tokens
        self.num_computed[row] = num_cached
        self.num_slots[row] = len(sequence.block_table) * block_size
        self.num_sealed[row] = num_cached // block_size
        self.max_len[row] = sequence.request.max_len
        self.arrival[row] = arrival
        sequence.row = row
        return row

    def release(self, row: int) -> None:
        """Takes the sequence out of its row."""
        sequence = self.sequences[row]
        assert sequence is not None, f"row {row} is free"
        sequence.row = None
        self.sequences[row] = None
        self.active[row] = False
        self.incarnation[row] += 1
        heapq.heappush(self._free, row)

    def decoding(self) -> np.ndarray:
        """Rows with exactly one token to compute, int64[n], rising."""
        return np.flatnonzero(self._runnable() & (self.num_tokens - self.num_computed == 1))

    def prefilling(self) -> np.ndarray:
        """Rows with more than one token to compute, int64[n], in order of arrival."""
        rows = np.flatnonzero(self._runnable() & (self.num_tokens - self.num_computed > 1))
        return rows[np.argsort(self.arrival[rows], kind="stable")]

    def without_slot(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows` whose next token has no slot in a block yet."""
        return rows[self.num_slots[rows] <= self.num_computed[rows]]

    def _runnable(self) -> np.ndarray:
        # A sequence that reaches its end with what is in flight needs no further step.
        return self.active & (self.num_tokens < self.max_len)
