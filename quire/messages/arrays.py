"""Arrays inside messages: little-endian int32 or float32, flattened, in a `bytes` field."""

import sys
from array import array as packed_array
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from quire.messages.logprob_columns import LogprobColumns
from quire.rpc.errors import InvalidArgument, invalid_field

_INT32 = np.dtype("<i4")
_UINT32 = np.dtype("<u4")
_END_OF_INT32 = 2**31
_FLOAT32 = np.dtype("<f4")


def encode_int32(values: NDArray[np.integer] | Sequence[int]) -> bytes:
    """The values as int32, in C order. OverflowError when one does not fit."""
    if not len(values):
        return b""
    if not isinstance(values, np.ndarray):
        packed = packed_array("i", values)
        if sys.byteorder != "little":
            packed.byteswap()
        return packed.tobytes()
    if values.dtype.kind not in "iu":
        raise TypeError(f"encode_int32 got {values.dtype}")
    narrow = values.astype(_INT32, copy=False)
    if values.dtype != _INT32 and np.count_nonzero(narrow != values):
        raise OverflowError("a value does not fit in int32")
    return narrow.tobytes()


def decode_int32(
    data: bytes, field: str, *, minimum: int | None = None, below: int | None = None, columns: int = 1
) -> NDArray[np.int32]:
    """The int32 array of shape [n], or [n, columns], in `data`; a read-only view of it.

    Args:
        data: The field's value.
        field: The field's name, for errors.
        minimum: The least value allowed.
        below: All values must be less than this.
        columns: Values of one row, 2 for pairs.

    Raises:
        InvalidArgument: the length does not fit whole rows, or a value is out of range.
    """
    array = _decode(data, field, _INT32, columns)
    if data and (minimum is not None or below is not None):
        if minimum == 0 and int(array.view(_UINT32).max()) < (_END_OF_INT32 if below is None else below):
            # The usual case takes one pass: as unsigned numbers, negative ones are above all others.
            return array
        least, greatest = int(array.min()), int(array.max())
        if minimum is not None and least < minimum:
            raise invalid_field(field, f"holds {least}; the least value is {minimum}")
        if below is not None and greatest >= below:
            raise invalid_field(field, f"holds {greatest}; values must be below {below}")
    return array


def encode_float32(values: NDArray[np.floating] | Sequence[float]) -> bytes:
    """The values as float32, in C order."""
    return np.asarray(values, dtype=_FLOAT32).tobytes()


def decode_float32(data: bytes, field: str) -> NDArray[np.float32]:
    """The float32 array of shape [n] in `data`; a read-only view of it.

    NaN and infinities pass: log probabilities may be -inf.

    Raises:
        InvalidArgument: the length does not fit whole numbers.
    """
    return _decode(data, field, _FLOAT32, columns=1)


class LogprobMessage(Protocol):
    """A message with the fields of log probabilities at some positions."""

    chosen_logprobs: bytes
    chosen_ranks: bytes
    top_counts: bytes
    top_token_ids: bytes
    top_logprobs: bytes


def encode_logprobs(columns: LogprobColumns, message: LogprobMessage) -> None:
    message.chosen_logprobs = encode_float32(columns.chosen_logprobs)
    message.chosen_ranks = encode_int32(columns.chosen_ranks)
    message.top_counts = encode_int32(columns.top_counts)
    message.top_token_ids = encode_int32(columns.top_token_ids)
    message.top_logprobs = encode_float32(columns.top_logprobs)


def decode_logprobs(message: LogprobMessage, *, vocab_size: int | None = None) -> LogprobColumns:
    """The arrays in the message's fields, as read-only views.

    Raises:
        InvalidArgument: there is no position, the fields do not fit each other, or an id is not in the vocabulary.
    """
    chosen = decode_float32(message.chosen_logprobs, "chosen_logprobs")
    ranks = decode_int32(message.chosen_ranks, "chosen_ranks", minimum=1)
    counts = decode_int32(message.top_counts, "top_counts", minimum=0)
    top_ids = decode_int32(message.top_token_ids, "top_token_ids", minimum=0, below=vocab_size)
    top = decode_float32(message.top_logprobs, "top_logprobs")
    num_top = int(counts.sum(dtype=np.int64))
    if not len(chosen) or not len(ranks) == len(counts) == len(chosen) or not len(top_ids) == len(top) == num_top:
        raise InvalidArgument(
            f"log probabilities of {len(chosen)} positions come with {len(ranks)} ranks, {len(counts)} counts that sum "
            f"to {num_top}, {len(top_ids)} top token ids and {len(top)} top log probabilities"
        )
    return LogprobColumns(chosen, ranks, counts, top_ids, top)


def _decode(data: bytes, field: str, dtype: DTypeLike, columns: int) -> NDArray:
    row_bytes = 4 * columns
    if len(data) % row_bytes:
        raise invalid_field(field, f"has {len(data)} bytes; expected a multiple of {row_bytes}")
    array = np.frombuffer(data, dtype=dtype)
    return array if columns == 1 else array.reshape(-1, columns)
