"""Arrays inside messages."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.messages.arrays import decode_float32, decode_int32, encode_float32, encode_int32
from quire.rpc.errors import InvalidArgument

INT32 = st.integers(-(2**31), 2**31 - 1)


@given(st.lists(INT32), st.lists(st.floats(width=32, allow_nan=False)))
def test_what_is_encoded_is_decoded(integers: list[int], floats: list[float]) -> None:
    data = encode_int32(integers)
    assert len(data) == 4 * len(integers)
    assert decode_int32(data, "ids").tolist() == integers
    assert decode_float32(encode_float32(floats), "logprobs").tolist() == floats


def test_the_layout_is_little_endian_in_row_order() -> None:
    assert encode_int32([1, -2]) == b"\x01\0\0\0\xfe\xff\xff\xff"
    pairs = np.array([[1, 2], [3, 4]], dtype=np.int64)
    assert encode_int32(pairs.T) == encode_int32([1, 3, 2, 4])
    assert decode_int32(encode_int32(pairs), "pairs", columns=2).tolist() == [[1, 2], [3, 4]]


def test_a_decoded_array_is_a_view_that_cannot_be_written_and_no_values_are_an_empty_one() -> None:
    array = decode_int32(encode_int32([1, 2]), "ids")
    assert array.dtype == np.int32
    assert not array.flags.writeable
    assert decode_int32(b"", "pairs", columns=2, minimum=0, below=1).shape == (0, 2)


def test_a_value_beyond_int32_and_one_that_is_no_integer_are_refused() -> None:
    for value in (2**31, -(2**31) - 1):
        with pytest.raises(OverflowError):
            encode_int32([value])
    with pytest.raises(TypeError):
        encode_int32(np.array([1.5]))


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ([0, 7, 3], {"below": 7}, "block_ids holds 7; values must be below 7"),
        ([0, -1], {"minimum": 0}, "block_ids holds -1; the least value is 0"),
        ([1, 2, 3], {"columns": 2}, "block_ids has 12 bytes; expected a multiple of 8"),
    ],
)
def test_an_error_names_field_value_and_limit(values: list[int], options: dict[str, int], message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        decode_int32(encode_int32(values), "block_ids", **options)
    assert caught.value.message == message
    assert caught.value.violations[0].field == "block_ids"


def test_a_length_that_is_not_whole_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="logprobs has 3 bytes; expected a multiple of 4"):
        decode_float32(b"123", "logprobs")
