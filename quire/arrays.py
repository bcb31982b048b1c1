"""Arrays inside messages: little-endian int32 or float32, flattened, in a `bytes` field."""

import sys
from array import array as packed_array
from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike, NDArray

from quire.rpc.errors import invalid_field

_INT32 = np.dtype("<i4")
_INT32_LIMITS = np.iinfo(np.int32)
_FLOAT32 = np.dtype("<f4")
# Up to so many bytes Python finds the least and the greatest value in less time than numpy takes to begin.
_FEW_BYTES = 256


def encode_int32(values: NDArray[np.integer] | Sequence[int]) -> bytes:
    """The values as int32, in C order. OverflowError when one does not fit."""
    if not isinstance(values, np.ndarray):
        packed = packed_array("i", values)
        if sys.byteorder != "little":
            packed.byteswap()
        return packed.tobytes()
    if values.dtype != _INT32 and values.size:
        if not np.issubdtype(values.dtype, np.integer):
            raise TypeError(f"encode_int32 got {values.dtype}")
        if values.min() < _INT32_LIMITS.min or values.max() > _INT32_LIMITS.max:
            raise OverflowError("a value does not fit in int32")
    return values.astype(_INT32, copy=False).tobytes()


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
    if data and (minimum is not None or below is not None):
        least, greatest = _range_of(data, array)
        if minimum is not None and least < minimum:
            raise invalid_field(field, f"holds {least}; the least value is {minimum}")
        if below is not None and greatest >= below:
            raise invalid_field(field, f"holds {greatest}; values must be below {below}")
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


def _range_of(data: bytes, array: NDArray[np.int32]) -> tuple[int, int]:
    if len(data) <= _FEW_BYTES and sys.byteorder == "little":
        values = memoryview(data).cast("i")
        return min(values), max(values)
    return int(array.min()), int(array.max())


def _decode(data: bytes, field: str, dtype: DTypeLike, columns: int) -> NDArray:
    row_bytes = 4 * columns
    if len(data) % row_bytes:
        raise invalid_field(field, f"has {len(data)} bytes; expected a multiple of {row_bytes}")
    array = np.frombuffer(data, dtype=dtype)
    return array if columns == 1 else array.reshape(-1, columns)
