"""Log probabilities of a prompt's tokens, from the second on, as they come from schedulers."""

from collections.abc import Collection, Iterator

import numpy as np
from numpy.typing import NDArray

from gateway.requests.events import Logprob, PositionLogprobs
from quire.logprob_columns import LogprobColumns


class PromptLogprobs(Collection[PositionLogprobs]):
    """Keeps them as the arrays that they came in: they may be a million, and entries are made where they are read."""

    def __init__(self) -> None:
        self._pieces: list[tuple[NDArray[np.int32], LogprobColumns]] = []
        self._length = 0

    def add(self, token_ids: NDArray[np.int32], columns: LogprobColumns) -> None:
        """The next positions, and the ids of the tokens that stand there, [m]."""
        self._pieces.append((token_ids, columns))
        self._length += len(columns)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[PositionLogprobs]:
        for token_ids, columns in self._pieces:
            yield from _positions(token_ids, columns)

    def __contains__(self, position: object) -> bool:
        return any(each == position for each in self)


def _positions(token_ids: NDArray[np.int32], columns: LogprobColumns) -> Iterator[PositionLogprobs]:
    top_ranks = range(1, columns.top_logprobs.shape[1] + 1)
    arrays = (token_ids, columns.chosen_logprobs, columns.chosen_ranks, columns.top_token_ids, columns.top_logprobs)
    for token_id, logprob, rank, top_ids, top in zip(*(array.tolist() for array in arrays), strict=True):
        yield PositionLogprobs(Logprob(token_id, logprob, rank), tuple(map(Logprob, top_ids, top, top_ranks)))
