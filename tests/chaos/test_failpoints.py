"""kill -9 of each process in the middle of what it does, at one failpoint after the other: clients see a pause, never a
lost, repeated or changed token."""

import os
import signal
import tempfile
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import pytest
import pytest_asyncio

from quire import failpoint
from tests.support.killing import Streams, TooLateError, kill
from tests.support.processes import until_true
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended


async def _nothing(served: Served) -> None:
    """Streams that run pass it all the time."""


async def _kill_worker(served: Served) -> None:
    await kill(served, "worker")


async def _stop_scheduler(served: Served) -> None:
    os.kill(served.server.process("scheduler").pid, signal.SIGTERM)


async def _stop_gateway(served: Served) -> None:
    os.kill(served.server.process("gateway").pid, signal.SIGTERM)


@dataclass(frozen=True, slots=True)
class Death:
    """A failpoint, at which of its passes a process dies there, and what makes it pass that does not pass by itself."""

    name: str
    number: int = 1
    trigger: Callable[[Served], Awaitable[None]] = _nothing


AT_THE_START = (
    Death("gateway.submit.before_send", 3),
    Death("scheduler.submit.before_queue", 5),
    Death("scheduler.submit.accepted", 7),
)
"""Passed when requests come."""

IN_THE_MIDDLE = (
    Death("worker.step.admitted", 3),
    Death("worker.step.moved", 2),
    Death("worker.step.sealed", 3),
    Death("worker.load.begun", trigger=_kill_worker),
    Death("worker.attach.before_inventory", trigger=_kill_worker),
    Death("scheduler.step.before_send", 3),
    Death("scheduler.apply.before_emit", 4),
    Death("scheduler.events.before_write", 3),
    Death("scheduler.attach.before_inventory", trigger=_kill_worker),
    Death("scheduler.drain.begun", trigger=_stop_scheduler),
    Death("gateway.events.before_apply", 4),
    Death("gateway.events.before_credit", 3),
    Death("gateway.stream.before_write", 30),
    Death("gateway.drain.begun", trigger=_stop_gateway),
)
"""Passed while streams run, or when a process is back."""

ELSEWHERE = {"scheduler.step.between_ranks", "scheduler.reader.changed", "gateway.connected.before_resubmit"}
"""This server has one rank. The others are passed when a process of the other service has died before: nobody has the
streams then."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def armed() -> AsyncIterator[tuple[Served, Path]]:
    """A server, and the directory that its processes watch."""
    with tempfile.TemporaryDirectory() as directory, patch.dict(os.environ, {failpoint.VARIABLE: directory}):
        # float32: in bfloat16 a context that is computed again need not give the same logits.
        async with serving(num_gpu_blocks=512, dtype="float32") as running:
            yield running, Path(directory)


def test_each_failpoint_is_reached_here() -> None:
    assert {death.name for death in (*AT_THE_START, *IN_THE_MIDDLE)} == set(failpoint.NAMES) - ELSEWHERE


async def test_streams_survive_a_death_at_each_failpoint(armed: tuple[Served, Path]) -> None:
    served, directory = armed
    undisturbed = await Streams(durable=True).read(served.client)
    at_the_start, in_the_middle = deque(AT_THE_START), deque(IN_THE_MIDDLE)
    while at_the_start or in_the_middle:
        await served.server.wait_ready()
        if at_the_start:
            _arm(directory, at_the_start[0])
        streams = Streams(durable=True)
        async with streams.reading(served) as reading:
            if at_the_start:
                await _until_dead(directory, at_the_start, streams)
            with suppress(TooLateError):
                while in_the_middle:
                    # All are read again: two processes that die at once may take a stream with them.
                    await streams.advance(1)
                    death = in_the_middle[0]
                    _arm(directory, death)
                    await death.trigger(served)
                    await _until_dead(directory, in_the_middle, streams)
            assert await reading == undisturbed, _names(at_the_start, in_the_middle)


def _arm(directory: Path, death: Death) -> None:
    written = directory / "order"
    written.write_text(f"kill {death.number}")
    written.rename(directory / death.name)


async def _until_dead(directory: Path, deaths: deque[Death], streams: Streams) -> None:
    """A process has died at the first of these failpoints, or else one of the streams has ended before."""
    armed = directory / deaths[0].name
    await until_true(lambda: streams.has_one_ended or not armed.exists(), timeout_s=100)
    if not armed.exists():
        deaths.popleft()


def _names(*deaths: Sequence[Death]) -> list[str]:
    return [death.name for some in deaths for death in some]
