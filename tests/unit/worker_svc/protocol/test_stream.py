"""How a worker is attached, with a stand-in for what ranks agree on, and how its stream ends."""

import threading
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from quire.rpc.errors import Unavailable
from tests.support.fake_runner import FakeRunner
from tests.support.fake_worker import FakeWorkerConfig
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.protocol.stream import Worker
from worker_svc.step import SupersededError

TIMEOUT_S = 30.0
CONFIG = FakeWorkerConfig()


@pytest.fixture
async def device_loop() -> AsyncIterator[DeviceLoop]:
    device_loop = DeviceLoop()
    device_loop.start()
    yield device_loop
    assert device_loop.stop(TIMEOUT_S)


class OtherRank:
    """Comes to the step that this one is at when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int]] = []
        self.comes = threading.Event()
        self.epoch = 0

    def agree(self, epoch: int, step_id: int) -> None:
        self.asked.append((epoch, step_id))
        assert self.comes.wait(TIMEOUT_S)
        if self.epoch > epoch:
            raise SupersededError(f"epoch {epoch} ended before step {step_id}: another rank is at epoch {self.epoch}")


def make_worker(device_loop: DeviceLoop, other: OtherRank, world_size: int = 2) -> Worker:
    runner = FakeRunner(CONFIG.num_blocks, CONFIG.block_size, CONFIG.vocab_size)
    return Worker(replace(CONFIG.info(), world_size=world_size), runner, device_loop, other.agree)


async def test_a_rank_says_what_it_holds_when_the_others_are_at_its_epoch(device_loop: DeviceLoop) -> None:
    other = OtherRank()
    other.comes.set()
    sealed = await make_worker(device_loop, other).sealed_blocks(7)
    assert other.asked == [(7, 0)]
    assert len(sealed.block_ids) == 0


async def test_a_rank_whose_others_are_at_a_higher_epoch_is_superseded(device_loop: DeviceLoop) -> None:
    other = OtherRank()
    other.epoch = 8
    other.comes.set()
    with pytest.raises(SupersededError, match="another rank is at epoch 8"):
        await make_worker(device_loop, other).sealed_blocks(7)


async def test_a_rank_whose_others_do_not_come_says_so_and_waits_on(device_loop: DeviceLoop) -> None:
    other = OtherRank()
    worker = make_worker(device_loop, other)
    # Again where the device's thread has not begun with it by then.
    while not other.asked:
        with pytest.raises(Unavailable, match="rank 0 of 2, and not all were attached under epoch 7"):
            await worker.sealed_blocks(7, 0.02)
    with pytest.raises(Unavailable, match="rank 0 of 2, and not all were attached under epoch 8"):
        await worker.sealed_blocks(8, 0.02)
    other.comes.set()
    await worker.sealed_blocks(9)
    # Nobody waits for an answer to the second any more, and it had not begun.
    assert other.asked == [(7, 0), (9, 0)]
