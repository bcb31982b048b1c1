"""Which ends of a step stream say that the worker refused a step."""

import grpc.aio

from quire.rpc.errors import InvalidArgument, from_rpc_error
from scheduler_svc.service.worker_link import WorkerLostError

_FAILURES = frozenset({"STEP_FAILED", "UNEXPECTED"})
"""Reasons by which a worker tells that it could not run or take the step."""


def refusal_of(error: WorkerLostError) -> str | None:
    """What the worker had against the oldest step in flight, since it answers all steps before the one that it refuses.

    None where the worker was lost for another reason (it died, hangs, or belongs to another scheduler), which says
    nothing about the step.
    """
    if not isinstance(error.__cause__, grpc.aio.AioRpcError):
        return None
    answer = from_rpc_error(error.__cause__)
    return answer.message if isinstance(answer, InvalidArgument) or answer.reason in _FAILURES else None
