"""Values that no message can hold are refused before they are sent, by field, value and range."""

import pytest

from quire.client import GenerationOptions
from quire.client.convert import to_generate_request
from quire.gateway.v1 import generation_pb2
from quire.rpc.errors import InvalidArgument


@pytest.mark.parametrize(
    ("field", "value", "limits"),
    [
        ("seed", -1, "[0, 18,446,744,073,709,551,615]"),
        ("seed", 2**64, "[0, 18,446,744,073,709,551,615]"),
        ("top_k", -1, "[0, 4,294,967,295]"),
        ("max_tokens", 2**32, "[0, 4,294,967,295]"),
        ("n", 1.5, "[0, 4,294,967,295]"),
        ("stop_token_ids", [1, -1], "[0, 4,294,967,295]"),
    ],
)
def test_a_whole_number_out_of_range_is_refused_with_its_range(field, value, limits):
    message = generation_pb2.GenerateRequest()
    with pytest.raises(InvalidArgument) as refused:
        to_generate_request(message, "hello", GenerationOptions(**{field: value}))
    assert f"{field} is {value}" in refused.value.message
    assert limits in refused.value.message
    assert [violation.field for violation in refused.value.violations] == [field]


def test_other_values_of_a_wrong_type_are_refused_in_protobuf_s_words():
    with pytest.raises(InvalidArgument, match="temperature is 'hot', which its field cannot hold"):
        to_generate_request(generation_pb2.GenerateRequest(), "hello", GenerationOptions(temperature="hot"))
