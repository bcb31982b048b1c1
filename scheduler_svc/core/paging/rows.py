"""The rows of the worker's batch as a table of arrays: planning a step and applying its result touch whole columns."""

import heapq
from collections.abc import Sequence as SequenceOf
from typing import Annotated, Any, Generic, get_type_hints

import numpy as np
from numpy.typing import NDArray

from scheduler_svc.core.paging.sequence import S

Array = NDArray[Any]
Numbers = Annotated[Array, np.int64]
Flags = Annotated[Array, np.bool_]


class RowTable(Generic[S]):
    """Each attribute that is declared `Numbers` or `Flags`, here or in a derived table, is a column: an array of one
    entry per row of the worker. Entries of rows that are not `active` mean nothing."""

    active: Flags  # the row computes; otherwise it is free, or its sequence waits there to be forked
    num_tokens: Numbers  # tokens of the sequence, including the tokens that steps in flight may sample
    num_known: Numbers  # tokens of the sequence, counting only the results that came
    num_computed: Numbers  # tokens whose keys and values are in the pool once all steps in flight are done
    num_slots: Numbers  # slots of the sequence's block table
    max_len: Numbers  # the sequence ends at this many tokens; the last one is never computed
    order: Numbers  # place of the group in queues
    prefills: Flags  # the row still computes, in chunks, the tokens that it entered with; the last chunk samples
    shares_tail: Flags  # the block that the next token goes to may be shared with a sequence that forked
    dependent: Flags  # the worker draws no token: the scheduler chooses it from the step's result, as in beam search
    incarnation: Numbers  # rises whenever the row is released, so that results for its earlier sequences are dropped

    def __init__(self, max_num_rows: int) -> None:
        self.sequences: list[S | None] = [None] * max_num_rows
        self._free = list(range(max_num_rows))
        for name, declared in get_type_hints(type(self), include_extras=True).items():
            setattr(self, name, np.zeros(max_num_rows, declared.__metadata__[0]))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def occupy(self, sequence: S, order: int) -> int:
        """Gives a sequence the lowest free row, which is not active yet. Returns the row."""
        row = heapq.heappop(self._free)
        self.sequences[row] = sequence
        self.max_len[row], self.order[row] = sequence.max_len, order
        self.shares_tail[row], self.dependent[row] = False, sequence.is_dependent
        sequence.row = row
        return row

    def activate(self, row: int, sequence: S, block_size: int, num_computed: int) -> None:
        """Starts the row's computation. The first `num_computed` tokens of its sequence are computed already."""
        self.active[row] = self.prefills[row] = True
        self.num_tokens[row] = self.num_known[row] = sequence.num_tokens
        self.num_computed[row] = num_computed
        self.num_slots[row] = len(sequence.block_table) * block_size

    def fork(self, parent: int, child: int, block_size: int) -> None:
        """Continues the row `child`, which no step in flight samples, after all tokens of the parent."""
        self.active[child] = True
        self.num_tokens[child] = self.num_computed[child] = self.num_tokens[parent]
        self.num_known[child] = self.num_known[parent]
        self.num_slots[child] = self.num_slots[parent]
        self.prefills[child] = False
        self.shares_tail[[parent, child]] = self.num_tokens[parent] % block_size != 0

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

    def sequences_in(self, rows: Array) -> list[S | None]:
        """The sequence of each row, None if it is free."""
        return [self.sequences[row] for row in rows.tolist()]

    def decoding(self) -> Array:
        """Rows whose input is their own last sample, int64[n], rising."""
        # A sequence that reaches its end with the steps in flight needs no further step.
        num_tokens = self.num_tokens
        can_compute = (num_tokens < self.max_len) & (self.num_computed < num_tokens)
        return (self.active & ~self.prefills & can_compute).nonzero()[0]

    def prefilling(self) -> Array:
        """Rows that compute the tokens that they entered with, int64[n], in queue order, and within a group in rising
        order: the row that computes a shared block comes before the rows that read it."""
        rows = self._that_can_compute((self.active & self.prefills).nonzero()[0])
        return rows[np.argsort(self.order[rows], kind="stable")] if len(rows) > 1 else rows

    def sharing_tail(self) -> Array:
        """Decoding rows whose next token may go to a shared block, int64[n], rising."""
        return self._that_can_compute((self.active & ~self.prefills & self.shares_tail).nonzero()[0])

    def without_slot(self, rows: Array) -> Array:
        """The rows whose next token has no slot in a block yet."""
        return rows[self.num_slots[rows] <= self.num_computed[rows]]

    def num_uncomputed(self, row: int) -> int:
        """Tokens of the row that no planned step computes."""
        return int(self.num_tokens[row] - self.num_computed[row])

    def _that_can_compute(self, rows: Array) -> Array:
        if not len(rows):
            return rows
        num_tokens = self.num_tokens[rows]
        return rows[(num_tokens < self.max_len[rows]) & (self.num_computed[rows] < num_tokens)]
