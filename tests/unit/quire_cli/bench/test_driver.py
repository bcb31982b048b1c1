"""The driver with a fake server."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

from quire.load import Chat, Constant, LoadRequest, fixed, take, with_arrivals
from quire.load.arrivals import Trace
from quire_cli.bench import driver as driver_module
from quire_cli.bench.driver import Answer, Chunks, Driver, Outcome, Pacing, RequestFailedError, ServerFacts

AT_ONCE = Pacing(None, is_closed=False, duration_s=None, timeout_s=60)


class FakeServer:
    """Answers each request with two tokens, except for the indices in `failing` or `hanging`."""

    def __init__(self, failing: Sequence[int] = (), hanging: Sequence[int] = ()) -> None:
        self.failing = failing
        self.hanging = hanging
        self.sent: list[tuple[int, Any]] = []
        self.num_running = self.max_running = 0
        self.num_cancelled = 0

    async def connect(self) -> ServerFacts:
        return ServerFacts("fake", 1000, 512, {})

    async def send(self, request: LoadRequest, chunks: Chunks, history: Any) -> Answer:
        self.sent.append((request.index, history))
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            await asyncio.sleep(0)
            if request.index in self.hanging:
                await asyncio.Event().wait()
            if request.index in self.failing:
                raise RequestFailedError("REFUSED", f"not request {request.index}")
            chunks.add(0, 1)
            chunks.add(0, 1)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        finally:
            self.num_running -= 1
        return Answer(None, 3, 0, history=request.index, draft_tokens=4, accepted_draft_tokens=3)

    async def close(self) -> None:
        pass


async def drive(server: FakeServer, load: Sequence[LoadRequest], pacing: Pacing = AT_ONCE) -> Outcome:
    driver = Driver(server, pacing, lambda *_: None)
    await driver.run(load)
    return driver.outcome


def make_load(num_requests: int) -> list[LoadRequest]:
    return take(fixed(5, 2, 1000), num_requests, seed=0)


def make_conversations() -> list[LoadRequest]:
    """Two conversations of three turns each."""
    load = take(Chat(Constant(4), Constant(2), 512, 1000, max_prompt_len=100, mean_turns=1e6, max_turns=3), 6, seed=0)
    assert [request.turn for request in load] == [0, 1, 2, 0, 1, 2]
    return load


async def test_requests_are_sent_when_they_arrive_and_no_more_at_once_than_allowed() -> None:
    server = FakeServer()
    outcome = await drive(server, make_load(20), replace(AT_ONCE, max_concurrency=3, is_closed=True))
    assert server.max_running == 3
    assert len(outcome.records) == 20
    # Requests arrive when there is a slot.
    arrivals = sorted(record.arrival_s for record in outcome.records)
    ends = sorted(record.end_s for record in outcome.records)
    assert all(end <= arrival for end, arrival in zip(ends[:-3], arrivals[3:], strict=True))
    # Without a closed loop they arrive at their times; latencies count from there, and time is limited.
    load, server = with_arrivals(make_load(4), Trace((0.0, 0.02, 0.05, 0.06)), seed=0), FakeServer(hanging=[3])
    outcome = await drive(server, load, replace(AT_ONCE, timeout_s=0.1))
    assert [record.arrival_s for record in outcome.records] == [0.0, 0.02, 0.05, 0.06]
    for record in outcome.records[:3]:
        assert record.sent_s is not None
        assert record.arrival_s <= record.sent_s <= record.chunk_times_s[0] <= record.end_s
    assert [record.error for record in outcome.records] == [None] * 3 + ["TIMEOUT"]
    assert server.num_cancelled == 1


async def test_a_turn_follows_the_one_before_and_none_follows_one_that_failed() -> None:
    server = FakeServer(failing=[1])
    outcome = await drive(server, make_conversations())
    errors = {record.index: record.error for record in outcome.records}
    assert errors == {0: None, 1: "REFUSED", 2: "EARLIER_TURN_FAILED", 3: None, 4: None, 5: None}
    # Each turn is sent with the history of the earlier ones.
    assert sorted(server.sent) == [(0, None), (1, 0), (3, None), (4, 3), (5, 4)]
    assert outcome.messages == {"REFUSED": "not request 1"}
    assert outcome.counters == {"draft_tokens": 16, "accepted_draft_tokens": 12}


async def test_a_run_that_is_cancelled_cancels_its_requests_and_keeps_what_has_ended() -> None:
    server, enough = FakeServer(hanging=[2, 5]), asyncio.Event()

    def look(num_ended: int, num_failed: int) -> None:
        assert num_failed == 0
        if num_ended == 6:
            enough.set()

    driver = Driver(server, AT_ONCE, look)
    running = asyncio.create_task(driver.run(make_load(8)))
    await enough.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(record.index for record in driver.outcome.records) == [0, 1, 3, 4, 6, 7]
    assert driver.outcome.num_sent == 8
    assert server.num_cancelled == 2


async def test_nothing_is_sent_after_the_duration(monkeypatch: pytest.MonkeyPatch) -> None:
    server = FakeServer()
    # Each reading of the clock is a millisecond after the last one.
    clock = count(0, 0.001)
    monkeypatch.setattr(driver_module, "time", SimpleNamespace(perf_counter=lambda: next(clock), process_time=float))

    def endless():
        index = 0
        while True:
            yield LoadRequest(index, make_load(1)[0].prompt, 2)
            index += 1

    driver = Driver(server, Pacing(2, is_closed=True, duration_s=0.05, timeout_s=60), lambda *_: None)
    await driver.run(endless())
    records = driver.outcome.records
    assert len(records) == driver.outcome.num_sent > 2
    assert all(record.arrival_s < 0.05 for record in records)


def test_tokens_that_are_known_at_the_end_are_spread_over_what_came() -> None:
    chunks = Chunks(0.0)
    for _ in range(3):
        chunks.add(0, 1)
    chunks.spread(8)
    assert sum(chunks.tokens) == 8
    assert max(chunks.tokens) - min(chunks.tokens) <= 1
    alone = Chunks(0.0)
    alone.spread(5)
    assert (alone.tokens, len(alone.times)) == ([5], 1)
