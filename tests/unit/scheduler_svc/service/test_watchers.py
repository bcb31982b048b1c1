"""Who watches gets frames, and nobody waits for who does not read them."""

import asyncio
from contextlib import AsyncExitStack, aclosing

import pytest

from quire.rpc.errors import ResourceExhausted
from quire.scheduler.v1 import scheduler_pb2
from scheduler_svc.core.beam_search import BeamParameters
from scheduler_svc.core.config import PreemptionMode
from scheduler_svc.service.watch_messages import ReplicaNow
from scheduler_svc.service.watchers import Watchers
from tests.support.core_driver import Driver, make_config, make_request

MAX_OUTBOX = 4


class Watched:
    """A core, and who watches it; frames are made when the test says so."""

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
            self.watchers.answered(plan.step_id, self.driver.clock)


@pytest.fixture
def watched() -> Watched:
    return Watched(Driver(make_config(num_host_blocks=16, preemption_mode=PreemptionMode.SWAP)))


async def next_frame(frames) -> scheduler_pb2.WatchResponse:
    async with asyncio.timeout(30):
        return await anext(frames)


def triples(data: bytes, width: int) -> list[tuple[int, ...]]:
    values = memoryview(data).cast("i").tolist()
    return [tuple(values[start : start + width]) for start in range(0, len(values), width)]


async def test_the_first_frame_is_whole_and_the_next_has_what_changed(watched):
    watched.driver.submit(make_request(1, prompt_len=7, max_tokens=9))
    watched.step()
    async with aclosing(watched.watchers.frames(wants_memory=True)) as frames:
        first = await next_frame(frames)
        assert first.is_whole
        assert [each.request_id for each in first.memory.sequences] == ["request-1"]
        assert triples(first.memory.tables, 3) == [(1, 0, 0), (1, 1, 1)]
        watched.step()
        watched.step()
        second = await next_frame(frames)
        while not second.memory.tables:
            second = await next_frame(frames)
        assert not second.is_whole
        assert triples(second.memory.tables, 3) == [(1, 2, 2)]
        assert [each.num_decodes for each in second.steps] == [1, 1]
        assert [each.step_id for each in second.answers] == [2, 3]
        assert second.numbers.steps == 2


async def test_numbers_alone_have_no_memory(watched):
    watched.driver.submit(make_request(1))
    async with aclosing(watched.watchers.frames(wants_memory=False)) as frames:
        frame = await next_frame(frames)
    assert frame.is_whole
    assert not frame.HasField("memory")
    assert (frame.numbers.num_blocks, frame.numbers.waiting_requests) == (64, 1)
    assert [each.reason for each in frame.waiting] == [scheduler_pb2.WAIT_REASON_NEXT_STEP]


async def test_nothing_is_kept_when_nobody_watches(watched):
    async with aclosing(watched.watchers.frames(wants_memory=True)) as frames:
        await next_frame(frames)
        assert watched.watchers.are_any
    assert not watched.watchers.are_any
    assert watched.watchers._task is None


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
        for _ in range(32):
            frames = await stack.enter_async_context(aclosing(watched.watchers.frames(wants_memory=False)))
            await next_frame(frames)
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


async def test_beams_are_marked(watched):
    beam = BeamParameters(2)
    watched.driver.submit(make_request(1, num_sequences=2, num_returned=1, beam=beam))
    watched.step()
    async with aclosing(watched.watchers.frames(wants_memory=True)) as frames:
        frame = await next_frame(frames)
    assert [(each.is_beam, each.sequence_index) for each in frame.memory.sequences] == [(True, 0), (True, 1)]
