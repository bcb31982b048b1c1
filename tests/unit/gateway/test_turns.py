"""Long work of many concurrent calls leaves the event loop to others, and tenants get equal turns."""

import asyncio
from collections.abc import Callable

import pytest

from gateway import turns
from gateway.turns import TenantQueue, TenantTurns, Turns


@pytest.fixture(autouse=True)
def short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A turn is one piece of work."""
    monkeypatch.setattr(turns, "_TURN_S", 0.0)


def in_pieces(log: list[str], name: str, count: int) -> Callable[[], bool]:
    left = iter(range(count - 1, -1, -1))

    def work() -> bool:
        log.append(name)
        return next(left) == 0

    return work


async def test_tenants_take_turns_however_many_calls_each_has():
    shared, log = TenantTurns(), list[str]()
    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(shared.do("flood", in_pieces(log, "flood", 5)))
        group.create_task(shared.do("quiet", in_pieces(log, "quiet", 5)))
    assert len(log) == 105
    assert log[:14].count("quiet") == 5


async def test_a_call_that_is_cancelled_passes_its_turn_on():
    shared, log = TenantTurns(), list[str]()
    calls = [asyncio.create_task(shared.do("acme", in_pieces(log, str(number), 3))) for number in range(6)]
    await asyncio.sleep(0)
    # One call that has just been given its turn, and one that waits.
    for call in (calls[1], calls[4]):
        call.cancel()
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [outcome is None for outcome in outcomes] == [True, False, True, True, False, True]
    await shared.do("acme", in_pieces(log, "last", 1))
    assert log[-1] == "last"


async def test_one_that_leaves_the_queue_does_not_count_and_gives_its_place_on() -> None:
    queue, gate = TenantQueue(), asyncio.Event()

    async def work() -> None:
        async with queue.place("a"):
            await gate.wait()

    first, left, second, third = (asyncio.create_task(work()) for _ in range(4))
    await asyncio.sleep(0)
    assert queue.num_waiting == {"a": 3}
    left.cancel()
    await asyncio.wait([left])
    assert queue.num_waiting == {"a": 2}
    second.cancel()
    gate.set()
    await asyncio.wait_for(asyncio.gather(first, third), timeout=10)
    with pytest.raises(asyncio.CancelledError):
        await second


async def test_functions_that_cannot_pause_run_one_at_a_time_tenants_in_turn_whether_or_not_they_fail() -> None:
    shared, log = TenantTurns(), list[str]()

    def parse(name: str) -> str:
        log.append(name)
        if name == "wrong":
            raise ValueError(name)
        return name.upper()

    tenants = ["flood", "flood", "flood", "flood", "quiet"]
    names = ["one", "wrong", "three", "four", "other"]
    calls = [asyncio.create_task(shared.call(tenant, parse, name)) for tenant, name in zip(tenants, names, strict=True)]
    most_at_once = 0
    while not all(call.done() for call in calls):
        before = len(log)
        await asyncio.sleep(0)
        most_at_once = max(most_at_once, len(log) - before)
    assert most_at_once == 1
    assert sorted(log) == sorted(names)
    # Not after all calls of the other tenant.
    assert log.index("other") < 3
    assert [repr(call.exception()) if call.exception() else call.result() for call in calls] == [
        "ONE",
        "ValueError('wrong')",
        "THREE",
        "FOUR",
        "OTHER",
    ]


async def test_of_many_long_works_one_has_a_turn_in_each_iteration_of_the_loop():
    log: list[str] = []

    async def work(name: str) -> None:
        own = Turns()
        for _ in range(3):
            log.append(name)
            await own.pause()

    works = [asyncio.create_task(work(str(number))) for number in range(20)]
    works[7].cancel()
    await asyncio.sleep(0)
    del log[:]
    while not all(each.done() for each in works):
        log.append("iteration")
        await asyncio.sleep(0)
    turns_between = [len(each.split()) for each in " ".join(log).split("iteration")]
    assert max(turns_between) == 1
    assert sum(turns_between) == 19 * 2
