"""The scheduler's end of the step stream, when a socket listens but nobody ever speaks."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler_svc.service.worker_link import WorkerLink, WorkerLostError


@pytest.fixture
def mute_address(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "mute.sock"
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(path))
        mute.listen()
        yield f"unix:{path}"


@pytest.mark.parametrize("turns", range(12))
async def test_attaching_can_be_cancelled_at_any_time(mute_address: str, turns: int) -> None:
    attaching = asyncio.create_task(WorkerLink.attach(mute_address, 1, timeout_s=5))
    for _ in range(turns):
        await asyncio.sleep(0)
    attaching.cancel()
    async with asyncio.timeout(4):
        with pytest.raises(asyncio.CancelledError):
            await attaching


async def test_a_peer_that_never_answers_is_given_up_in_time(mute_address: str) -> None:
    async with asyncio.timeout(5):
        with pytest.raises(WorkerLostError, match="did not answer Attach"):
            await WorkerLink.attach(mute_address, 1, timeout_s=0.2)
