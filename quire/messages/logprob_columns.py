"""Log probabilities as columns: the form in which all processes keep and send them, from the worker to the answer.

A position is a token and the most likely tokens at its place. It takes 12 bytes and 8 more for each of the most likely
tokens; Python objects are made where an answer is written, a few positions at a time.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")
_DTYPES = {
    "chosen_logprobs": _FLOAT32,
    "chosen_ranks": _INT32,
    "top_counts": _INT32,
    "top_token_ids": _INT32,
    "top_logprobs": _FLOAT32,
}
"""The dtypes of the columns as they are stored, in their order."""

POSITION_BYTES = 12
"""The bytes of a position without the most likely tokens."""

TOP_BYTES = 8
"""The bytes of each of the most likely tokens at a position."""


@dataclass(frozen=True, slots=True, eq=False)
class LogprobColumns:
    """Log probabilities at m positions, of the token that stands there and of the most likely ones, best first.

    How many of the most likely tokens there are may differ from position to position; t is their sum.
    """

    chosen_logprobs: NDArray[np.float32]
    """[m]"""
    chosen_ranks: NDArray[np.int32]
    """[m], 1 for the most likely token."""
    top_counts: NDArray[np.int32]
    """[m], number of the most likely tokens at each position."""
    top_token_ids: NDArray[np.int32]
    """[t], position by position."""
    top_logprobs: NDArray[np.float32]
    """[t], position by position."""

    @classmethod
    def of_lines(
        cls,
        chosen_logprobs: NDArray[np.float32],
        chosen_ranks: NDArray[np.int32],
        top_token_ids: NDArray[np.int32],
        top_logprobs: NDArray[np.float32],
        top_counts: NDArray[np.integer] | None = None,
    ) -> Self:
        """From lines of equal width, [m, k]; with `top_counts` a position has only this number of its line's items."""
        num_positions, width = top_token_ids.shape
        if top_counts is None:
            counts = np.full(num_positions, width, np.int32)
            return cls(chosen_logprobs, chosen_ranks, counts, top_token_ids.ravel(), top_logprobs.ravel())
        counts = np.minimum(top_counts, width).astype(np.int32)
        kept = np.arange(width) < counts[:, None]
        return cls(chosen_logprobs, chosen_ranks, counts, top_token_ids[kept], top_logprobs[kept])

    def __len__(self) -> int:
        """Number of positions."""
        return len(self.chosen_logprobs)

    @property
    def size(self) -> int:
        """Number of log probabilities."""
        return len(self) + len(self.top_logprobs)

    @property
    def num_bytes(self) -> int:
        """The bytes of the columns."""
        return POSITION_BYTES * len(self) + TOP_BYTES * len(self.top_logprobs)

    def part(self, begin: int, end: int) -> Self:
        """The positions from `begin` to `end`, exclusive, as views."""
        first = int(self.top_counts[:begin].sum())
        return self._view(begin, end, first, first + int(self.top_counts[begin:end].sum()))

    def split(self, lengths: Iterable[int]) -> Iterator[Self]:
        """Consecutive parts with these numbers of positions, as views."""
        top_ends = np.cumsum(self.top_counts)
        begin = top_begin = 0
        for length in lengths:
            end = begin + length
            top_end = int(top_ends[end - 1]) if end else 0
            yield self._view(begin, end, top_begin, top_end)
            begin, top_begin = end, top_end

    def take(self, positions: NDArray[np.integer]) -> Self:
        """The positions with these indices, in their order."""
        if len(positions) == len(self) and np.array_equal(positions, np.arange(len(self))):
            return self
        counts = self.top_counts[positions]
        starts = (np.cumsum(self.top_counts) - self.top_counts)[positions]
        # The source index of each entry of the result: within a position they are consecutive.
        sources = np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(int(counts.sum()))
        return type(self)(
            self.chosen_logprobs[positions],
            self.chosen_ranks[positions],
            counts,
            self.top_token_ids[sources],
            self.top_logprobs[sources],
        )

    def _view(self, begin: int, end: int, top_begin: int, top_end: int) -> Self:
        return type(self)(
            self.chosen_logprobs[begin:end],
            self.chosen_ranks[begin:end],
            self.top_counts[begin:end],
            self.top_token_ids[top_begin:top_end],
            self.top_logprobs[top_begin:top_end],
        )


class LogprobLog:
    """Positions in the order in which they came: added at the end, taken from the front."""

    # The columns' bytes, in the order of the fields of LogprobColumns; none before the first position.
    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers: tuple[bytearray, ...] = ()

    def __len__(self) -> int:
        """Number of positions."""
        return len(self._buffers[0]) // _FLOAT32.itemsize if self._buffers else 0

    @property
    def size(self) -> int:
        """Number of log probabilities."""
        return len(self) + len(self._buffers[-1]) // _FLOAT32.itemsize if self._buffers else 0

    def append(self, columns: LogprobColumns) -> None:
        """Copies the columns to the end."""
        self._add(getattr(columns, name).astype(dtype, copy=False).tobytes() for name, dtype in _DTYPES.items())

    def extend(self, other: "LogprobLog") -> None:
        """Copies all of another one to the end."""
        self._add(other._buffers)

    def copy(self) -> "LogprobLog":
        copied = LogprobLog()
        copied.extend(self)
        return copied

    def columns(self) -> LogprobColumns:
        """All positions, as a copy."""
        return _columns_of(map(bytes, self._buffers or [b""] * 5))

    def part(self, begin: int, end: int) -> LogprobColumns:
        """Copies only the positions from `begin` to `end`, exclusive."""
        if not self._buffers:
            return self.columns()
        counts = np.frombuffer(self._buffers[2][: end * _INT32.itemsize], _INT32)
        first_top = int(counts[:begin].sum())
        places = (slice(begin, end),) * 3 + (slice(first_top, first_top + int(counts[begin:].sum())),) * 2
        return _columns_of(
            bytes(buffer[place.start * _INT32.itemsize : place.stop * _INT32.itemsize])
            for buffer, place in zip(self._buffers, places, strict=True)
        )

    def take(self, num_positions: int) -> LogprobColumns:
        """Removes the first positions and returns them; all if there are no more."""
        if num_positions >= len(self):
            taken, self._buffers = self.columns(), ()
            return taken
        taken = self.part(0, num_positions)
        lengths = (num_positions,) * 3 + (len(taken.top_logprobs),) * 2
        for buffer, length in zip(self._buffers, lengths, strict=True):
            del buffer[: length * _INT32.itemsize]
        return taken

    def _add(self, columns: Iterable[bytes | bytearray]) -> None:
        if not self._buffers:
            self._buffers = tuple(bytearray(column) for column in columns)
            return
        for buffer, column in zip(self._buffers, columns, strict=False):
            buffer += column


def _columns_of(columns: Iterable[bytes]) -> LogprobColumns:
    arrays: Iterable[NDArray[Any]] = map(np.frombuffer, columns, _DTYPES.values())
    return LogprobColumns(*arrays)
