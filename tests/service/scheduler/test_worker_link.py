"""The scheduler's end of the step stream: where nobody ever speaks, and where much is said at once."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.rpc.server import DEFAULT_MAX_MESSAGE_BYTES
from quire.worker.v1 import worker_pb2
from scheduler_svc.service.worker_link import WorkerLink, WorkerLostError
from scheduler_svc.service.worker_messages import StepAnswer
from tests.support.fake_worker import FakeWorker
from tests.support.worker_client import make_assign, make_batch

_UNKNOWN_FIELD_OF_16_MIB = b"\xfa\x7f\x80\x80\x80\x08"
"""Field 2047, which no message has, and how many bytes follow."""


@pytest.fixture
def mute_address(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        yield f"unix:{path}"


@pytest.mark.parametrize("turns", range(12))
async def test_attaching_can_be_cancelled_at_any_time(mute_address: str, turns: int) -> None:
    attaching = asyncio.create_task(WorkerLink.attach(mute_address, 1, timeout_s=300))
    for _ in range(turns):
        await asyncio.sleep(0)
    attaching.cancel()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError):
            await attaching


async def test_a_peer_that_never_answers_is_given_up_in_time(mute_address: str) -> None:
    async with asyncio.timeout(60):
        with pytest.raises(WorkerLostError, match="did not answer Attach"):
            await WorkerLink.attach(mute_address, 1, timeout_s=0.2)


async def test_a_step_of_any_size_reaches_the_worker(tmp_path: Path) -> None:
    """All rows may be assigned at once, each with much of its own: here what a newer gateway sends and nobody reads."""
    worker = FakeWorker()
    link = await WorkerLink.attach(await worker.start(f"unix:{tmp_path / 'w.sock'}"), 1, timeout_s=60)
    assign = [make_assign(row, [1, 2, 3], [row + 1]) for row in range(5)]
    for each in assign:
        each.row_sampling += _UNKNOWN_FIELD_OF_16_MIB + bytes(1 << 24)
    step = worker_pb2.StepRequest(
        step_id=1,
        scheduler_epoch=1,
        worker_generation=link.info.worker_generation,
        assign=assign,
        batch=make_batch([0], [3], [0]),
    )
    message = worker_pb2.RunRequest(step=step).SerializeToString()
    assert len(message) > DEFAULT_MAX_MESSAGE_BYTES
    async with asyncio.timeout(60):
        await link.write(message)
        while not isinstance(answer := await link.receive(), StepAnswer):
            pass
    assert answer.rows.tolist() == [0]
    await link.close()
    await worker.stop()
