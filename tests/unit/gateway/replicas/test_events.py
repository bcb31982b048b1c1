"""The scheduler's messages become values; malformed ones are refused."""

from typing import Any

import pytest

from gateway.replicas.events import (
    ALREADY_TAKEN_OVER,
    FinishReason,
    Logprob,
    PositionLogprobs,
    TokenLogprobs,
    event_batch_from,
)
from quire.common.v1 import common_pb2
from quire.messages.arrays import encode_int32
from quire.rpc.errors import InvalidArgument, ResourceExhausted
from quire.scheduler.v1 import scheduler_pb2
from tests.support.logprobs import Line, fill, lines_of, token_logprobs


def make_events(rows, **fields):
    names = ("handles", "sequence_indices", "offsets", "token_ids")
    columns: dict[str, Any] = {name: encode_int32([row[i] for row in rows]) for i, name in enumerate(names)}
    return scheduler_pb2.TokenEvents(**columns, **fields)


def logprobs(*events):
    return token_logprobs({event: Line(-float(event), 2, [event], [-0.5]) for event in events})


def test_consecutive_tokens_of_one_sequence_are_one_run_also_those_of_several_steps():
    rows = [(1, 0, 5, 50), (1, 0, 6, 51), (2, 0, 0, 60), (1, 0, 7, 52), (2, 1, 0, 70), (2, 1, 2, 71)]
    runs = event_batch_from(make_events(rows)).runs
    assert [(run.handle, run.sequence_index, run.offset, run.token_ids) for run in runs] == [
        (1, 0, 5, [50, 51, 52]),
        (2, 0, 0, [60]),
        (2, 1, 0, [70]),
        (2, 1, 2, [71]),
    ]


def test_logprobs_go_to_their_tokens():
    rows = [(1, 0, 0, 50), (2, 0, 0, 60), (2, 0, 1, 61)]
    plain, reported = event_batch_from(make_events(rows, token_logprobs=logprobs(1, 2))).runs
    assert plain.logprobs is None
    assert lines_of(reported.logprobs) == [Line(-1.0, 2, [1], [-0.5]), Line(-2.0, 2, [2], [-0.5])]


def prompt_logprobs(token_ids):
    message = scheduler_pb2.PromptLogprobs(handle=1, first_position=4, token_ids=encode_int32(token_ids))
    fill(message, [Line(-1.0, 3, [7], [-0.5]), Line(-2.0, 1, [8], [-0.25])])
    return message


def test_logprobs_of_a_prompt_are_read_position_by_position():
    (run,) = event_batch_from(make_events([], prompt_logprobs=[prompt_logprobs([50, 60])])).prompt_runs
    assert (run.handle, run.first_position) == (1, 4)
    taken = TokenLogprobs()
    taken.add(run.token_ids, run.columns)
    taken.add(run.token_ids[1:], run.columns.part(1, 2))
    first = PositionLogprobs(Logprob(50, -1.0, 3), (Logprob(7, -0.5, 1),))
    second = PositionLogprobs(Logprob(60, -2.0, 1), (Logprob(8, -0.25, 1),))
    assert list(taken) == [first, second, second]
    assert (len(taken), first in taken, first._replace(top=()) in taken) == (3, True, False)


def test_ends_and_failures():
    end = scheduler_pb2.SequenceEnd(handle=1, num_tokens=3, reason=common_pb2.FINISH_REASON_STOP, stop_token_id=0)
    failure = scheduler_pb2.RequestFailure(handle=2, code=8, reason="QUEUE_FULL", message="full", retry_after_ms=5)
    batch = event_batch_from(make_events([], finished=[end], failed=[failure]))
    assert (batch.ended[0].reason, batch.ended[0].stop_token_id) == (FinishReason.STOP, 0)
    assert batch.ended[0].cumulative_logprob is None
    error = batch.failed[0].error
    assert isinstance(error, ResourceExhausted)
    assert (error.reason, error.message, error.retry_after_ms) == ("QUEUE_FULL", "full", 5)
    assert not error.metadata
    failure.already_taken_over = True
    (failed,) = event_batch_from(make_events([], failed=[failure])).failed
    assert failed.error.metadata == {ALREADY_TAKEN_OVER: "true"}


MALFORMED = {
    "length": scheduler_pb2.TokenEvents(handles=b"\0\0\0"),
    "columns": scheduler_pb2.TokenEvents(handles=encode_int32([1, 2]), offsets=encode_int32([0])),
    "handle": make_events([(-1, 0, 0, 5)]),
    "token": make_events([(1, 0, 0, -5)]),
    "event index": make_events([(1, 0, 0, 5)], token_logprobs=logprobs(1)),
    "logprobs missing": make_events([(1, 0, 0, 5), (1, 0, 1, 6)], token_logprobs=logprobs(0)),
    "no reason": make_events([], finished=[scheduler_pb2.SequenceEnd(handle=1)]),
    "prompt ids": make_events([], prompt_logprobs=[prompt_logprobs([50])]),
    "prompt id": make_events([], prompt_logprobs=[prompt_logprobs([50, -1])]),
    "no prompt position": make_events([], prompt_logprobs=[scheduler_pb2.PromptLogprobs(handle=1)]),
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_malformed_events_are_refused(fault):
    with pytest.raises(InvalidArgument):
        event_batch_from(MALFORMED[fault])
