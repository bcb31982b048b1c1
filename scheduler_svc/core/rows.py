"""The worker's persistent batch as the scheduler sees it: counters of all running sequences as arrays over rows.

Planning a step and applying its result touch only these arrays; Python looks at single sequences only where one changes
state. That keeps a step of hundreds of sequences well under a millisecond.
"""

import heapq
from collections.abc import Sequence as SequenceOf

import numpy as np

from scheduler_svc.core.sequence import Sequence


class RowTable:
    """One entry per row of the worker. Entries of rows that are not `active` mean nothing.

    num_tokens    int64: tokens of the sequence, those included that steps in flight will sample
    num_computed  int64: tokens whose keys and values are in the pool once all steps in flight are done
    num_slots     int64: slots of the sequence's block table
    num_sealed    int64: blocks at the start of the block table that are sealed, or need not be
    seals_chunks  bool: blocks are sealed with each chunk of a prefill; not after one that was not finite
    max_len       int64: the sequence ends at this many tokens; the last one is never computed
    rank          int64: rank of the group
    client, handle, index, num_prompt  int64: whose sequence it is, which of the request's, after how many prompt tokens
    num_emitted   int64: output tokens that the sequence had when it was submitted
    is_plain      bool: each token is an event of its own at once; not where sequences are selected at the end
    wants_logprobs  bool: the worker reports the log probability of each token
    num_logprobs  int64: of so many of the most likely tokens at most besides
    prefills      bool: the row still computes what it came with, in chunks; it samples with the last one
    shares_tail   bool: the block that the next token goes to may be shared with a sequence that forked
    dependent     bool: the worker reports candidates, and the scheduler chooses the next token from its result
    incarnation   int64: rises whenever the row is released, so that results for its past are told apart
    """

    def __init__(self, max_num_rows: int) -> None:
        self.sequences: list[Sequence | None] = [None] * max_num_rows
        self.active = np.zeros(max_num_rows, dtype=bool)
        self.num_tokens = np.zeros(max_num_rows, dtype=np.int64)
        self.num_computed = np.zeros(max_num_rows, dtype=np.int64)
        self.num_slots = np.zeros(max_num_rows, dtype=np.int64)
        self.num_sealed = np.zeros(max_num_rows, dtype=np.int64)
        self.seals_chunks = np.zeros(max_num_rows, dtype=bool)
        self.max_len = np.zeros(max_num_rows, dtype=np.int64)
        self.rank = np.zeros(max_num_rows, dtype=np.int64)
        self.client = np.zeros(max_num_rows, dtype=np.int64)
        self.handle = np.zeros(max_num_rows, dtype=np.int64)
        self.index = np.zeros(max_num_rows, dtype=np.int64)
        self.num_prompt = np.zeros(max_num_rows, dtype=np.int64)
        self.num_emitted = np.zeros(max_num_rows, dtype=np.int64)
        self.is_plain = np.zeros(max_num_rows, dtype=bool)
        self.wants_logprobs = np.zeros(max_num_rows, dtype=bool)
        self.num_logprobs = np.zeros(max_num_rows, dtype=np.int64)
        self.prefills = np.zeros(max_num_rows, dtype=bool)
        self.shares_tail = np.zeros(max_num_rows, dtype=bool)
        self.dependent = np.zeros(max_num_rows, dtype=bool)
        self.incarnation = np.zeros(max_num_rows, dtype=np.int64)
        self._free = list(range(max_num_rows))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, sequence: Sequence, rank: int, block_size: int, num_computed: int, num_sealed: int) -> int:
        """Puts a sequence into the lowest free row, which it returns. Its first `num_computed` tokens are computed."""
        row = self._occupy(sequence, rank)
        self.active[row] = True
        self.num_tokens[row] = sequence.num_tokens
        self.num_computed[row] = num_computed
        self.num_slots[row] = len(sequence.block_table) * block_size
        self.num_sealed[row] = num_sealed
        self.seals_chunks[row] = True
        self.prefills[row] = True
        return row

    def park(self, sequence: Sequence, rank: int) -> None:
        """Keeps the lowest free row for a sequence that will fork from another."""
        self._occupy(sequence, rank)

    def fork(self, parent: int, child: int, block_size: int) -> None:
        """The row `child`, which no step in flight samples, goes on from what the parent has planned to compute, which
        is all its tokens."""
        self.active[child] = True
        self.num_tokens[child] = self.num_computed[child] = self.num_tokens[parent]
        self.num_slots[child] = self.num_slots[parent]
        self.num_sealed[child] = self.num_sealed[parent]
        self.prefills[child] = False
        self.shares_tail[[parent, child]] = self.num_tokens[parent] % block_size != 0

    def is_prefilling(self, row: int) -> bool:
        """Whether the row has chunks to compute of what it came with."""
        return bool(self.active[row] and self.prefills[row])

    def sampled(self, rows: np.ndarray) -> None:
        """A step was planned in which these rows sample."""
        self.prefills[rows] = False
        self.num_tokens[rows] += ~self.dependent[rows]

    def chose(self, row: int) -> None:
        """The scheduler gave a dependent row its next token."""
        self.num_tokens[row] += 1

    def _occupy(self, sequence: Sequence, rank: int) -> int:
        row = heapq.heappop(self._free)
        request = sequence.request
        self.sequences[row] = sequence
        self.max_len[row] = request.max_len
        self.rank[row] = rank
        self.client[row], self.handle[row], self.index[row] = request.key.client, request.key.handle, sequence.index
        self.num_prompt[row] = len(request.prompt)
        self.num_emitted[row] = sequence.num_emitted_tokens
        self.is_plain[row] = not request.selects
        self.wants_logprobs[row] = request.beam is None and (request.selects or request.sampling.logprobs is not None)
        self.num_logprobs[row] = request.sampling.logprobs or 0
        self.shares_tail[row] = False
        self.dependent[row] = request.beam is not None
        sequence.row = row
        return row

    def release(self, rows: SequenceOf[int]) -> None:
        """Takes the sequences out of these rows, which are distinct."""
        for row in rows:
            sequence = self.sequences[row]
            assert sequence is not None, f"row {row} is free"
            sequence.row = None
            self.sequences[row] = None
            heapq.heappush(self._free, row)
        if rows:
            self.active[rows] = False
            self.incarnation[rows] += 1

    def decoding(self) -> np.ndarray:
        """Rows that feed on their own last sample, int64[n], rising."""
        return np.flatnonzero(self._runnable() & ~self.prefills)

    def prefilling(self) -> np.ndarray:
        """Rows that compute what they came with, int64[n], in order of rank; of one group, in order of their rows, so
        that who computes a shared block comes before who reads it."""
        rows = np.flatnonzero(self._runnable() & self.prefills)
        return rows[np.argsort(self.rank[rows], kind="stable")]

    def sharing_tail(self) -> np.ndarray:
        """Decoding rows whose next token may go to a shared block, int64[n], rising."""
        return np.flatnonzero(self._runnable() & ~self.prefills & self.shares_tail)

    def without_slot(self, rows: np.ndarray) -> np.ndarray:
        """Those of `rows` whose next token has no slot in a block yet."""
        return rows[self.num_slots[rows] <= self.num_computed[rows]]

    def _runnable(self) -> np.ndarray:
        # A sequence that reaches its end with what is in flight needs no further step.
        return self.active & (self.num_tokens < self.max_len) & (self.num_computed < self.num_tokens)
