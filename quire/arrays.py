"""Arrays inside messages: little-endian int32 or float32, flattened, in a `bytes` field."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from quire.rpc.errors import invalid_field

_INT32 = np.dtype("<i4")
_FLOAT32 = np.dtype("<f4")


def encode_int32(values: NDArray[np.integer] | Sequence[int]) -> bytes:
    """The values as int32, in C order. OverflowError when one does not fit."""
    array = np.asarray(values)
    if array.dtype != _INT32:
        if array.size and not np.issubdtype(array.dtype, np.integer):
            raise TypeError(f"encode_int32 got {array.dtype}")
        limits = np.iinfo(_INT32)
        if array.size and (array.min() < limits.min or array.max() > limits.max):
            raise OverflowError("a value does not fit in int32")
    return array.astype(_INT32, copy=False).tobytes()


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
        InvalidArgument: the length is not that of whole rows, or a value is out of range.
    """
    array = _decode(data, field, _INT32, columns)
    if array.size and minimum is not None and array.min() < minimum:
        raise invalid_field(field, f"holds {array.min()}; the least value is {minimum}")
    if array.size and below is not None and array.max() >= below:
        raise invalid_field(field, f"holds {array.max()}; values must be below {below}")
    return array


def encode_float32(values: NDArray[np.floating] | Sequence[float]) -> bytes:
    """The values as float32, in C order."""
    return np.asarray(values, dtype=_FLOAT32).tobytes()


def decode_float32(data: bytes, field: str, *, columns: int = 1) -> NDArray[np.float32]:
    """The float32 array of shape [n], or [n, columns], in `data`; a read-only view of it.

    NaN and infinities pass: log probabilities may be -inf.

    Raises:
        InvalidArgument: the length is not that of whole rows.
    """
    return _decode(data, field, _FLOAT32, columns)


def _decode(data: bytes, field: str, dtype: DTypeLike, columns: int) -> NDArray:
    row_bytes = 4 * columns
    if len(data) % row_bytes:
        raise invalid_field(field, f"has {len(data)} bytes; expected a multiple of {row_bytes}")
    array = np.frombuffer(data, dtype=dtype)
    return array if columns == 1 else array.reshape(-1, columns)
