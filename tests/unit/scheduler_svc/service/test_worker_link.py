"""Which losses of a worker say something against a step, and which of two schedulers is the newer one."""

import asyncio

import grpc
import grpc.aio
import pytest

from quire.rpc.errors import FailedPrecondition, Internal, InvalidArgument, QuireError, Unavailable, to_rpc_status
from scheduler_svc.service.worker_link import WorkerHangsError, WorkerLostError, epoch_of_start


def make_lost(cause: Exception | None) -> WorkerLostError:
    error = WorkerLostError("worker 127.0.0.1:1 left")
    error.__cause__ = cause
    return error


def make_rpc_error(error: QuireError) -> grpc.aio.AioRpcError:
    status = to_rpc_status(error)
    return grpc.aio.AioRpcError(
        status.code, grpc.aio.Metadata(), grpc.aio.Metadata(*status.trailing_metadata), status.details
    )


@pytest.mark.parametrize(
    "error",
    [
        InvalidArgument("batch.rows holds row 3 twice"),
        Internal("step 7 failed on the device", reason="STEP_FAILED"),
        Internal("the step could not be taken", reason="UNEXPECTED"),
    ],
)
def test_a_step_that_the_worker_refused_or_could_not_run_is_refused(error):
    assert make_lost(make_rpc_error(error)).refusal == error.message


@pytest.mark.parametrize(
    "cause",
    [
        None,
        asyncio.InvalidStateError("the call is over"),
        make_rpc_error(Unavailable("Socket closed")),
        make_rpc_error(FailedPrecondition("another scheduler came", reason="SUPERSEDED")),
        grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Received RST_STREAM with error code 2"
        ),
    ],
)
def test_a_worker_that_died_or_was_taken_over_said_nothing_of_the_step(cause):
    assert make_lost(cause).refusal is None


@pytest.mark.parametrize(
    "cause",
    [
        None,
        asyncio.InvalidStateError("the call is over"),
        make_rpc_error(Unavailable("Socket closed")),
        grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "Socket closed"),
        grpc.aio.AioRpcError(grpc.StatusCode.CANCELLED, grpc.aio.Metadata(), grpc.aio.Metadata(), ""),
        grpc.aio.AioRpcError(
            grpc.StatusCode.INTERNAL, grpc.aio.Metadata(), grpc.aio.Metadata(), "Received RST_STREAM with error code 2"
        ),
    ],
)
def test_a_stream_that_ends_without_a_word_of_the_worker_is_unexplained(cause):
    assert make_lost(cause).is_unexplained


def test_a_worker_that_hangs_is_unexplained():
    assert WorkerHangsError("worker 127.0.0.1:1 has not answered a step for 60.1 s").is_unexplained


@pytest.mark.parametrize("reason", ["SUPERSEDED", "SESSION_ENDED", "STEP_GAP"])
def test_a_worker_that_lives_and_says_why_it_left_is_explained(reason):
    assert not make_lost(make_rpc_error(FailedPrecondition("no more", reason=reason))).is_unexplained


def test_the_start_orders_the_epochs_of_two_schedulers_however_often_the_older_one_tries():
    older, newer = epoch_of_start(1_790_000_000.000), epoch_of_start(1_790_000_000.001)
    attempts_in_two_days = 5 * 86_400 * 2
    assert older < older + attempts_in_two_days < newer < newer + attempts_in_two_days < 1 << 63
