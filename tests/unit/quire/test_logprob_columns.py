"""Log probabilities as arrays inside messages."""

import numpy as np
import pytest

from quire.arrays import encode_float32, encode_int32
from quire.logprob_columns import LogprobColumns
from quire.rpc.errors import InvalidArgument
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2


def columns(num_positions: int, num_top: int) -> LogprobColumns:
    """Position p has log probability -p and rank p + 1; its i-th most likely token is p + i."""
    positions, top = np.arange(num_positions, dtype=np.int32), np.arange(num_top, dtype=np.int32)
    top_ids = positions[:, None] + top
    return LogprobColumns(-positions.astype(np.float32), positions + 1, top_ids, -top_ids.astype(np.float32))


@pytest.mark.parametrize("kind", [worker_pb2.RowPromptLogprobs, scheduler_pb2.PromptLogprobs])
@pytest.mark.parametrize(("num_positions", "num_top"), [(1, 0), (1, 3), (700, 20)])
def test_what_was_encoded_is_decoded(kind, num_positions, num_top):
    message, sent = kind(), columns(num_positions, num_top)
    sent.encode(message)
    received = LogprobColumns.decode(kind.FromString(message.SerializeToString()), vocab_size=720)
    assert (len(received), received.size) == (num_positions, num_positions * (1 + num_top))
    for name in ("chosen_logprobs", "chosen_ranks", "top_token_ids", "top_logprobs"):
        np.testing.assert_array_equal(getattr(received, name), getattr(sent, name), strict=True)


def test_the_first_positions_can_be_left_out():
    rest = columns(5, 2).without_first(3)
    assert rest.chosen_ranks.tolist() == [4, 5]
    assert rest.top_token_ids.tolist() == [[3, 4], [4, 5]]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chosen_logprobs": b"", "chosen_ranks": b"", "top_token_ids": b"", "top_logprobs": b""}, "of 0 positions"),
        ({"chosen_logprobs": b"123"}, "chosen_logprobs has 3 bytes"),
        ({"chosen_ranks": encode_int32([1])}, "1 ranks"),
        ({"chosen_ranks": encode_int32([1, 0, 1])}, "chosen_ranks holds 0"),
        ({"top_token_ids": encode_int32(range(6))}, "6 top token ids and 12"),
        ({"top_token_ids": encode_int32([-1] * 12)}, "top_token_ids holds -1"),
        ({"top_token_ids": encode_int32([9] * 12)}, "top_token_ids holds 9"),
        (
            {"top_token_ids": encode_int32(range(4)), "top_logprobs": encode_float32([-1.0] * 4)},
            "of 3 positions come with 3 ranks, 4 top token ids",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, reason):
    message = scheduler_pb2.PromptLogprobs()
    columns(3, 4).encode(message)
    for name, value in fields.items():
        setattr(message, name, value)
    with pytest.raises(InvalidArgument, match=reason):
        LogprobColumns.decode(message, vocab_size=9)
