"""Converts log probabilities of tests to columns, and back."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from quire.messages.arrays import LogprobMessage, decode_int32, decode_logprobs, encode_int32, encode_logprobs
from quire.messages.logprob_columns import LogprobColumns, LogprobLog
from quire.scheduler.v1 import scheduler_pb2
from quire.worker.v1 import worker_pb2


class Line(NamedTuple):
    """The log probabilities at one position."""

    logprob: float
    rank: int = 1
    top_token_ids: Sequence[int] = ()
    top_logprobs: Sequence[float] = ()


def columns_of(lines: Iterable[Line]) -> LogprobColumns:
    lines = list(lines)
    return LogprobColumns(
        np.array([line.logprob for line in lines], np.float32),
        np.array([line.rank for line in lines], np.int32),
        np.array([len(line.top_token_ids) for line in lines], np.int32),
        np.array([token_id for line in lines for token_id in line.top_token_ids], np.int32),
        np.array([value for line in lines for value in line.top_logprobs], np.float32),
    )


def lines_of(columns: LogprobColumns | None) -> list[Line]:
    assert columns is not None
    return [
        Line(
            float(each.chosen_logprobs[0]),
            int(each.chosen_ranks[0]),
            each.top_token_ids.tolist(),
            each.top_logprobs.tolist(),
        )
        for each in columns.split([1] * len(columns))
    ]


def log_of(lines: Iterable[Line]) -> LogprobLog:
    log = LogprobLog()
    log.append(columns_of(lines))
    return log


def fill(message: LogprobMessage, lines: Iterable[Line]) -> None:
    encode_logprobs(columns_of(lines), message)


def token_logprobs(lines: dict[int, Line]) -> scheduler_pb2.TokenLogprobs:
    """As a scheduler sends them, by index of the token."""
    message = scheduler_pb2.TokenLogprobs(events=encode_int32(list(lines)))
    fill(message, lines.values())
    return message


def lines_by_event(message: scheduler_pb2.TokenEvents) -> dict[int, Line]:
    """A scheduler's log probabilities of each token, by its index."""
    if not message.HasField("token_logprobs"):
        return {}
    events = decode_int32(message.token_logprobs.events, "events").tolist()
    return dict(zip(events, lines_of(decode_logprobs(message.token_logprobs)), strict=True))


def lines_by_row(result: worker_pb2.StepResult) -> dict[int, Line]:
    """A worker's log probabilities of each row."""
    if not result.HasField("token_logprobs"):
        return {}
    rows = decode_int32(result.rows, "rows")
    samples = decode_int32(result.token_logprobs.samples, "samples")
    return dict(zip(rows[samples].tolist(), lines_of(decode_logprobs(result.token_logprobs)), strict=True))
