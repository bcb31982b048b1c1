"""Attaching a worker, with a stand-in for the ranks' agreement, and the end of its stream."""

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from quire.model_files.adapter_files import UnusableAdapterError
from quire.rpc.errors import FailedPrecondition, Unavailable
from quire.service.compatibility import WORKER_PROTOCOL, ModelFingerprint
from quire.worker.v1 import worker_pb2
from tests.support.fake_runner import FakeRunner
from tests.support.fake_worker import FakeWorker, FakeWorkerConfig
from worker_svc.device.device_loop import DeviceLoop
from worker_svc.metrics import WorkerMetrics
from worker_svc.protocol.stream import StepStream, Worker, WorkerServicer
from worker_svc.step import LoadAdapter, SupersededError

TIMEOUT_S = 30.0
CONFIG = FakeWorkerConfig()


@pytest.fixture
async def device_loop() -> AsyncIterator[DeviceLoop]:
    device_loop = DeviceLoop()
    device_loop.start()
    yield device_loop
    assert device_loop.stop(TIMEOUT_S)


class OtherRank:
    """Reaches this rank's step when the test says so."""

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


async def test_a_rank_whose_others_are_at_a_higher_epoch_is_superseded(device_loop: DeviceLoop) -> None:
    other = OtherRank()
    other.epoch = 8
    other.comes.set()
    with pytest.raises(SupersededError, match="another rank is at epoch 8"):
        await make_worker(device_loop, other).sealed_blocks(7)


async def test_a_rank_whose_others_do_not_come_says_so_and_waits_on(device_loop: DeviceLoop) -> None:
    other = OtherRank()
    worker = make_worker(device_loop, other)
    # Again if the device's thread has not begun by then.
    while not other.asked:
        with pytest.raises(Unavailable, match="rank 0 of 2, and not all were attached under epoch 7"):
            await worker.sealed_blocks(7, 0.02)
    with pytest.raises(Unavailable, match="rank 0 of 2, and not all were attached under epoch 8"):
        await worker.sealed_blocks(8, 0.02)
    other.comes.set()
    await worker.sealed_blocks(9)
    # No caller waits for an answer to the second any more, and it had not begun.
    assert other.asked == [(7, 0), (9, 0)]


async def test_an_end_that_nobody_waits_for_any_more_is_not_logged(device_loop: DeviceLoop) -> None:
    gc.collect()  # what other tests left
    logged: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: logged.append(context))
    other = OtherRank()
    worker = make_worker(device_loop, other)
    while not other.asked:
        with pytest.raises(Unavailable):
            await worker.sealed_blocks(7, 0.02)
    other.epoch = 9
    other.comes.set()
    await worker.sealed_blocks(9)
    await asyncio.sleep(0)
    gc.collect()
    assert not logged


async def test_a_release_that_is_refused_leaves_the_one_that_is_underway(device_loop: DeviceLoop) -> None:
    other, stopping = OtherRank(), threading.Event()
    servicer = WorkerServicer(WorkerMetrics(), stopping=stopping)
    servicer.open(make_worker(device_loop, other))

    async def discard(epoch: int) -> None:
        request = worker_pb2.ReleaseMemoryRequest(scheduler_epoch=epoch, discard_weights=True)
        await servicer.ReleaseMemory(request, cast(Any, None))

    first = asyncio.create_task(discard(7))
    await asyncio.sleep(0)
    try:
        with pytest.raises(FailedPrecondition):
            await discard(6)
        assert stopping.is_set()
    finally:
        other.comes.set()
    await first
    assert stopping.is_set()


async def test_a_release_that_a_scheduler_ends_does_not_stop_the_worker(device_loop: DeviceLoop) -> None:
    other, stopping = OtherRank(), threading.Event()
    worker = make_worker(device_loop, other)
    release = asyncio.create_task(worker.release_memory(7, stopping))
    await asyncio.sleep(0)
    assert stopping.is_set()
    worker.attach(8, lambda error: None)
    other.epoch = 8
    other.comes.set()
    with pytest.raises(SupersededError):
        await release
    assert not stopping.is_set()


async def test_a_rank_that_gives_its_pool_back_tells_the_others_its_epoch(device_loop: DeviceLoop) -> None:
    """Another rank may wait for this one in a step of the epoch before."""
    other = OtherRank()
    other.comes.set()
    await make_worker(device_loop, other).release_memory(7)
    assert other.asked == [(7, 0)]


async def test_nothing_holds_a_session_that_is_over(tmp_path: Path) -> None:
    fingerprint = ModelFingerprint("a", "b", "c")
    worker = FakeWorker(FakeWorkerConfig(fingerprint=fingerprint, disk=tmp_path / "blocks.kv"))
    await worker.start()

    async def requests() -> AsyncIterator[worker_pb2.RunRequest]:
        attach = worker_pb2.Attach(scheduler_epoch=1, protocol=WORKER_PROTOCOL.message())
        yield worker_pb2.RunRequest(attach=attach)
        await asyncio.get_running_loop().create_future()

    gc.collect()
    before = {id(each) for each in gc.get_objects() if isinstance(each, StepStream)}
    responses = worker._servicer.Run(requests(), cast(Any, None))
    assert (await anext(aiter(responses))).HasField("attached")
    assert [each for each in gc.get_objects() if isinstance(each, StepStream) and id(each) not in before]
    loaded = worker._servicer._loaded
    assert loaded is not None
    assert loaded.disk is not None
    await cast(Any, responses).aclose()
    await asyncio.wrap_future(loaded.disk.submit(lambda: None))
    del responses
    gc.collect()
    assert not [each for each in gc.get_objects() if isinstance(each, StepStream) and id(each) not in before]
    await worker.stop()


class FakeAdapters:
    """Loads adapters when the test says so."""

    num_bytes = 7

    def __init__(self) -> None:
        self.slots: dict[int, object] = {}
        self.reads: list[Future[object]] = []

    def start_load(self, directory: Path, digest: bytes) -> "Future[object]":
        self.reads.append(Future())
        return self.reads[-1]

    def put(self, slot: int, loaded: object) -> None:
        self.slots[slot] = loaded

    def clear(self) -> None:
        self.slots.clear()


def make_adapted(device_loop: DeviceLoop) -> tuple[Worker, FakeAdapters]:
    info = CONFIG.info()
    info = replace(info, limits=replace(info.limits, max_adapters=2))
    adapters, runner = FakeAdapters(), FakeRunner(CONFIG.num_blocks, CONFIG.block_size, CONFIG.vocab_size)
    return Worker(info, runner, device_loop, adapters=adapters), adapters


def load(slot: int) -> LoadAdapter:
    return LoadAdapter(slot, bytes(32), Path("adapter"))


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (UnusableAdapterError("it is of another model"), "it is of another model"),
        (RuntimeError("no memory"), "adapter adapter could not be loaded: RuntimeError: no memory"),
    ],
)
async def test_a_failed_load_empties_the_slot(device_loop: DeviceLoop, error: Exception, failure: str) -> None:
    worker, adapters = make_adapted(device_loop)
    adapters.slots[1] = "before"
    answer = asyncio.create_task(worker.load_adapter(load(1)))
    await asyncio.sleep(0)
    adapters.reads[0].set_exception(error)
    assert await answer == failure
    assert adapters.slots == {1: None}
    # It may be loaded again.
    worker.load_adapter(load(1)).close()


async def test_what_was_read_is_left_to_the_slot(device_loop: DeviceLoop) -> None:
    worker, adapters = make_adapted(device_loop)
    answer = asyncio.create_task(worker.load_adapter(load(1)))
    await asyncio.sleep(0)
    adapters.reads[0].set_result(loaded := np.zeros(1))
    assert await answer is None
    kept = weakref.ref(loaded)
    del loaded, answer
    # The device's thread drops it with its next work.
    await worker.sealed_blocks(1)
    adapters.slots.clear()
    adapters.reads.clear()
    assert kept() is None


async def test_an_adapter_of_the_session_before_does_not_get_into_a_slot(device_loop: DeviceLoop) -> None:
    worker, adapters = make_adapted(device_loop)
    answer = asyncio.create_task(worker.load_adapter(load(1)))
    await asyncio.sleep(0)
    adapters.reads[0].set_running_or_notify_cancel()
    worker.attach(1, lambda error: None)
    adapters.slots[0] = "left"
    await worker.sealed_blocks(1)
    adapters.reads[0].set_result("loaded")
    assert await answer is not None
    assert adapters.slots == {}


async def test_a_load_that_does_not_end_leaves_its_slot_to_the_next_one(device_loop: DeviceLoop) -> None:
    worker, adapters = make_adapted(device_loop)
    answers = [asyncio.create_task(worker.load_adapter(load(slot))) for slot in (0, 1)]
    await asyncio.sleep(0)
    for read in adapters.reads:
        read.set_running_or_notify_cancel()
    answers.append(asyncio.create_task(worker.load_adapter(load(1))))
    assert await answers[1] == "adapter adapter: the next load of slot 1 came before it was read"
    adapters.reads[2].set_result("second")
    assert await answers[2] is None
    adapters.reads[1].set_result("first, and late")
    adapters.reads[0].set_result("other")
    assert await answers[0] is None
    assert adapters.slots == {0: "other", 1: "second"}
