"""A worker's answer to a step is checked before the core sees it; a loss's cause says if the step is at fault."""

import asyncio
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from quire.messages.arrays import encode_int32
from quire.rpc.errors import FailedPrecondition, Internal, InvalidArgument, QuireError, Unavailable, to_rpc_status
from quire.service.compatibility import WORKER_PROTOCOL, ModelFingerprint, epoch_of_start
from quire.worker.v1 import worker_pb2
from scheduler_svc.core.step import StepInFlight
from scheduler_svc.service.replica import core_config
from scheduler_svc.service.worker_link import WorkerHangsError, WorkerLostError
from scheduler_svc.service.worker_messages import replica_info, step_answer
from scheduler_svc.settings import SchedulerSettings
from tests.support.logprobs import Line, fill, lines_of

VOCAB_SIZE = 50


def make_logprobs(sample: int, token_ids: tuple[int, ...] = (11,)) -> worker_pb2.TokenLogprobs:
    message = worker_pb2.TokenLogprobs(samples=encode_int32([sample]))
    fill(message, [Line(-0.5, 1, [11], [-0.5])])
    message.top_token_ids = encode_int32(list(token_ids))
    return message


def make_result(**changes) -> worker_pb2.StepResult:
    """Rows 4 and 2 drew tokens 11 and 12."""
    fields: dict[str, Any] = {"step_id": 7, "rows": encode_int32([4, 2]), "token_ids": encode_int32([11, 12])}
    return worker_pb2.StepResult(**fields | changes)


def make_step(*rows: int) -> StepInFlight:
    zeros, none = np.zeros(len(rows), dtype=np.int64), np.zeros(0, dtype=np.int64)
    return StepInFlight(7, np.array(rows, dtype=np.int64), zeros, None, none, none, none, 0.0, False, none)


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


@pytest.mark.parametrize(
    ("before", "now", "vocab_size", "is_same"),
    [
        ("t1", "t1", 50, True),
        ("t1", "", 50, True),
        ("", "t2", 50, True),
        ("t1", "t2", 50, False),
        ("t1", "t1", 51, False),
    ],
)
def test_token_ids_mean_the_same_unless_both_tokenizers_are_known_and_differ(before, now, vocab_size, is_same):
    info = replica_info(make_info())
    ours = replace(info, vocab_size=vocab_size, fingerprint=ModelFingerprint(tokenizer=now))
    assert ours.has_tokenizer_of(replace(info, fingerprint=ModelFingerprint(tokenizer=before))) == is_same


def test_a_step_of_a_model_with_states_has_room_for_a_prompt_beside_all_sequences():
    info = replace(
        replica_info(make_info()), num_gpu_blocks=64, state_blocks=2, max_num_rows=9, max_num_batched_tokens=32
    )
    for tokens, sequences in ((32, 9), (9, 7), (3, 1)):
        settings = SchedulerSettings(max_num_seqs=min(tokens, 9), max_num_batched_tokens=tokens)
        assert core_config(settings, info).max_num_seqs == sequences


def test_another_model_is_told_by_what_differs():
    info = replica_info(make_info())
    other = replace(info, architecture="B", vocab_size=51, fingerprint=ModelFingerprint(weights="w2"))
    before = replace(info, architecture="A", fingerprint=ModelFingerprint(config="c1", weights="w1"))
    assert other.model_changes(before) == ["architecture A and B", "vocab_size 50 and 51", "weights w1 and w2"]


def make_lost(cause: Exception | None) -> WorkerLostError:
    error = WorkerLostError("worker 127.0.0.1:1 left")
    error.__cause__ = cause
    return error


def make_rpc_error(error: QuireError) -> grpc.aio.AioRpcError:
    status = to_rpc_status(error)
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
    )


RESET = grpc.aio.AioRpcError(
    grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Received RST_STREAM with error code 2"
)
CLOSED = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed")
CANCELLED = grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), "")


@pytest.mark.parametrize(
    ("cause", "refusal", "is_unexplained"),
    [
        # The step was refused, or could not be run; the cause of the loss does not matter then.
        (InvalidArgument("batch.rows holds row 3 twice"), "batch.rows holds row 3 twice", True),
        (Internal("step 7 failed on the device", reason="STEP_FAILED"), "step 7 failed on the device", False),
        (Internal("the step could not be taken", reason="UNEXPECTED"), "the step could not be taken", False),
        # The worker died without an answer to the step.
        (None, None, True),
        (asyncio.InvalidStateError("the call is over"), None, True),
        (Unavailable("Socket closed"), None, True),
        (CLOSED, None, True),
        (CANCELLED, None, True),
        (RESET, None, True),
        # It lives, and reports why it left.
        (FailedPrecondition("another scheduler came", reason="SUPERSEDED"), None, False),
        (FailedPrecondition("no more", reason="SESSION_ENDED"), None, False),
        (FailedPrecondition("no more", reason="STEP_GAP"), None, False),
    ],
)
def test_what_a_loss_of_the_worker_says_of_the_step(cause, refusal, is_unexplained):
    lost = make_lost(make_rpc_error(cause) if isinstance(cause, QuireError) else cause)
    assert (lost.refusal, lost.is_unexplained) == (refusal, is_unexplained)


def test_a_worker_that_hangs_is_unexplained():
    assert WorkerHangsError("worker 127.0.0.1:1 has not answered a step for 60.1 s").is_unexplained


def test_the_start_orders_the_epochs_of_two_schedulers_however_often_the_older_one_tries():
    older, newer = epoch_of_start(1_790_000_000.000), epoch_of_start(1_790_000_000.001)
    attempts_in_two_days = 5 * 86_400 * 2
    assert older < older + attempts_in_two_days < newer < newer + attempts_in_two_days < 1 << 63
