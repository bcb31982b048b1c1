"""Log probabilities of tokens, kept as the columns that they came in and read position by position."""

from collections.abc import Collection, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from gateway.requests.events import Logprob, PositionLogprobs
from quire.logprob_columns import LogprobColumns

# So many positions are made objects of at once.
_PIECE = 64

TokenIds = Sequence[int] | NDArray[np.int32]


class TokenLogprobs(Collection[PositionLogprobs]):
    """There may be a million, so entries are made while they are read, and kept by nobody."""

    def __init__(self, token_ids: TokenIds = (), columns: LogprobColumns | None = None) -> None:
        """The tokens that stand at the first positions, [m], and their log probabilities."""
        self._pieces: list[tuple[TokenIds, LogprobColumns]] = []
        self._length = 0
        if columns is not None:
            self.add(token_ids, columns)

    def add(self, token_ids: TokenIds, columns: LogprobColumns) -> None:
        """The next positions, and the ids of the tokens that stand there, [m]."""
        self._pieces.append((token_ids, columns))
        self._length += len(columns)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PositionLogprobs]:
        for token_ids, columns in self._pieces:
            begins = range(0, len(columns), _PIECE)
            parts = columns.split(min(_PIECE, len(columns) - begin) for begin in begins)
            for begin, part in zip(begins, parts, strict=True):
                yield from _positions(token_ids[begin : begin + _PIECE], part)

    def __contains__(self, position: object) -> bool:
        return any(each == position for each in self)


def _positions(token_ids: TokenIds, columns: LogprobColumns) -> Iterator[PositionLogprobs]:
    top_ids, top = columns.top_token_ids.tolist(), columns.top_logprobs.tolist()
    begin = 0
    arrays = (columns.chosen_logprobs, columns.chosen_ranks, columns.top_counts)
    for token_id, logprob, rank, count in zip(token_ids, *(array.tolist() for array in arrays), strict=True):
        end = begin + count
        best = map(Logprob, top_ids[begin:end], top[begin:end], range(1, count + 1))
        yield PositionLogprobs(Logprob(int(token_id), logprob, rank), tuple(best))
        begin = end
