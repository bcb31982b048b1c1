"""kill -9 of real processes in the middle of what they do, at failpoints: clients see a pause, never a lost, repeated
or changed token. Worlds do so at every failpoint of a process that serves."""

import os
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from unittest.mock import patch

import pytest
import pytest_asyncio

from quire import failpoint
from tests.support.killing import Outputs, Streams, TooLateError, kill, until_hit
from tests.support.processes import until_true
from tests.support.serving import Served, serving

pytestmark = pytest.mark.extended

DEATHS = {
    "worker.step.moved": 2,
    "worker.load.begun": 1,
    "scheduler.apply.before_emit": 4,
    "gateway.events.before_apply": 4,
}
"""Failpoints, and at which of its passes a process dies there. The second is passed by the successor of a worker."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def armed() -> AsyncIterator[tuple[Served, Path]]:
    """A server, and the directory that its processes watch."""
    with tempfile.TemporaryDirectory() as directory, patch.dict(os.environ, {failpoint.VARIABLE: directory}):
        # float32: in bfloat16 a context that is computed again need not give the same logits.
        async with serving(num_gpu_blocks=512, dtype="float32") as running:
            yield running, Path(directory)


async def test_streams_survive_deaths_at_failpoints(armed: tuple[Served, Path]) -> None:
    served, directory = armed
    undisturbed = await Streams(durable=True).read(served.client)

    async def disturbed() -> Outputs:
        streams = Streams(durable=True)
        async with streams.reading(served) as reading:
            for name, number in DEATHS.items():
                # All are read again: two processes that die at once may take a stream with them.
                await streams.advance(1)
                order = directory / name
                (directory / "order").write_text(f"kill {number}")
                (directory / "order").rename(order)
                if name == "worker.load.begun":
                    await kill(served, "worker")
                await until_true(lambda order=order: streams.has_one_ended or not order.exists(), timeout_s=100)
                if order.exists():
                    order.unlink()
                    raise TooLateError
            return await reading

    assert await until_hit(disturbed) == undisturbed
