"""Blocks of the layers that have windows, in the block tables of sequences.

A windowed group of layers has blocks only for the window and for the tokens that the next steps compute. The other
entries of its tables name the `blank` block, which stands for blocks that no layer reads.
"""

from collections.abc import Callable

from scheduler_svc.core.config import SchedulerConfig
from scheduler_svc.core.paging.block_pool import BlockId
from scheduler_svc.core.prefix_index import PrefixIndex
from scheduler_svc.core.sequence import Sequence


class Windows:
    """Gives sequences blocks of the windowed groups, and frees them.

    Attributes:
        blank: The blank block; empty if no layer has a window.
        blanks: The entries of a table for blocks that no layer reads, one for each windowed group.
        reach: Blocks of a windowed group that a sequence gets at first.
    """

    def __init__(self, config: SchedulerConfig, pool: PrefixIndex) -> None:
        self._layout, self._pool = config.layout, pool
        self.reach = config.windows_reach
        blank = [pool.take_blank()] if config.windowed_groups else []
        self.blank = frozenset(blank)
        self.blanks = blank * config.windowed_groups

    def first_end(self, first: int, end: int, sequence: Sequence) -> int:
        """The logical index up to which a sequence that computes its blocks from `first` to before `end` has blocks of
        the windowed groups at first."""
        if sequence.request.num_sequences > 1:
            return end
        return min(end, self._layout.first_block_read(first * self._layout.block_size) + self.reach)

    def max_at_first(self, first: int, end: int, sequence: Sequence) -> int:
        """The maximum number of blocks of a windowed group that such a sequence takes at first if the host may have
        further blocks of it. The sequence then takes one more window: the one before its first computed token."""
        return end - first if sequence.request.num_sequences > 1 else min(end - first, self.reach)

    def extend(self, sequence: Sequence, end: int, take: Callable[[int], list[BlockId]]) -> list[tuple[int, BlockId]]:
        """Gives a sequence blocks of the windowed groups up to the logical index `end`. Returns their places in its
        table, and the blocks. Raises what `take` raises."""
        table, layout = sequence.block_table, self._layout
        places = [
            index * layout.num_groups + group
            for index in range(sequence.windows_end, end)
            for group in range(layout.num_full, layout.num_groups)
        ]
        blocks = take(len(places))
        self._pool.free([table[place] for place in places])
        for place, block in zip(places, blocks, strict=True):
            table[place] = block
        sequence.windows_end = max(end, sequence.windows_end)
        return list(zip(places, blocks, strict=True))

    def free_before(self, table: list[BlockId], first: int, end: int) -> None:
        """Frees the blocks of the windowed groups in a table, with logical indices from `first` to before `end`."""
        size, blanks = self._layout.num_groups, self.blanks * (end - first)
        self._pool.touch(blanks)
        for group in range(self._layout.num_full, size):
            places = slice(first * size + group, end * size, size)
            self._pool.free(table[places])
            table[places] = blanks[: end - first]
