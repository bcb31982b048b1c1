"""Detects services that hang, and kills them.

A service listens before it loads anything, and answers health checks from then on, with NOT_SERVING while it loads. So
silence of a service that listens is a hang. Before that it imports its libraries, which may take long on a slow disk:
until it listens, the longer start timeout applies. It applies again while a process restarts itself, as a worker does
when a sleep discards its weights.
"""

import asyncio
import errno
import math
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.rpc.channel import open_channel
from quire.runtime import clock
from quire_cli.supervisor.process import RestartBackoff, SupervisedProcess

_MAX_CHECK_INTERVAL_S = 2.0
# Statuses that gRPC itself reports if no process answers; any other status comes from a live process.
_SILENCE = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.UNAVAILABLE)


@dataclass(frozen=True, slots=True)
class HangLimits:
    """Maximum times for which a service may be silent.

    Attributes:
        hang_timeout_s: once it listens.
        start_timeout_s: from its start until it listens, and whenever it does not listen any more.
    """

    hang_timeout_s: float
    start_timeout_s: float


async def watch(
    process: SupervisedProcess,
    socket_path: Path,
    limits: HangLimits,
    report: Callable[[str], None],
    backoff: RestartBackoff | None = None,
) -> None:
    """Checks the health of `process` at its unix socket forever, and kills it when it is silent for too long.

    Errors of the checks, such as too many open files here, are reported, and the checks restart after a wait.
    """
    backoff = backoff or RestartBackoff()
    while True:
        started_at = clock.monotonic()
        try:
            await _watch(process, socket_path, limits, report)
        except Exception as error:
            delay_s = backoff.delay_s(clock.monotonic() - started_at)
            reason = str(error) or type(error).__name__
            report(f"health checks of {process.name} failed: {reason}; beginning them again in {delay_s:g} s")
            await asyncio.sleep(delay_s)


async def _watch(
    process: SupervisedProcess, socket_path: Path, limits: HangLimits, report: Callable[[str], None]
) -> NoReturn:
    """Raises OSError if this process is out of files: then it cannot tell whether the other one is silent.

    Silence is counted in checks without an answer and not in time, so that a pause of this process does not count.
    """
    interval_s = min(limits.hang_timeout_s / 3, _MAX_CHECK_INTERVAL_S)
    num_silent = 0
    # The number of the start that `num_silent` counts for, and of the last start that was seen listening; 0 for no
    # start.
    start = listening_start = 0
    async with open_channel(f"unix:{socket_path}") as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        while True:
            checked_start = process.starts
            is_answered, _ = await asyncio.gather(_answers(stub, interval_s), asyncio.sleep(interval_s))
            if start != process.starts or not process.is_running:
                start, num_silent = process.starts, 0
            if checked_start != start or not process.is_running:
                continue
            listens = is_answered or _listens(socket_path)
            if listens != (listening_start == start):
                listening_start, num_silent = start if listens else 0, 0
            num_silent = 0 if is_answered else num_silent + 1
            limit_s = limits.hang_timeout_s if listens else limits.start_timeout_s
            if num_silent >= math.ceil(limit_s / interval_s):
                silence = "answers no health check for" if listens else "does not listen after"
                report(f"{process.name} {silence} {limit_s:g} s; killing it")
                process.kill_once()
                num_silent = 0


async def _answers(stub: Any, timeout_s: float) -> bool:
    try:
        await stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return error.code() not in _SILENCE
    return True


def _listens(socket_path: Path) -> bool:
    """Whether a process listens there; a stopped one does too, since the kernel accepts connections for it. Raises
    OSError if no socket can be made to find out."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(socket_path)) in (0, errno.EAGAIN)
