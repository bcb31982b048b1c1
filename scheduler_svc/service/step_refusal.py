"""What the end of a step stream says of the steps in flight: nothing, that one was refused, or that one may be why."""

import grpc.aio

from quire.rpc.errors import InvalidArgument, QuireError, from_rpc_error
from scheduler_svc.service.worker_link import WorkerLostError

_FAILURES = frozenset({"STEP_FAILED", "UNEXPECTED"})
"""Reasons by which a worker tells that it could not run or take the step."""


def refusal_of(error: WorkerLostError) -> str | None:
    """What the worker had against the oldest step in flight, since it answers all steps before the one that it refuses.

    None where the worker was lost for another reason (it died, hangs, or belongs to another scheduler), which says
    nothing about the step.
    """
    answer = _answer_in(error)
    if answer is None:
        return None
    return answer.message if isinstance(answer, InvalidArgument) or answer.reason in _FAILURES else None


def is_unexplained(error: WorkerLostError) -> bool:
    """Whether nobody said why the worker was lost, so that it may have died or hung of a step, or the link to it broke.

    A reason other than the status's own can only come from a worker that lives.
    """
    answer = _answer_in(error)
    return answer is None or answer.reason == answer.default_reason


def _answer_in(error: WorkerLostError) -> QuireError | None:
    """With what status the stream ended; None where it was given up on this side."""
    cause = error.__cause__
    return from_rpc_error(cause) if isinstance(cause, grpc.aio.AioRpcError) else None
