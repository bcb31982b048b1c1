"""What a worker says of a step is checked before the core sees it."""

import numpy as np
import pytest

from quire.arrays import encode_int32
from quire.compatibility import WORKER_PROTOCOL
from quire.rpc.errors import InvalidArgument
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.step import StepInFlight
from scheduler_svc.service.worker_messages import replica_info, step_answer
from tests.support.logprobs import Line, fill, lines_of

VOCAB_SIZE = 50


def make_logprobs(sample: int, token_ids: tuple[int, ...] = (11,)) -> worker_pb2.TokenLogprobs:
    message = worker_pb2.TokenLogprobs(samples=encode_int32([sample]))
    fill(message, [Line(-0.5, 1, [11], [-0.5])])
    message.top_token_ids = encode_int32(list(token_ids))
    return message


def make_result(**changes) -> worker_pb2.StepResult:
    """Rows 4 and 2 drew tokens 11 and 12."""
    fields = {"step_id": 7, "rows": encode_int32([4, 2]), "token_ids": encode_int32([11, 12])}
    return worker_pb2.StepResult(**(fields | changes))


def make_step(*rows: int) -> StepInFlight:
    zeros, none = np.zeros(len(rows), dtype=np.int64), np.zeros(0, dtype=np.int64)
    return StepInFlight(7, np.array(rows, dtype=np.int64), zeros, zeros, none, none, none, 0.0, False)


def test_tokens_and_log_probabilities_are_those_of_their_rows():
    answer = step_answer(make_result(token_logprobs=make_logprobs(1, token_ids=(12,))), VOCAB_SIZE)
    assert (answer.rows.tolist(), answer.result.token_ids.tolist()) == ([4, 2], [11, 12])
    logprobs = answer.result.logprobs
    assert logprobs.of_sample(0) is None
    assert lines_of(logprobs.of_sample(1)) == [Line(-0.5, 1, [12], [-0.5])]
    answer.check_rows(make_step(4, 2))


def test_a_step_that_samples_nothing_has_no_rows():
    answer = step_answer(worker_pb2.StepResult(step_id=7), VOCAB_SIZE)
    answer.check_rows(make_step())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": b"\1"}, "rows"),
        ({"token_ids": encode_int32([11, VOCAB_SIZE])}, "token_ids"),
        ({"token_logprobs": make_logprobs(0, token_ids=(1, 2))}, "2 top token ids and 1 top log prob"),
        ({"token_logprobs": make_logprobs(0, token_ids=(VOCAB_SIZE,))}, "top_token_ids"),
        ({"candidates": [worker_pb2.RowCandidates(row=4, token_ids=b"1")]}, "candidates.token_ids"),
    ],
)
def test_what_makes_no_sense_is_refused(changes, words):
    with pytest.raises(InvalidArgument, match=words):
        step_answer(make_result(**changes), VOCAB_SIZE)


@pytest.mark.parametrize("rows", [(2, 4), (4,), (4, 3)])
def test_rows_that_are_not_those_of_the_plan_are_refused_by_name(rows):
    with pytest.raises(ValueError, match=r"step 7 has rows \[4, 2\]; step 7 samples"):
        step_answer(make_result(), VOCAB_SIZE).check_rows(make_step(*rows))


def make_info() -> worker_pb2.WorkerInfo:
    return worker_pb2.WorkerInfo(
        protocol=WORKER_PROTOCOL.message(),
        pool=worker_pb2.KvPoolGeometry(block_size=16, num_gpu_blocks=1, num_host_blocks=0),
        model=worker_pb2.ModelGeometry(vocab_size=50, max_model_len=128),
        limits=worker_pb2.WorkerLimits(max_num_rows=1, max_num_batched_tokens=1, max_steps_in_flight=1),
    )


@pytest.mark.parametrize(
    ("field", "least", "greatest"),
    [
        ("pool.num_gpu_blocks", 1, 2**24),
        ("pool.num_host_blocks", 0, 2**24),
        ("pool.block_size", 1, 2**16),
        ("model.vocab_size", 1, 2**31 - 1),
        ("model.max_model_len", 1, 2**31 - 1),
        ("limits.max_num_rows", 1, 2**31 - 1),
        ("limits.max_num_batched_tokens", 1, 2**31 - 1),
        ("limits.max_steps_in_flight", 1, 2**31 - 1),
    ],
)
def test_a_worker_whose_numbers_make_no_sense_is_refused_by_name_before_tables_are_made(field, least, greatest):
    part, name = field.split(".")
    for value in (least - 1, greatest + 1):
        info = make_info()
        if 0 <= value < 2**32:
            setattr(getattr(info, part), name, value)
            with pytest.raises(InvalidArgument, match=f"info.{field} is {value}; a scheduler works with {least} to"):
                replica_info(info)
    for value in (least, greatest):
        info = make_info()
        setattr(getattr(info, part), name, value)
        replica_info(info)
