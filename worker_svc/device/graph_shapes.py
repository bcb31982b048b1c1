"""For which sizes of a decode batch a graph is recorded, and which of them a batch is padded to. Pure."""

from collections.abc import Iterator
from dataclasses import dataclass

# Steps of more rows gain little: the device works longer on each kernel than the host takes to queue it.
LARGEST_BATCH = 512
# Into how many pieces attention cuts a context is fixed when a graph is recorded, for the longest context that it may
# get. Much shorter ones leave most of the pieces empty, so there is a graph for each four times as long.
SHORTEST_LENGTH = 1024
LENGTH_FACTOR = 4


@dataclass(frozen=True, slots=True)
class GraphShape:
    """What is fixed in a graph: rows of one new token each, and the longest context that any of them may have."""

    num_rows: int
    max_seq_len: int


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """All shapes; both tuples rise."""

    row_counts: tuple[int, ...]
    lengths: tuple[int, ...]

    @classmethod
    def up_to(cls, max_num_rows: int, max_model_len: int) -> "GraphShapes":
        """Those for batches of at most so many rows, and contexts of at most so many tokens."""
        most = min(max_num_rows, LARGEST_BATCH)
        counts = sorted({*(count for count in (1, 2, 4) if count < most), *range(8, most, 8), most})
        lengths = []
        length = SHORTEST_LENGTH
        while length < max_model_len:
            lengths.append(length)
            length *= LENGTH_FACTOR
        return cls(tuple(counts), (*lengths, max_model_len))

    @property
    def largest(self) -> GraphShape:
        return GraphShape(self.row_counts[-1], self.lengths[-1])

    def fit(self, num_rows: int, max_seq_len: int) -> GraphShape | None:
        """The smallest shape that holds such a batch; None where none does."""
        count = next((count for count in self.row_counts if count >= num_rows), None)
        length = next((length for length in self.lengths if length >= max_seq_len), None)
        return None if count is None or length is None else GraphShape(count, length)

    def __iter__(self) -> Iterator[GraphShape]:
        """The largest first: what it allocates, the others can use too."""
        for count in reversed(self.row_counts):
            for length in reversed(self.lengths):
                yield GraphShape(count, length)
