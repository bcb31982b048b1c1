"""Watchers get frames, and a watcher that does not read them delays no other."""

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest

from quire.rpc.errors import ResourceExhausted
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core import view
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.core.view import View
from scheduler_svc.service import watchers
from scheduler_svc.service.watch_messages import ReplicaNow
from scheduler_svc.service.watchers import Watchers
from tests.support.core_driver import Driver, make_config, make_request

MAX_OUTBOX = 4


class Watched:
    """A core and its watchers; frames are made when the test says so."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.watchers = Watchers(self.now, lambda: driver.clock)

    def now(self) -> ReplicaNow:
        return ReplicaNow(self.driver.scheduler, 7, is_ready=True, is_attached=True, is_draining=False, num_gateways=1)

    def step(self) -> None:
        plan = self.driver.plan()
        if plan is not None and self.watchers.are_any:
            self.watchers.planned(self.driver.scheduler, plan, self.driver.clock, self.driver.clock + 0.001)
        self.driver.deliver()
        if plan is not None and self.watchers.are_any:
            self.watchers.answered(plan.step_id, 0.002)


@pytest.fixture
def watched() -> Watched:
    return Watched(Driver(make_config(num_host_blocks=16, preemption_mode=PreemptionMode.SWAP)))


async def next_frame(frames) -> scheduler_pb2.WatchResponse:
    async with asyncio.timeout(30):
        return await anext(frames)


def triples(data: bytes, width: int) -> list[tuple[int, ...]]:
    values = memoryview(data).cast("i").tolist()
    return [tuple(values[start : start + width]) for start in range(0, len(values), width)]


async def test_who_comes_as_the_last_one_leaves_is_served(watched):
    first = watched.watchers.frames(wants_memory=True)
    await next_frame(first)
    leaving = asyncio.create_task(first.aclose())
    # The watcher has begun to leave.
    await asyncio.sleep(0)
    async with aclosing(watched.watchers.frames(wants_memory=True)) as second:
        assert (await next_frame(second)).is_whole
        await leaving
        watched.driver.submit(make_request(1))
        assert not (await next_frame(second)).is_whole
    assert watched.watchers._task is None


async def test_blocks_that_a_request_waits_for_are_shown_and_counted(watched):
    driver, prompt = watched.driver, [*range(17)]
    driver.submit(make_request(1, prompt=prompt))
    driver.run_until_idle()
    driver.tell_disk(driver.device.keep_on_disk(100))
    pool = driver.scheduler.batch.blocks.pool
    pool.free(pool.allocate(pool.num_free))
    driver.submit(make_request(2, prompt=prompt))
    driver.plan()
    async with aclosing(watched.watchers.frames(wants_memory=False)) as frames:
        frame = await next_frame(frames)
    assert [each.reason for each in frame.waiting] == [scheduler_pb2.WAIT_REASON_MOVED_BLOCKS]
    assert (frame.numbers.disk_blocks, frame.numbers.arriving_blocks, frame.numbers.blocks_from_disk) == (5, 4, 0)
    driver.compile_next()
    driver.run_until_idle()
    async with aclosing(watched.watchers.frames(wants_memory=False)) as frames:
        numbers = (await next_frame(frames)).numbers
    assert (numbers.arriving_blocks, numbers.blocks_from_disk, numbers.blocks_that_did_not_come) == (0, 4, 0)
    assert (numbers.prompt_tokens, numbers.cached_tokens) == (34, 16)


async def test_blocks_that_came_from_host_memory_are_counted(watched):
    watched.driver = Driver(make_config(num_blocks=8, num_host_blocks=16, caches_on_host=True))
    for handle, first in enumerate((0, 20, 0), 1):
        watched.driver.submit(make_request(handle, prompt=[*range(first, first + 17)], max_tokens=4))
        watched.driver.run_until_idle()
    async with aclosing(watched.watchers.frames(wants_memory=False)) as frames:
        numbers = (await next_frame(frames)).numbers
    assert (numbers.blocks_from_host, numbers.cached_tokens) == (1, 16)
    assert numbers.host_pool.cached_blocks > 0


async def test_everything_in_a_large_pool_is_several_frames(watched, monkeypatch):
    monkeypatch.setattr(view, "_MAX_ENTRIES", 2)
    for handle in (1, 2):
        watched.driver.submit(make_request(handle, prompt_len=9, max_tokens=9))
        watched.step()
    async with aclosing(watched.watchers.frames(wants_memory=True)) as frames:
        parts = [await next_frame(frames)]
        # The core continues while frames are read.
        watched.step()
        while parts[-1].more_follows:
            parts.append(await next_frame(frames))
    assert [each.is_whole for each in parts] == [True] + [False] * (len(parts) - 1)
    assert len(parts) > 2
    assert all(each.numbers == parts[0].numbers for each in parts)
    tables = [triple for each in parts for triple in triples(each.memory.tables, 3)]
    assert tables == [(1, 0, 0), (1, 1, 1), (1, 2, 2), (2, 0, 3), (2, 1, 4), (2, 2, 5)]


async def test_a_defect_of_the_view_is_logged_once_and_then_everything_comes(watched, monkeypatch, caplog):
    look, num_failed = View.look, 0
    recovered = asyncio.Event()

    def fail(self, scheduler):
        nonlocal num_failed
        num_failed += 1
        if num_failed > 3:
            recovered.set()
            return look(self, scheduler)
        raise RuntimeError("a defect")

    async with aclosing(watched.watchers.frames(wants_memory=True)) as frames:
        await next_frame(frames)
        monkeypatch.setattr(View, "look", fail)
        async with asyncio.timeout(30):
            await recovered.wait()
        frame = await next_frame(frames)
        while not frame.is_whole:
            frame = await next_frame(frames)
    assert [each.message.partition(";")[0] for each in caplog.records] == ["a frame could not be made"]


async def test_of_many_moves_the_last_are_told_and_the_others_counted(watched, monkeypatch):
    monkeypatch.setattr(watchers, "_MAX_EVENTS", 2)
    async with aclosing(watched.watchers.frames(wants_memory=True)) as frames:
        await next_frame(frames)
        watched.driver.submit(make_request(1, prompt_len=20, max_tokens=20))
        watched.step()
        watched.driver.preempt(make_request(1))
        watched.step()
        watched.watchers.look()
        frame = await next_frame(frames)
        while not frame.memory.events:
            frame = await next_frame(frames)
    assert len(triples(frame.memory.events, 4)) == 2
    assert frame.memory.lost_events > 2


async def test_who_does_not_read_misses_frames_and_then_gets_a_whole_one(watched):
    watched.driver.submit(make_request(1, max_tokens=40))
    async with aclosing(watched.watchers.frames(wants_memory=True)) as slow:
        assert (await next_frame(slow)).is_whole
        for _ in range(MAX_OUTBOX + 2):
            watched.step()
            watched.watchers.look()
        frame = await next_frame(slow)
        assert frame.is_whole
        assert [each.request_id for each in frame.memory.sequences] == ["request-1"]


async def test_watchers_are_bounded(watched):
    async with AsyncExitStack() as stack:
        watching = [aclosing(watched.watchers.frames(wants_memory=False)) for _ in range(32)]
        frames = [await stack.enter_async_context(each) for each in watching]
        await asyncio.gather(*map(next_frame, frames))
        with pytest.raises(ResourceExhausted) as raised:
            await anext(watched.watchers.frames(wants_memory=False))
        assert raised.value.reason == "WATCHERS"


async def test_copies_forks_and_swaps_are_events(watched):
    async with aclosing(watched.watchers.frames(wants_memory=True)) as frames:
        await next_frame(frames)
        watched.driver.submit(make_request(1, prompt_len=7, max_tokens=20, num_sequences=2))
        for _ in range(3):
            watched.step()
        watched.watchers.look()
        watched.driver.preempt(make_request(1))
        watched.watchers.look()
        for _ in range(2):
            watched.step()
        watched.watchers.look()
        kinds = set()
        while len(kinds) < 5:
            frame = await next_frame(frames)
            kinds |= {kind for kind, *_ in triples(frame.memory.events, 4)}
    assert kinds == set(scheduler_pb2.MemoryEvent.values()) - {0}
