"""Kills a service that hangs, so that its supervisor starts it again."""

import asyncio
import math
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.local.supervised_process import SupervisedProcess
from quire.rpc.channel import open_channel

_LONGEST_INTERVAL_S = 2.0
# What gRPC says by itself when nobody answers; any other status comes from a process that is alive.
_SILENCE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


async def watch(process: SupervisedProcess, address: str, hang_timeout_s: float, report: Callable[[str], None]) -> None:
    """Asks for the health of `process` at `address`, for ever, and kills it after `hang_timeout_s` without an answer.

    NOT_SERVING is an answer. A process that has not said SERVING yet may be loading, and is left alone. Silence is
    counted in checks that went unanswered and not in time, so that a pause of ourselves is not taken for one of theirs.
    """
    interval_s = min(hang_timeout_s / 3, _LONGEST_INTERVAL_S)
    most_unanswered = math.ceil(hang_timeout_s / interval_s)
    served_start = unanswered = 0
    async with open_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            start = process.starts
            status, _ = await asyncio.gather(_check(stub, interval_s), asyncio.sleep(interval_s))
            if status is not None:
                unanswered = 0
                served_start = start if status == health_pb2.HealthCheckResponse.SERVING else served_start
                continue
            unanswered = unanswered + 1 if start == served_start == process.starts else 0
            if unanswered >= most_unanswered:
                report(f"{process.name} answers no health check for {hang_timeout_s:g} s; killing it")
                process.kill_once()
                unanswered = 0


async def _check(stub: Any, timeout_s: float) -> int | None:
    """The status that is answered; None where nobody answers in time."""
    try:
        return (await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)).status
    except grpc.aio.AioRpcError as error:
        return None if error.code() in _SILENCE else health_pb2.HealthCheckResponse.UNKNOWN
