"""Log probabilities as columns, and as arrays inside messages."""

import numpy as np
import pytest

from quire.messages.arrays import decode_logprobs, encode_float32, encode_int32, encode_logprobs
from quire.messages.logprob_columns import LogprobColumns, LogprobLog
from quire.rpc.errors import InvalidArgument
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2
from tests.support.logprobs import Line, columns_of, lines_of, log_of

MESSAGES = [
    worker_pb2.TokenLogprobs,
    worker_pb2.RowPromptLogprobs,
    scheduler_pb2.TokenLogprobs,
    scheduler_pb2.PromptLogprobs,
]


def lines(*widths: int) -> list[Line]:
    """Position p has log probability -p and rank p + 1; its i-th most likely token is p + i."""
    return [
        Line(-float(place), place + 1, [place + rank for rank in range(width)], [-float(rank) for rank in range(width)])
        for place, width in enumerate(widths)
    ]


@pytest.mark.parametrize("kind", MESSAGES)
@pytest.mark.parametrize("widths", [[0], [3], [20] * 700, [0, 5, 20, 0, 1]])
def test_what_was_encoded_is_decoded(kind, widths):
    message, sent = kind(), lines(*widths)
    encode_logprobs(columns_of(sent), message)
    received = decode_logprobs(kind.FromString(message.SerializeToString()), vocab_size=720)
    assert (len(received), received.size) == (len(widths), len(widths) + sum(widths))
    assert received.num_bytes == 12 * len(widths) + 8 * sum(widths)
    assert lines_of(received) == sent


def test_lines_of_one_width_are_cut_to_what_each_position_asks_for():
    top = np.arange(6, dtype=np.int32).reshape(2, 3)
    chosen, ranks = np.array([-1.0, -2.0], np.float32), np.array([1, 2], np.int32)
    whole = LogprobColumns.of_lines(chosen, ranks, top, -top.astype(np.float32))
    assert [line.top_token_ids for line in lines_of(whole)] == [[0, 1, 2], [3, 4, 5]]
    cut = LogprobColumns.of_lines(chosen, ranks, top, -top.astype(np.float32), np.array([9, 1]))
    assert [line.top_token_ids for line in lines_of(cut)] == [[0, 1, 2], [3]]
    assert [line.top_logprobs for line in lines_of(cut)] == [[0, -1, -2], [-3]]


def test_positions_are_picked_and_cut_into_consecutive_parts():
    each = lines(2, 0, 3, 1, 0)
    columns = columns_of(each)
    assert [lines_of(part) for part in columns.split([0, 2, 1, 0, 2])] == [[], each[:2], each[2:3], [], each[3:]]
    assert lines_of(columns.part(2, 4)) == each[2:4]
    assert lines_of(columns.part(5, 5)) == []
    for picked in ([], [4], [3, 1, 3]):
        assert lines_of(columns.take(np.array(picked, np.int64))) == [each[place] for place in picked]


def test_a_log_grows_at_the_end_and_is_taken_from_the_front():
    each, log = lines(2, 0, 3, 1, 0, 4), LogprobLog()
    assert len(log.part(0, 0)) == 0
    assert (len(log), log.size, lines_of(log.columns()), lines_of(log.take(3))) == (0, 0, [], [])
    log.append(columns_of(each[:1]))
    log.append(columns_of(each[1:4]))
    before = log.columns()
    assert (len(log), log.size) == (4, 10)
    assert lines_of(log.take(3)) == each[:3]
    log.extend(log_of(each[4:]))
    other = log.copy()
    assert lines_of(log.take(99)) == each[3:]
    assert (len(log), len(other), lines_of(before)) == (0, 3, each[:4])


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"chosen_logprobs": b"", "chosen_ranks": b"", "top_token_ids": b"", "top_logprobs": b""}, "of 0 positions"),
        ({"chosen_logprobs": b"123"}, "chosen_logprobs has 3 bytes"),
        ({"chosen_ranks": encode_int32([1, 0, 1])}, "chosen_ranks holds 0"),
        ({"top_counts": encode_int32([4, 9, -1])}, "top_counts holds -1"),
        ({"top_counts": encode_int32([2**31 - 1] * 3)}, "that sum to 6442450941"),
        ({"top_token_ids": encode_int32(range(6))}, "6 top token ids and 12"),
        ({"top_token_ids": encode_int32([-1] * 12)}, "top_token_ids holds -1"),
        ({"top_token_ids": encode_int32([9] * 12)}, "top_token_ids holds 9"),
        (
            {"top_token_ids": encode_int32(range(4)), "top_logprobs": encode_float32([-1.0] * 4)},
            "of 3 positions come with 3 ranks, 3 counts that sum to 12, 4 top token ids",
        ),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields, reason):
    message = scheduler_pb2.PromptLogprobs()
    encode_logprobs(columns_of(lines(4, 4, 4)), message)
    for name, value in fields.items():
        setattr(message, name, value)
    with pytest.raises(InvalidArgument, match=reason):
        decode_logprobs(message, vocab_size=9)
